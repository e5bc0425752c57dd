"""The routing map against plain Python, and the ids that it must not accept."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.moe_routing import RoutingMap, routing_map, routing_map_reference

_TENSORS = ("order", "token_of_row", "row_of_TK", "rows_per_expert")


def _equal(a: RoutingMap, b: RoutingMap) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in _TENSORS)


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.int16, torch.uint8, torch.uint32]
)
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(0, 3, 4), (1, 1, 1), (7, 2, 3), (50, 4, 16), (5, 2, 60)]
)
def test_map_equals_the_plain_one(tokens: int, choices: int, experts: int, dtype) -> None:
    torch.manual_seed(tokens)
    ids = torch.randint(experts, (tokens, choices)).to(dtype)
    routing = routing_map(ids, experts)
    assert _equal(routing, routing_map_reference(ids, experts))
    assert routing.num_tokens == tokens
    assert int(routing.rows_per_expert.sum()) == tokens * choices
    assert {getattr(routing, name).dtype for name in _TENSORS} == {torch.int64}


def test_rows_of_an_expert_are_in_token_order_whatever_the_sort_does_with_ties() -> None:
    routing = routing_map(torch.tensor([[2, 0], [0, 2], [2, 2]]), 4)
    assert routing.order.tolist() == [1, 2, 0, 3, 4, 5]
    assert routing.token_of_row.tolist() == [0, 1, 0, 1, 2, 2]
    assert routing.row_of_TK.tolist() == [[2, 0], [1, 3], [4, 5]]
    assert routing.rows_per_expert.tolist() == [2, 0, 4, 0]


def test_all_tokens_on_one_expert_leave_the_others_empty() -> None:
    routing = routing_map(torch.full((1000, 1), 5), 8)
    assert routing.rows_per_expert.tolist() == [0, 0, 0, 0, 0, 1000, 0, 0]
    assert torch.equal(routing.order, torch.arange(1000))


def test_transposed_ids_are_read_in_their_logical_order() -> None:
    ids = torch.randint(6, (3, 9))
    assert _equal(routing_map(ids.T, 6), routing_map(ids.T.contiguous(), 6))


@pytest.mark.parametrize("bad", [-1, 4, 2**32])
def test_id_of_no_expert_is_refused_not_sorted_past_the_last_row(bad: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.3"):
        routing_map(torch.tensor([[0, bad]]), 4)


@pytest.mark.parametrize(
    "ids",
    [
        torch.zeros(2, 2),
        torch.zeros(2, 2).bool(),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(2, 0).long(),
    ],
)
def test_ids_of_another_kind_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="integer"):
        routing_map(ids, 4)


def test_pair_of_the_last_expert_keeps_a_row_after_it_was_left_out() -> None:
    """The last expert stands for none: experts on other ranks, say."""
    ids = torch.tensor([[0, 3, 3], [3, 1, 3], [3, 3, 3], [1, 1, 0]])
    whole = routing_map(ids, 4)
    part = whole.without_last_expert(5)
    assert part.rows_per_expert.tolist() == [2, 3, 0]
    assert part.token_of_row.tolist() == [0, 3, 1, 3, 3]
    assert torch.equal(part.row_of_TK < 5, ids < 3)
    assert torch.equal(part.row_of_TK.flatten()[part.order], torch.arange(5))


@pytest.mark.parametrize("ids_rise", [False, True])
def test_rising_rows_are_sorted_only_if_ids_are_not_known_to_rise(ids_rise: bool) -> None:
    ids = torch.tensor([[0, 2], [1, 2], [0, 1]])
    map = routing_map(ids if ids_rise else ids.flip(1), 3, ids_rise=ids_rise)
    assert (map.rising_rows_TK is map.row_of_TK) == ids_rise
    assert torch.equal(map.rising_rows_TK, routing_map(ids, 3).row_of_TK)
