"""Cases of the Triton rms_norm for the interpreter; run by test_rms_norm_parity.py."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.rms_norm import _RmsNorm, rms_norm, rms_norm_reference, rms_norm_torch

EPS = 1e-6


@pytest.fixture(autouse=True)
def _triton_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")


def _results(norm, x, weight, grad):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    y = norm(x, weight, EPS)
    y.backward(grad.to(y.dtype))
    return y.detach(), x.grad, weight.grad


def _inputs(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + dim)
    return torch.randn(rows, dim) * 3, 1 + torch.randn(dim) * 0.2, torch.randn(rows, dim)


@pytest.mark.parametrize(
    ("rows", "dim"),
    [(1, 1), (3, 7), (2, 16), (70, 128), (33, 192), (65, 256), (5, 2048), (4, 4099), (2, 16384)],
)
def test_fp32_is_at_most_twice_as_wrong_as_torch(rows: int, dim: int) -> None:
    x, weight, grad = _inputs(rows, dim)
    exact = _results(rms_norm_reference, x.double(), weight.double(), grad.double())
    theirs = _results(rms_norm_torch, x, weight, grad)
    ours = _results(rms_norm, x, weight, grad)
    for name, a, b, e in zip(("y", "dx", "dw"), ours, theirs, exact, strict=True):
        if dim == 1 and name == "dx":  # all cancellation: there is no relative error
            assert float((a - e).abs().max()) < 1e-6
        else:
            assert relative_error(a, e) <= 2 * relative_error(b, e) + 3e-8, name


def test_more_tiles_than_programs_still_cover_every_row() -> None:
    """H = 4096 has 512 backward programs of one row each; the others come round again."""
    x, weight, grad = _inputs(515, 4096)
    exact = _results(rms_norm_reference, x.double(), weight.double(), grad.double())
    for a, e in zip(_results(rms_norm, x, weight, grad), exact, strict=True):
        assert relative_error(a, e) < 1e-6


def test_zero_rows_keep_the_graph_and_give_zero_weight_gradient() -> None:
    x = torch.empty(0, 3, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, EPS)
    assert y.shape == (0, 3, 8)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))
    assert x.grad.shape == x.shape


def test_expanded_gradient_equals_the_dense_one() -> None:
    x, weight, _ = _inputs(6, 40)
    ours = _results(rms_norm, x, weight, torch.ones(()).expand(6, 40))
    dense = _results(rms_norm, x, weight, torch.ones(6, 40))
    for a, b in zip(ours, dense, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["column_slice", "transposed", "expanded_rows", "leading_dims"])
def test_strided_inputs_equal_contiguous_ones(layout: str) -> None:
    torch.manual_seed(0)
    x = {
        "column_slice": lambda: torch.randn(6, 100)[:, 20:60],
        "transposed": lambda: torch.randn(40, 6).T,
        "expanded_rows": lambda: torch.randn(1, 40).expand(6, 40),
        "leading_dims": lambda: torch.randn(2, 5, 3, 40).transpose(0, 2),
    }[layout]()
    weight = torch.randn(80)[::2]
    grad = torch.randn(x.shape).transpose(0, 1).contiguous().transpose(0, 1)
    leaf = x.clone(memory_format=torch.contiguous_format).requires_grad_()
    expected = rms_norm(leaf, weight.contiguous(), EPS)
    expected.backward(grad.contiguous())
    strided = x.detach().requires_grad_()
    y = rms_norm(strided, weight, EPS)
    y.backward(grad)
    assert torch.equal(y, expected)
    assert torch.equal(strided.grad, leaf.grad)


def test_a_row_does_not_depend_on_the_other_rows_and_runs_repeat_bit_for_bit() -> None:
    x, weight, grad = _inputs(67, 96)
    first = _results(rms_norm, x, weight, grad)
    again = _results(rms_norm, x, weight, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    y, dx, _ = _results(rms_norm, x[40:], weight, grad[40:])
    assert torch.equal(y, first[0][40:])
    assert torch.equal(dx, first[1][40:])


@pytest.mark.parametrize(("x_grad", "weight_grad"), [(True, False), (False, True)])
def test_frozen_operand_gets_no_gradient_and_the_other_is_unchanged(
    x_grad: bool, weight_grad: bool
) -> None:
    x, weight, grad = _inputs(9, 48)
    full = _results(rms_norm, x, weight, grad)
    x.requires_grad_(x_grad)
    weight.requires_grad_(weight_grad)
    rms_norm(x, weight, EPS).backward(grad)
    assert (x.grad is None) == (not x_grad)
    assert (weight.grad is None) == (not weight_grad)
    assert torch.equal(x.grad, full[1]) if x_grad else torch.equal(weight.grad, full[2])


def test_override_really_selects_triton() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    assert type(rms_norm(x, torch.ones(8), EPS).grad_fn) is _RmsNorm._backward_cls


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float64, 8), (torch.float32, 16385)])
def test_override_refuses_what_the_kernel_cannot_take(dtype: torch.dtype, dim: int) -> None:
    with pytest.raises(ValueError, match="cannot run in Triton"):
        rms_norm(torch.ones(1, dim, dtype=dtype), torch.ones(dim, dtype=dtype), EPS)
