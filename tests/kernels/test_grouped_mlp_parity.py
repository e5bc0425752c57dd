"""The grouped expert MLP against a float64 loop, on both of its matrix product paths.

torch has a CPU kernel for `torch._grouped_mm`, so the code of the CUDA path runs here too; what it
does on a GPU is tested in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels import grouped_mlp
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.grouped_products import ExpertLoop, GroupedMm
from megacomposer.kernels.moe_routing import RoutingMap, routing_map

HIDDEN, INNER = 16, 24
# Rows of each expert; with K = 1 the tokens come in a shuffled order.
COUNTS = [[4, 3, 2], [0, 5, 0, 3], [0, 0, 6], [7, 0, 0], [0, 0, 0], [1]]
WHOLE, THREE_ROWS = 2**28, 3 * HIDDEN * 4


def test_triton_kernels_agree_with_the_formula(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("swiglu_cases.py")


@pytest.fixture(params=["loop", "grouped_mm"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of matrix products, whatever the dispatch rule would take."""
    monkeypatch.setattr(grouped_mlp, "use_grouped_mm", lambda *_: request.param == "grouped_mm")
    return request.param


@pytest.fixture(params=[WHOLE, THREE_ROWS], ids=["whole", "three_rows"])
def ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once, and ranges of rows that cut experts in two."""
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", request.param)


def _map(counts: list[int]) -> RoutingMap:
    generator = torch.Generator().manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return routing_map(ids[torch.randperm(len(ids), generator=generator)][:, None], len(counts))


def _random_map(tokens: int, choices: int, experts: int) -> RoutingMap:
    generator = torch.Generator().manual_seed(2)
    return routing_map(torch.randint(experts, (tokens, choices), generator=generator), experts)


def _operands(map: RoutingMap, dtype=torch.float32, hidden: int = HIDDEN, inner: int = INNER):
    tokens, experts = map.num_tokens, map.rows_per_expert.shape[0]
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden)
    gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    down = torch.randn(experts, hidden, inner) / inner**0.5
    return [t.to(dtype).requires_grad_() for t in (x, gate_up, down)]


def _run(fn, operands, map, probs, grad, wide=lambda t: t):
    leaves = [wide(t.detach()).clone().requires_grad_() for t in operands]
    probs = None if probs is None else wide(probs.detach()).clone().requires_grad_()
    out = fn(*leaves, map, probs)
    out.backward(wide(grad))
    return [out.detach(), *(t.grad for t in (*leaves, probs) if t is not None)]


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_gradients_match_the_formula(
    counts: list[int], with_probs: bool, products: str, ranges: None, poisoned_memory: None
) -> None:
    map = _map(counts)
    operands = _operands(map)
    probs = torch.rand(sum(counts), 1) if with_probs else None
    grad = torch.randn(sum(counts), HIDDEN)
    got = _run(grouped_swiglu, operands, map, probs, grad)
    exact = _run(grouped_swiglu_reference, operands, map, probs, grad, torch.Tensor.double)
    for a, e in zip(got, exact, strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) < 2e-6


@pytest.mark.parametrize("choices", [2, 3])
def test_tokens_of_several_experts_match_the_formula(
    choices: int, products: str, ranges: None, poisoned_memory: None
) -> None:
    map = _random_map(7, choices, 5)
    operands, probs, grad = _operands(map), torch.rand(7, choices), torch.randn(7, HIDDEN)
    got = _run(grouped_swiglu, operands, map, probs, grad)
    exact = _run(grouped_swiglu_reference, operands, map, probs, grad, torch.Tensor.double)
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < 2e-6


def test_columns_in_several_ranges_match_the_formula(
    products: str, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    map = _random_map(6, 2, 3)
    operands = _operands(map, hidden=200)
    probs, grad = torch.rand(6, 2), torch.randn(6, 200)
    whole = _run(grouped_swiglu, operands, map, probs, grad)
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", 12 * 64 * 4)
    for a, b in zip(_run(grouped_swiglu, operands, map, probs, grad), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_ranges_of_rows_do_not_change_a_bit_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    map = routing_map(torch.tensor([[2, 0, 1], [1, 2, 0], [0, 2, 1], [2, 1, 0]]), 3)
    operands, probs, grad = _operands(map), torch.rand(4, 3), torch.randn(4, HIDDEN)
    whole = _run(grouped_swiglu, operands, map, probs, grad)
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", 4 * HIDDEN * 4)  # one expert a range
    for a, b in zip(_run(grouped_swiglu, operands, map, probs, grad), whole, strict=True):
        assert torch.equal(a, b)


def test_experts_without_rows_get_exactly_zero_weight_gradients(
    products: str, ranges: None, poisoned_memory: None
) -> None:
    map = _map([0, 5, 0, 3])
    _, _, dgate_up, ddown = _run(grouped_swiglu, _operands(map), map, None, torch.ones(8, HIDDEN))
    for gradient in (dgate_up, ddown):
        assert not gradient[[0, 2]].any()
        assert gradient[[1, 3]].abs().amin(dim=(1, 2)).min() > 0


def test_zero_tokens_keep_the_graph_and_give_zero_weight_gradients(
    products: str, poisoned_memory: None
) -> None:
    map = _map([0, 0])
    operands = _operands(map)
    probs = torch.empty(0, 1, requires_grad=True)
    y = grouped_swiglu(*operands, map, probs)
    assert y.shape == (0, HIDDEN)
    y.sum().backward()
    assert probs.grad.shape == (0, 1)
    assert operands[0].grad.shape == (0, HIDDEN)
    for weight in operands[1:]:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_within_its_rounding(
    dtype: torch.dtype, products: str, ranges: None
) -> None:
    map = _random_map(16, 2, 3)
    operands = _operands(map, dtype)
    probs, grad = torch.rand(16, 2), torch.randn(16, HIDDEN).to(dtype)
    got = _run(grouped_swiglu, operands, map, probs, grad)
    exact = _run(grouped_swiglu_reference, operands, map, probs, grad, torch.Tensor.double)
    limit = 3 * torch.finfo(dtype).eps
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < limit
    assert got[-1].dtype == torch.float32


def test_inputs_far_below_one_are_no_excuse_for_error(products: str) -> None:
    """An absolute tolerance hides garbage where x is 0.02 randn (sonic-moe issue 63)."""
    map = _random_map(16, 2, 3)
    x, gate_up, down = (t.detach() * 0.02 for t in _operands(map, torch.bfloat16))
    grad = torch.randn(16, HIDDEN).bfloat16() * 0.02
    got = _run(grouped_swiglu, (x, gate_up, down), map, None, grad)
    exact = _run(grouped_swiglu_reference, (x, gate_up, down), map, None, grad, torch.Tensor.double)
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < 3 * torch.finfo(torch.bfloat16).eps


def test_expanded_gradient_equals_the_dense_one(products: str, ranges: None) -> None:
    map = _random_map(8, 2, 3)
    operands = _operands(map)
    expanded = _run(grouped_swiglu, operands, map, None, torch.ones(()).expand(8, HIDDEN))
    dense = _run(grouped_swiglu, operands, map, None, torch.ones(8, HIDDEN))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_strided_and_misaligned_operands_equal_dense_ones(products: str, ranges: None) -> None:
    map = _random_map(8, 2, 2)
    x, gate_up, down = (t.detach() for t in _operands(map, torch.bfloat16))
    probs, grad = torch.rand(8, 2), torch.randn(8, HIDDEN).bfloat16()
    strided = [
        torch.cat([x[:, :3], x], dim=1)[:, 3:],  # rows 38 bytes apart, start 6 bytes off
        torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up),
        torch.cat([down, down], dim=0)[::1][2:].mT.contiguous().mT,
    ]

    def run(operands, probs):
        leaves = [t.detach().requires_grad_() for t in operands]
        y = grouped_swiglu(*leaves, map, probs)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    apart = torch.stack([probs, probs], dim=-1)[..., 0]
    for a, b in zip(run(strided, apart), run((x, gate_up, down), probs), strict=True):
        torch.testing.assert_close(a, b)


def test_an_expert_never_sees_the_tokens_of_another(ranges: None) -> None:
    map = routing_map(torch.tensor([0, 1, 2, 1, 0, 1, 2])[:, None], 3)
    operands = _operands(map)
    grad = torch.randn(7, HIDDEN)
    clean = _run(grouped_swiglu, operands, map, None, grad)
    spoiled = [t.detach().clone() for t in operands]
    spoiled[0][[1, 3, 5]] = float("nan")
    dirty = _run(grouped_swiglu, spoiled, map, None, grad)
    others = torch.tensor([0, 2, 4, 6])
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        assert torch.equal(a[others], b[others])
    for a, b in zip(clean[2:], dirty[2:], strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_gate_is_the_first_half_and_up_the_second() -> None:
    x = torch.ones(1, 1)
    gate_up = torch.tensor([[[2.0], [5.0]]])
    y = grouped_swiglu(x, gate_up, torch.ones(1, 1, 1), routing_map(torch.tensor([[0]]), 1))
    torch.testing.assert_close(y, torch.nn.functional.silu(torch.tensor([[2.0]])) * 5)


def test_gradients_are_those_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    map = routing_map(torch.tensor([[2, 0], [0, 0], [3, 2]]), 4)
    operands = _operands(map, torch.float64, hidden=3, inner=2)
    probs = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: grouped_swiglu(*a, map), operands)
    monkeypatch.setattr(grouped_mlp, "_GATHER_BYTES", 4 * 3 * 8)
    assert torch.autograd.gradcheck(
        lambda *a: grouped_swiglu(*a[:3], map, a[3]), (*operands, probs)
    )


def test_frozen_operands_get_no_gradient_and_the_others_are_unchanged() -> None:
    map = _random_map(5, 2, 3)
    probs, grad = torch.rand(5, 2), torch.randn(5, HIDDEN)
    operands = [*(t.detach() for t in _operands(map)), probs]

    def results(trained: set[int]):
        leaves = [t.clone().requires_grad_(i in trained) for i, t in enumerate(operands)]
        grouped_swiglu(*leaves[:3], map, leaves[3]).backward(grad)
        return [t.grad for t in leaves]

    full = results({0, 1, 2, 3})
    for trained in ({0}, {1}, {2}, {3}, {0, 2}):
        for i, gradient in enumerate(results(trained)):
            assert torch.equal(gradient, full[i]) if i in trained else gradient is None


def test_nothing_but_tokens_preactivations_and_probs_is_saved(ranges: None) -> None:
    map = _random_map(9, 3, 4)
    operands, probs = _operands(map), torch.rand(9, 3)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        grouped_swiglu(*operands, map, probs)
    known = {t.data_ptr() for t in operands}
    made = [t.shape for t in saved if t.data_ptr() not in known]
    assert sorted(made) == [(27,), (27, 2 * INNER)]


def test_row_counts_that_miss_rows_are_refused_not_left_unwritten() -> None:
    with pytest.raises(ValueError, match="sums to 4 but the map has 5 rows"):
        ExpertLoop(torch.tensor([1, 3]), 5, 2)
    with pytest.raises(RuntimeError):
        GroupedMm(torch.tensor([1, 3]), 5, 2)


def test_operands_that_do_not_fit_together_are_refused() -> None:
    map = _map([2, 3])
    x, gate_up, down = _operands(map)
    bad = [
        (x, gate_up[:, :-1], down, map),
        (x[:4], gate_up, down, map),
        (x, gate_up, down[:1], map),
        (x, gate_up, down, _map([2, 2, 1])),
        (x.bfloat16(), gate_up, down, map),
        (x, gate_up, down, map, torch.ones(5)),
        (x, gate_up[:0], down[:0], map),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="grouped_swiglu: want"):
            grouped_swiglu(*arguments)
