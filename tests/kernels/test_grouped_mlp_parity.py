"""The grouped expert MLP against a float64 loop, on both of its matrix product paths.

torch has a CPU kernel for `torch._grouped_mm`, so the code of the CUDA path runs here too; what it
does on a GPU is tested in tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_mlp import (
    _ExpertLoop,
    _GroupedMm,
    _GroupedSwiglu,
    grouped_swiglu,
    grouped_swiglu_reference,
)
from megacomposer.kernels.moe_permute import combine, permute
from megacomposer.kernels.moe_routing import routing_map

COUNTS = [[4, 3, 2], [0, 5, 0, 3], [0, 0, 6], [7, 0, 0], [0, 0, 0], [1]]
PATHS = {"loop": _ExpertLoop, "grouped_mm": _GroupedMm}


def _operands(counts: list[int], dtype=torch.float32, hidden: int = 16, inner: int = 24):
    torch.manual_seed(sum(counts))
    experts, rows = len(counts), sum(counts)
    x = torch.randn(rows, hidden)
    gate_up = torch.randn(experts, 2 * inner, hidden) / hidden**0.5
    down = torch.randn(experts, hidden, inner) / inner**0.5
    return [t.to(dtype).requires_grad_() for t in (x, gate_up, down)]


def _run(fn, operands, counts, probs, grad, wide=lambda t: t):
    leaves = [wide(t.detach()).clone().requires_grad_() for t in operands]
    probs = None if probs is None else wide(probs.detach()).clone().requires_grad_()
    out = fn(*leaves, torch.tensor(counts), probs)
    out.backward(wide(grad))
    return [out.detach(), *(t.grad for t in (*leaves, probs) if t is not None)]


def _on_path(name: str):
    def fn(x, gate_up, down, rows_per_expert, probs):
        products = PATHS[name](rows_per_expert, x.shape[0])
        return _GroupedSwiglu.apply(x, gate_up, down, probs, products)

    return fn


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("path", list(PATHS))
def test_values_and_gradients_match_the_formula(
    path: str, counts: list[int], with_probs: bool, poisoned_memory: None
) -> None:
    operands = _operands(counts)
    probs = torch.rand(sum(counts)) if with_probs else None
    grad = torch.randn(sum(counts), 16)
    got = _run(_on_path(path), operands, counts, probs, grad)
    exact = _run(grouped_swiglu_reference, operands, counts, probs, grad, torch.Tensor.double)
    for a, e in zip(got, exact, strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) < 2e-6


@pytest.mark.parametrize("path", list(PATHS))
def test_experts_without_rows_get_exactly_zero_weight_gradients(
    path: str, poisoned_memory: None
) -> None:
    counts = [0, 5, 0, 3]
    operands = _operands(counts)
    _, _, dgate_up, ddown = _run(_on_path(path), operands, counts, None, torch.ones(8, 16))
    for gradient in (dgate_up, ddown):
        assert not gradient[[0, 2]].any()
        assert gradient[[1, 3]].abs().amin(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("path", list(PATHS))
def test_zero_rows_keep_the_graph_and_give_zero_weight_gradients(
    path: str, poisoned_memory: None
) -> None:
    operands = _operands([0, 0])
    probs = torch.empty(0, requires_grad=True)
    y = _on_path(path)(*operands, torch.tensor([0, 0]), probs)
    assert y.shape == (0, 16)
    y.sum().backward()
    assert probs.grad.shape == (0,)
    assert operands[0].grad.shape == (0, 16)
    for weight in operands[1:]:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", list(PATHS))
def test_half_precision_stays_within_its_rounding(path: str, dtype: torch.dtype) -> None:
    counts = [6, 0, 10]
    operands = _operands(counts, dtype)
    probs = torch.rand(16)
    grad = torch.randn(16, 16).to(dtype)
    got = _run(_on_path(path), operands, counts, probs, grad)
    exact = _run(grouped_swiglu_reference, operands, counts, probs, grad, torch.Tensor.double)
    limit = 3 * torch.finfo(dtype).eps
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < limit
    assert got[-1].dtype == torch.float32


@pytest.mark.parametrize("path", list(PATHS))
def test_expanded_gradient_equals_the_dense_one(path: str) -> None:
    counts = [3, 0, 5]
    operands = _operands(counts)
    ones = torch.ones(8, 16)
    expanded = _run(_on_path(path), operands, counts, None, torch.ones(()).expand(8, 16))
    dense = _run(_on_path(path), operands, counts, None, ones)
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


@pytest.mark.parametrize("path", list(PATHS))
def test_strided_and_misaligned_operands_equal_dense_ones(path: str) -> None:
    counts = [3, 5]
    dense = [t.detach() for t in _operands(counts, torch.bfloat16)]
    x, gate_up, down = dense
    strided = [
        torch.cat([x[:, :3], x], dim=1)[:, 3:],  # rows 38 bytes apart, start 6 bytes off
        torch.cat([gate_up.new_zeros(1), gate_up.flatten()])[1:].view_as(gate_up),
        torch.cat([down, down], dim=0)[::1][2:].mT.contiguous().mT,
    ]
    grad = torch.randn(8, 16).bfloat16()
    products = PATHS[path](torch.tensor(counts), 8)

    def run(operands):
        leaves = [t.detach().requires_grad_() for t in operands]
        y = _GroupedSwiglu.apply(*leaves, None, products)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    for a, b in zip(run(strided), run(dense), strict=True):
        torch.testing.assert_close(a, b)


def test_an_expert_never_sees_the_rows_of_another() -> None:
    counts = [3, 4, 2]
    operands = _operands(counts)
    grad = torch.randn(9, 16)
    clean = _run(grouped_swiglu, operands, counts, None, grad)
    spoiled = [t.detach().clone() for t in operands]
    spoiled[0][3:7] = float("nan")
    dirty = _run(grouped_swiglu, spoiled, counts, None, grad)
    others = torch.tensor([0, 1, 2, 7, 8])
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        assert torch.equal(a[others], b[others])
    for a, b in zip(clean[2:], dirty[2:], strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_gate_is_the_first_half_and_up_the_second() -> None:
    x = torch.ones(1, 1)
    gate_up = torch.tensor([[[2.0], [5.0]]])
    y = grouped_swiglu(x, gate_up, torch.ones(1, 1, 1), torch.tensor([1]))
    torch.testing.assert_close(y, torch.nn.functional.silu(torch.tensor([[2.0]])) * 5)


def test_gradients_are_those_of_the_forward() -> None:
    counts = torch.tensor([2, 0, 3])
    operands = _operands(counts.tolist(), torch.float64, hidden=3, inner=2)
    probs = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *a: grouped_swiglu(*a[:3], counts, a[3]), (*operands, probs)
    )
    assert torch.autograd.gradcheck(lambda *a: grouped_swiglu(*a, counts), operands)


def test_frozen_weights_get_no_gradient_and_the_others_are_unchanged() -> None:
    counts = [2, 3]
    operands = _operands(counts)
    grad = torch.randn(5, 16)
    full = _run(grouped_swiglu, operands, counts, None, grad)
    x, gate_up, down = (t.detach().clone() for t in operands)
    x.requires_grad_()
    grouped_swiglu(x, gate_up, down, torch.tensor(counts)).backward(grad)
    assert torch.equal(x.grad, full[1])
    assert gate_up.grad is None
    down.requires_grad_()
    grouped_swiglu(x.detach(), gate_up, down, torch.tensor(counts)).backward(grad)
    assert torch.equal(down.grad, full[3])


def test_probs_after_the_activation_equal_probs_at_the_combine() -> None:
    """The whole layer: route, permute, experts, combine, against one dense product per choice."""
    torch.manual_seed(0)
    ids, probs = torch.randint(4, (10, 2)), torch.rand(10, 2)
    _, gate_up, down = _operands([0, 0, 0, 0])
    x = torch.randn(10, 16)
    routing = routing_map(ids, 4)
    counts = routing.rows_per_expert
    rows = permute(x, routing)
    inside = grouped_swiglu(rows, gate_up, down, counts, probs.reshape(-1)[routing.order])
    outside = grouped_swiglu(rows, gate_up, down, counts)
    expected = torch.zeros(10, 16)
    for token in range(10):
        for choice in range(2):
            expert = ids[token, choice]
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected[token] += probs[token, choice] * (down[expert] @ hidden)
    torch.testing.assert_close(combine(inside, routing, 10), expected)
    torch.testing.assert_close(combine(outside, routing, 10, probs), expected)


def test_row_counts_that_miss_rows_are_refused_not_left_unwritten() -> None:
    operands = _operands([2, 3])
    with pytest.raises(ValueError, match="sums to 4 but x has 5 rows"):
        grouped_swiglu(*operands, torch.tensor([1, 3]))
    with pytest.raises(RuntimeError):
        _GroupedMm(torch.tensor([1, 3]), 5)


def test_operands_that_do_not_fit_together_are_refused() -> None:
    x, gate_up, down = _operands([2, 3])
    counts = torch.tensor([2, 3])
    bad = [
        (x, gate_up[:, :-1], down, counts),
        (x, gate_up, down[:1], counts),
        (x, gate_up, down, counts[:1]),
        (x.bfloat16(), gate_up, down, counts),
        (x, gate_up, down, counts, torch.ones(4)),
        (x, gate_up[:0], down[:0], counts[:0]),
    ]
    for arguments in bad:
        with pytest.raises(ValueError, match="grouped_swiglu: want"):
            grouped_swiglu(*arguments)
