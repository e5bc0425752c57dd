"""Permute and combine: exact copies out, fp32 sums back, and gradients that repeat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.moe_permute import (
    combine,
    combine_reference,
    permute,
    permute_reference,
)
from megacomposer.kernels.moe_routing import RoutingMap, routing_map


def _routing(tokens: int = 9, choices: int = 3, experts: int = 5) -> RoutingMap:
    torch.manual_seed(1)
    return routing_map(torch.randint(experts, (tokens, choices)), experts)


def test_triton_kernels_agree_with_torch(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("moe_rows_cases.py")


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_and_its_gradients_match_the_formula(dtype, with_probs) -> None:
    routing = _routing()
    x = torch.randn(9, 16).to(dtype)
    probs = torch.rand(9, 3) if with_probs else None
    grad = torch.randn(9, 16).to(dtype)

    def run(permute_fn, combine_fn, wide):
        leaves = [t if t is None else wide(t).clone().requires_grad_() for t in (x, probs)]
        rows = permute_fn(leaves[0], routing)
        out = combine_fn(rows * 2, routing, 9, leaves[1])
        out.backward(wide(grad))
        return [out, *(t.grad for t in leaves if t is not None)]

    got = run(permute, combine, lambda t: t)
    exact = run(permute_reference, combine_reference, torch.Tensor.double)
    assert got[0].dtype == dtype
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < limit


def test_permute_copies_bits() -> None:
    routing = _routing()
    x = torch.randn(9, 8).bfloat16()
    assert torch.equal(permute(x, routing), x[routing.token_of_row])


def test_combine_of_permuted_rows_gives_each_token_k_times_itself() -> None:
    routing = _routing()
    x = torch.randint(-8, 8, (9, 4)).float()
    assert torch.equal(combine(permute(x, routing), routing, 9), 3 * x)


def test_bf16_sums_are_rounded_once_not_k_times() -> None:
    """256 + 1 is 256 in bf16, so a bf16 running sum of 256, 1, 1 ends at 256 instead of 258."""
    routing = routing_map(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16().requires_grad_()
    assert combine(rows, routing, 1).item() == 258.0
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    permute(x, routing).backward(rows.detach())
    assert x.grad.item() == 258.0


def test_gradients_are_those_of_the_forward() -> None:
    routing = _routing(4, 2, 3)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: permute(a, routing), x)
    assert torch.autograd.gradcheck(lambda a: combine(a, routing, 4), rows)
    assert torch.autograd.gradcheck(lambda a, p: combine(a, routing, 4, p), (rows, probs))


def test_expanded_gradients_and_strided_inputs_are_ordinary() -> None:
    routing = _routing()
    x = torch.randn(16, 9).T.requires_grad_()
    rows = torch.randn(27, 32)[:, ::2].requires_grad_()
    probs = torch.rand(3, 9).T.requires_grad_()
    permute(x, routing).sum().backward()
    combine(rows, routing, 9, probs).sum().backward()
    assert torch.equal(x.grad, torch.full((9, 16), 3.0))
    torch.testing.assert_close(probs.grad, rows[routing.row_of_TK].sum(-1).detach())
    expected = probs.reshape(-1)[routing.order][:, None].expand(27, 16)
    torch.testing.assert_close(rows.grad, expected.detach())


def test_zero_tokens_keep_the_graph_and_give_zero_gradients() -> None:
    routing = _routing(0, 3, 5)
    x = torch.empty(0, 8, requires_grad=True)
    probs = torch.empty(0, 3, requires_grad=True)
    scale = torch.ones(8, requires_grad=True)
    out = combine(permute(x * scale, routing), routing, 0, probs)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert torch.equal(scale.grad, torch.zeros(8))
    assert x.grad.shape == (0, 8)
    assert probs.grad.shape == (0, 3)


def test_probs_that_need_no_gradient_do_not_keep_the_rows_alive() -> None:
    routing = _routing()
    rows = torch.randn(27, 4, requires_grad=True)
    out = combine(rows, routing, 9, torch.rand(9, 3))
    assert all(t is None or t.shape != rows.shape for t in out.grad_fn.saved_tensors)


def test_backward_is_legal_in_deterministic_mode_and_repeats(poisoned_memory: None) -> None:
    routing = _routing(40, 4, 6)
    x = torch.randn(40, 12, requires_grad=True)
    probs = torch.rand(40, 4, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = combine(permute(x, routing).sin(), routing, 40, probs)
        return torch.autograd.grad(out.square().sum(), (x, probs))

    first = gradients()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_shapes_that_do_not_match_the_map_are_refused() -> None:
    routing = _routing()
    with pytest.raises(ValueError, match=r"permute: x must be \[9, H\]"):
        permute(torch.ones(8, 4), routing)
    with pytest.raises(ValueError, match="num_tokens 8"):
        combine(torch.ones(27, 4), routing, 8)
    with pytest.raises(ValueError, match=r"rows must be \[27, H\]"):
        combine(torch.ones(26, 4), routing, 9)
    with pytest.raises(ValueError, match="probs must be"):
        combine(torch.ones(27, 4), routing, 9, torch.ones(3, 9))
