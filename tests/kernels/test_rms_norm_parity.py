"""rms_norm on the CPU: torch's op and ours against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.rms_norm import rms_norm, rms_norm_reference

EPS = 1e-6
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def test_triton_kernels_agree_with_the_formula(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("rms_norm_cases.py")


@pytest.mark.parametrize("weight_dtype", ["same", "fp32"])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_forward_and_backward_round_once(dtype: torch.dtype, weight_dtype: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 5, 96) * 3).to(dtype).requires_grad_()
    weight = (1 + torch.randn(96) * 0.2).to(dtype if weight_dtype == "same" else torch.float32)
    weight.requires_grad_()
    grad = torch.randn(2, 5, 96).to(dtype)
    x_exact, weight_exact = (t.detach().double().requires_grad_() for t in (x, weight))

    y = rms_norm(x, weight, EPS)
    y.backward(grad)
    exact = rms_norm_reference(x_exact, weight_exact, EPS)
    exact.backward(grad.double())

    assert y.dtype == dtype
    assert weight.grad.dtype == weight.dtype
    assert relative_error(y, exact) < ROUNDING[dtype]
    assert relative_error(x.grad, x_exact.grad) < ROUNDING[dtype]
    assert relative_error(weight.grad, weight_exact.grad) < ROUNDING[dtype]


def test_statistics_are_fp32_where_fp16_squares_overflow() -> None:
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), EPS), x / 1000)


def test_the_formula_is_the_published_one() -> None:
    y = rms_norm_reference(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), 0.0)
    root_mean_square = (12.5) ** 0.5
    torch.testing.assert_close(y, torch.tensor([3.0, 8.0]) / root_mean_square)


def test_gradients_are_those_of_the_forward() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm_reference(a, b, EPS), (x, weight))


def test_zero_rows_give_zero_weight_gradient() -> None:
    x = torch.empty(0, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    rms_norm(x, weight, EPS).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize(
    ("x_shape", "weight_shape"), [((2, 8), (4,)), ((2, 8), (1, 8)), ((2, 0), (0,)), ((), ())]
)
def test_weight_of_another_shape_is_refused_not_broadcast(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.ones(x_shape), torch.ones(weight_shape), EPS)
