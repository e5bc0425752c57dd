"""rms_norm in Triton on a GPU: accuracy beside torch's op, determinism, offsets beyond int32."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.rms_norm import _RmsNorm, rms_norm, rms_norm_reference, rms_norm_torch

DEVICE = torch.device("cuda")
EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _implementation_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)


def _inputs(rows: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(rows + dim)
    x, grad = (torch.randn(rows, dim, device=DEVICE, generator=generator) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(dim, device=DEVICE, generator=generator)
    return [(3 * x).to(dtype), weight.to(dtype), grad.to(dtype)]


def _results(norm, x, weight, grad) -> list[torch.Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    y = norm(x, weight, EPS)
    y.backward(grad)
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim"),
    [
        (1, 128),
        (5, 33),
        (100_003, 128),
        (4096, 192),
        (513, 1023),
        (3000, 2048),
        (1500, 7168),
        (1000, 8192),
        (700, 16384),
    ],
)
def test_error_is_at_most_twice_that_of_torch(rows: int, dim: int, dtype: torch.dtype) -> None:
    inputs = _inputs(rows, dim, dtype)
    exact = _results(rms_norm_reference, *(t.double() for t in inputs))
    theirs = _results(rms_norm_torch, *inputs)
    ours = _results(rms_norm, *inputs)
    for name, a, b, e in zip(("y", "dx", "dw"), ours, theirs, exact, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + 3e-8, name


def test_triton_is_what_runs() -> None:
    x, weight, _ = _inputs(4, 64, torch.bfloat16)
    assert type(rms_norm(x.requires_grad_(), weight, EPS).grad_fn) is _RmsNorm._backward_cls


def test_fp32_weight_of_bf16_activations_keeps_its_dtype_and_gradient_precision() -> None:
    x, weight, grad = _inputs(3000, 2048, torch.bfloat16)
    exact = _results(rms_norm_reference, x.double(), weight.double(), grad.double())
    y, _, dw = _results(rms_norm, x, weight.float(), grad)
    assert y.dtype == torch.bfloat16
    assert dw.dtype == torch.float32
    assert relative_error(dw, exact[2]) < 1e-5


@pytest.mark.parametrize(("rows", "dim"), [(3001, 128), (700, 2048), (600, 16384)])
def test_runs_repeat_and_a_row_does_not_depend_on_the_others(rows: int, dim: int) -> None:
    x, weight, grad = _inputs(rows, dim, torch.bfloat16)
    first = _results(rms_norm, x, weight, grad)
    for _ in range(10):
        again = _results(rms_norm, x, weight, grad)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    tail = _results(rms_norm, x[-77:], weight, grad[-77:])
    assert torch.equal(tail[0], first[0][-77:])
    assert torch.equal(tail[1], first[1][-77:])


def test_strided_inputs_and_expanded_gradients_equal_dense_ones() -> None:
    x, weight, _ = _inputs(300, 640, torch.bfloat16)
    ones = torch.ones(300, 256, device=DEVICE, dtype=torch.bfloat16)
    view, weight = x[:, 128:384], weight[:512:2]
    strided = _results(rms_norm, view, weight, ones[:1, :1].expand(300, 256))
    dense = _results(rms_norm, view.contiguous(), weight.contiguous(), ones)
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    leaf = x.detach().requires_grad_()
    rms_norm(leaf[:, 128:384], weight, EPS).backward(ones)
    assert torch.equal(leaf.grad[:, 128:384], dense[1])


def test_zero_rows_give_zero_weight_gradient() -> None:
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    x = torch.empty(0, 64, device=DEVICE, requires_grad=True)
    rms_norm(x, weight, EPS).sum().backward()
    assert not weight.grad.any()


def test_more_than_2_31_elements_do_not_wrap_offsets() -> None:
    rows, dim = 2**31 // 8192 + 100, 8192
    x = torch.randn(rows, dim, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.ones(dim, device=DEVICE, dtype=torch.bfloat16)
    tail = _results(rms_norm, x[-150:], weight, x[-150:])
    x.requires_grad_()
    y = rms_norm(x, weight, EPS)
    y.backward(x.detach())
    assert torch.equal(y[-150:], tail[0])
    assert torch.equal(x.grad[-150:], tail[1])
