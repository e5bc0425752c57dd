"""Cases of the Triton routing map, permute and combine for the interpreter; run by
test_moe_permute.py. The interpreter truncates to bfloat16, so only exact sums are taken in it."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels import moe_permute_triton, moe_routing_triton
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.moe_permute import (
    combine,
    combine_reference,
    permute,
    permute_reference,
)
from megacomposer.kernels.moe_routing import RoutingMap, routing_map, routing_map_torch

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.fixture(autouse=True)
def _triton_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")


def _assert_same_map(ids: torch.Tensor, experts: int) -> None:
    ours, plain = routing_map(ids, experts), routing_map_torch(ids, experts)
    for name in ("order", "token_of_row", "row_of_TK", "rows_per_expert"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
        assert getattr(ours, name).dtype == torch.int64


def _ids(tokens: int, choices: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens + choices)
    return torch.randint(experts, (tokens, choices), generator=generator)


# One pair; a block of pairs and one more; many blocks; more experts than a program holds at once.
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [(1, 1, 1), (43, 3, 5), (65, 2, 128), (173, 8, 33), (30, 4, 1500)],
)
def test_map_equals_that_of_a_stable_sort(tokens: int, choices: int, experts: int) -> None:
    _assert_same_map(_ids(tokens, choices, experts), experts)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_map_takes_ids_of_every_integer_dtype(dtype: torch.dtype) -> None:
    _assert_same_map(_ids(50, 4, 100).to(dtype), 300)


def test_counts_are_carried_from_one_step_of_the_scan_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_routing_triton, "_SCAN_BLOCKS", 4)
    _assert_same_map(_ids(300, 4, 11), 11)


@pytest.mark.parametrize("kind", ["one_expert", "last_expert_alone", "duplicates", "most_empty"])
def test_map_of_lopsided_routing(kind: str) -> None:
    ids = {
        "one_expert": torch.zeros(100, 2, dtype=torch.int64),
        "last_expert_alone": torch.full((100, 2), 39),
        "duplicates": _ids(100, 1, 40).expand(100, 3),
        "most_empty": _ids(100, 2, 4) * 10,
    }[kind]
    _assert_same_map(ids, 40)


@pytest.mark.parametrize("layout", ["transposed", "every_other", "expanded_tokens"])
def test_map_of_strided_ids(layout: str) -> None:
    ids = {
        "transposed": _ids(3, 90, 7).T,
        "every_other": _ids(180, 10, 7)[::2, 1::3],
        "expanded_tokens": _ids(1, 3, 7).expand(90, 3),
    }[layout]
    _assert_same_map(ids, 7)


def test_map_of_zero_tokens_is_empty() -> None:
    _assert_same_map(torch.empty(0, 4, dtype=torch.int32), 6)


@pytest.mark.parametrize("bad", [-1, 4, 2**32])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.3"):
        routing_map(torch.tensor([[0, bad]]), 4)


def _results(permute_fn, combine_fn, x, routing: RoutingMap, probs, grad) -> list[torch.Tensor]:
    """Rows, outputs and all gradients; the rows' own arrives by way of x."""
    leaves = [t for t in (x, probs) if t is not None]
    leaves = [t.detach().requires_grad_() for t in leaves]
    rows = permute_fn(leaves[0], routing)
    out = combine_fn(rows, routing, x.shape[0], *leaves[1:])
    return [rows.detach(), out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _case(tokens: int, choices: int, hidden: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(hidden + choices)
    x, grad = (torch.randn(tokens, hidden, generator=generator).to(dtype) for _ in range(2))
    probs = torch.rand(tokens, choices, generator=generator)
    return x, routing_map(_ids(tokens, choices, 5), 5), probs, grad


SHAPES = [(1, 1, 1), (5, 3, 7), (3, 8, 96), (4, 11, 33), (2, 16, 1030), (2, 2, 2568)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "choices", "hidden"), SHAPES)
def test_without_probs_every_bit_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, choices: int, hidden: int, dtype: torch.dtype
) -> None:
    x, routing, _, grad = _case(tokens, choices, hidden, dtype)
    ours = _results(permute, combine, x, routing, None, grad)
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "torch")
    for a, b in zip(ours, _results(permute, combine, x, routing, None, grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "choices", "hidden"), SHAPES)
def test_with_probs_results_round_once(
    tokens: int, choices: int, hidden: int, dtype: torch.dtype
) -> None:
    x, routing, probs, grad = _case(tokens, choices, hidden, dtype)
    ours = _results(permute, combine, x, routing, probs, grad)
    wide = [t.double() for t in (x, probs, grad)]
    exact = _results(permute_reference, combine_reference, wide[0], routing, *wide[1:])
    # dx is the sum of d rows that have been rounded themselves.
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    for a, e in zip(ours, exact, strict=True):
        assert relative_error(a, e) < limit
    assert ours[-1].dtype == torch.float32
    assert ours[1].dtype == ours[2].dtype == dtype


def test_bfloat16_bits_are_copied_and_exact_sums_are_exact() -> None:
    x, routing, _, _ = _case(5, 4, 72)
    x = (8 * x).round().bfloat16()
    assert torch.equal(permute(x, routing), x[routing.token_of_row])
    rows, out, dx, _ = _results(permute, combine, x, routing, torch.full((5, 4), 0.5), x)
    assert torch.equal(rows, x[routing.token_of_row])
    assert torch.equal(out, 2 * x)
    assert torch.equal(dx, 2 * x)


def test_gradient_longer_than_a_block_is_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    x, routing, probs, grad = _case(3, 3, 70)
    whole = _results(permute, combine, x, routing, probs, grad)
    monkeypatch.setattr(moe_permute_triton, "_DOT_BLOCK_BYTES", 64)
    for a, b in zip(whole, _results(permute, combine, x, routing, probs, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_operands_that_do_not_start_at_16_bytes_change_no_bit(shift: int) -> None:
    x, routing, probs, grad = _case(4, 2, 40)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_zeros(shift), t.flatten()])[shift:].view_as(t)

    dense = _results(permute, combine, x, routing, probs, grad)
    strided = _results(permute, combine, moved(x), routing, moved(probs), moved(grad))
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))


@pytest.mark.parametrize("layout", ["column_slice", "transposed", "expanded_rows", "expanded_all"])
def test_strided_and_expanded_operands_equal_dense_ones(layout: str) -> None:
    tokens, choices, hidden = 6, 3, 40
    make = {
        "column_slice": lambda rows, columns: torch.randn(rows, columns + 9)[:, 5 : columns + 5],
        "transposed": lambda rows, columns: torch.randn(columns, rows).T,
        "expanded_rows": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
        "expanded_all": lambda rows, columns: torch.randn(()).expand(rows, columns),
    }[layout]
    x, rows = make(tokens, hidden), make(tokens * choices, hidden)
    grad_out, grad_rows = make(tokens, hidden), make(tokens * choices, hidden)
    probs = make(tokens, choices)
    routing = routing_map(_ids(tokens, choices, 5), 5)

    def run(x, rows, probs, grad_out, grad_rows) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, rows, probs)]
        outs = [permute(leaves[0], routing), combine(leaves[1], routing, tokens, leaves[2])]
        return [*outs, *torch.autograd.grad(outs, leaves, [grad_rows, grad_out])]

    operands = (x, rows, probs, grad_out, grad_rows)
    for a, b in zip(run(*operands), run(*(t.contiguous() for t in operands)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("rows_grad", "probs_grad"), [(True, False), (False, True)])
def test_frozen_operand_gets_no_gradient_and_the_other_is_unchanged(
    rows_grad: bool, probs_grad: bool
) -> None:
    _, routing, probs, grad = _case(6, 3, 40)
    rows = torch.randn(18, 40)

    def run(*needs: bool) -> list[torch.Tensor | None]:
        leaves = [
            t.detach().requires_grad_(need) for t, need in zip((rows, probs), needs, strict=True)
        ]
        combine(leaves[0], routing, 6, leaves[1]).backward(grad)
        return [t.grad for t in leaves]

    for got, full, need in zip(
        run(rows_grad, probs_grad), run(True, True), (rows_grad, probs_grad), strict=True
    ):
        assert torch.equal(got, full) if need else got is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_probs_of_another_dtype_get_a_gradient_in_it(dtype: torch.dtype) -> None:
    x, routing, probs, grad = _case(6, 3, 40)
    _, out, _, dprobs = _results(permute, combine, x, routing, probs.to(dtype), grad)
    assert out.dtype == torch.float32
    assert dprobs.dtype == dtype
    exact = (x.double() * grad.double()).sum(dim=1, keepdim=True).expand(6, 3)
    assert relative_error(dprobs, exact) < (1e-3 if dtype == torch.float16 else 1e-6)


def test_zero_tokens_keep_the_graph_and_give_zero_gradients() -> None:
    routing = routing_map(torch.empty(0, 3, dtype=torch.int64), 5)
    x = torch.empty(0, 8, requires_grad=True)
    probs = torch.empty(0, 3, requires_grad=True)
    scale = torch.ones(8, requires_grad=True)
    out = combine(permute(x * scale, routing), routing, 0, probs)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert torch.equal(scale.grad, torch.zeros(8))
    assert x.grad.shape == (0, 8)
    assert probs.grad.shape == (0, 3)


def test_override_really_selects_triton_and_refuses_what_it_cannot_take() -> None:
    x, routing, _, _ = _case(4, 2, 8)
    assert permute(x.requires_grad_(), routing).grad_fn.implementation == "triton"
    with pytest.raises(ValueError, match="cannot run in Triton"):
        permute(x.double(), routing)


@pytest.mark.parametrize("choices", [1, 3, 8])
def test_pair_without_a_row_is_written_or_added(choices: int) -> None:
    """The last expert stands for none: its pairs have row numbers past the end."""
    ids = _ids(29, choices, 5)
    map = routing_map(ids, 5).without_last_expert(int((ids < 4).sum()))
    x = torch.randn(29, 40, generator=torch.Generator().manual_seed(3))
    rows = permute(x, map)
    assert torch.equal(rows, x[map.token_of_row])
    sums = combine(rows, map, 29)
    torch.testing.assert_close(sums, x * (ids < 4).sum(1, keepdim=True))
