"""Batched products and the input passes of Newton-Schulz on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megacomposer.kernels import sm90
from megacomposer.kernels.batched_products import Product, product_torch, run_products
from megacomposer.kernels.batched_products_triton import run_products_triton
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.newton_schulz_input import (
    frobenius_norm,
    power_of_two_scale,
    scaled_cast,
)

DEVICE = torch.device("cuda")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
RUNS = {"dispatched": run_products, "triton": run_products_triton}


@pytest.fixture(params=list(RUNS))
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    return RUNS[request.param]


@pytest.fixture
def hopper_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    if not sm90.is_available(DEVICE):
        pytest.skip("needs a Hopper GPU and the library of csrc/*_sm90.cu (nvcc at installation)")


def _matrices(
    batch: int, rows: int, columns: int, dtype: torch.dtype, *, transposed: bool = False
) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(rows + 3 * columns)
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    x = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
    return x.mT if transposed else x


def _symmetric(batch: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    x = _matrices(batch, size, size, dtype)
    return x + x.mT


def _exact(p: Product) -> torch.Tensor:
    result = p.alpha * (p.a.double() @ p.b.double())
    if p.matrix_scale is not None:
        result = result * p.matrix_scale[:, None, None].double()
    if p.c is not None:
        result = result + p.beta * p.c.double()
    eye = torch.eye(*result.shape[1:], dtype=torch.float64, device=DEVICE)
    return result + p.diagonal * eye


def _check(run, p: Product) -> None:
    """The error is at most twice that of torch's own product with the same epilogue."""
    p.out.fill_(float("nan"))
    run([p])
    theirs = dataclasses.replace(p, out=torch.empty_like(p.out))
    product_torch(theirs)
    exact = _exact(p)
    assert relative_error(p.out, exact) <= 2 * relative_error(theirs.out, exact) + 3e-8
    assert not p.symmetric or torch.equal(p.out, p.out.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(256, 512, 128), (192, 1536, 192), (200, 264, 72), (129, 131, 65), (1, 77, 5), (40, 1, 24)],
)
def test_error_is_at_most_twice_that_of_torch(
    run, m: int, n: int, k: int, a_transposed: bool, b_transposed: bool, dtype: torch.dtype
) -> None:
    _check(
        run,
        Product(
            a=_matrices(3, m, k, dtype, transposed=a_transposed),
            b=_matrices(3, k, n, dtype, transposed=b_transposed),
            c=_matrices(3, m, n, dtype),
            out=torch.empty(3, m, n, dtype=dtype, device=DEVICE),
            alpha=0.5,
            beta=-2.0,
            diagonal=1.5,
            matrix_scale=torch.tensor([0.5, 2.0, 1.0], device=DEVICE),
        ),
    )


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_result_in_another_dtype_and_along_columns(run, out_dtype: torch.dtype) -> None:
    a = _matrices(2, 320, 160, torch.float16)
    b = _matrices(2, 160, 416, torch.float16)
    out = torch.empty(2, 416, 320, dtype=out_dtype, device=DEVICE).mT
    _check(run, Product(a=a, b=b, out=out, alpha=0.25))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "k"), [(64, 7168), (192, 1536), (1024, 640), (1280, 64), (200, 72), (129, 65), (1, 9)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_symmetric_result_is_complete_and_exactly_symmetric(
    run, size: int, k: int, transposed: bool, dtype: torch.dtype
) -> None:
    x = _matrices(2, size, k, dtype, transposed=transposed)
    out = torch.empty(2, size, size, dtype=dtype, device=DEVICE)
    _check(
        run,
        Product(
            a=x,
            b=x.mT,
            out=out,
            c=_symmetric(2, size, dtype),
            alpha=0.125,
            beta=0.5,
            diagonal=2.0,
            symmetric=True,
        ),
    )


def _without_upper(x: torch.Tensor) -> torch.Tensor:
    """x with NaN in the blocks of 256 above the diagonal."""
    block = torch.arange(x.shape[-1], device=DEVICE) // 256
    return x.masked_fill(block[:, None] < block[None, :], float("nan"))


@pytest.mark.parametrize("size", [64, 256, 264, 768, 1000, 2048])
def test_lower_matrices_give_the_bits_of_whole_ones_and_are_all_that_is_touched(
    hopper_library: None, size: int
) -> None:
    scale = torch.tensor([0.5, 2.0, 1.0], device=DEVICE)
    s = _symmetric(3, size, torch.float16)
    x = _matrices(3, size, 520, torch.float16)
    shared = {"matrix_scale": scale, "alpha": 2.0**-8}
    square = {"c": s, "beta": 0.5, "diagonal": 2.0, "symmetric": True} | shared
    lower_s = _without_upper(s)
    lower = {"lower_a": True, "lower_b": True, "lower_out": True}
    tall = torch.empty(3, 520, size, device=DEVICE, dtype=torch.float16).mT
    cases = [
        (Product(a=s, b=s.mT, out=torch.empty_like(s), **square), {"b": lower_s.mT} | lower),
        (Product(a=s, b=s, out=torch.empty_like(s), **square), {"b": lower_s} | lower),
        (Product(a=s, b=x, out=torch.empty_like(x), **shared), {"lower_a": True}),
        (Product(a=s, b=x.mT.contiguous().mT, out=tall, **shared), {"lower_a": True}),
        (Product(a=s, b=x, out=tall, **shared), {"lower_a": True}),
    ]
    for whole, changes in cases:
        c = None if whole.c is None else lower_s
        out = torch.full_like(whole.out, float("nan"))
        run_products([whole])
        run_products([dataclasses.replace(whole, a=lower_s, c=c, out=out, **changes)])
        expected = _without_upper(whole.out) if whole.lower_out or whole.symmetric else whole.out
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert relative_error(whole.out, _exact(whole)) < 1e-3


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_lower_matrix_is_refused_where_nothing_can_read_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", name)
    s = _symmetric(1, 64, torch.float16)
    with pytest.raises(AssertionError):
        run_products([Product(a=s, b=s, out=torch.empty_like(s), lower_a=True)])


def _mixed_list(dtype: torch.dtype) -> list[Product]:
    products = []
    for batch, m, n, k in [(5, 768, 2048, 768), (9, 192, 1536, 192), (3, 130, 72, 64)]:
        a, b = _matrices(batch, m, k, dtype), _matrices(batch, k, n, dtype)
        scale = torch.rand(batch, device=DEVICE)
        out = torch.empty(batch, m, n, dtype=dtype, device=DEVICE)
        products.append(Product(a=a, b=b, out=out, matrix_scale=scale))
        gram = torch.empty(batch, m, m, dtype=dtype, device=DEVICE)
        products.append(Product(a=a, b=a.mT, out=gram, alpha=0.1, symmetric=True))
    return products


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_repeat_and_a_matrix_does_not_depend_on_the_others(run, dtype: torch.dtype) -> None:
    products = _mixed_list(dtype)
    run(products)
    together = [p.out.clone() for p in products]
    for _ in range(5):
        run(products[::-1])
        assert all(torch.equal(p.out, out) for p, out in zip(products, together, strict=True))
    for p, out in zip(products, together, strict=True):
        last = slice(len(out) - 1, len(out))
        scale = None if p.matrix_scale is None else p.matrix_scale[last]
        alone = torch.empty_like(out[last])
        run([dataclasses.replace(p, a=p.a[last], b=p.b[last], out=alone, matrix_scale=scale)])
        assert torch.equal(alone, out[last])


def test_reserved_multiprocessors_change_no_bit() -> None:
    products = _mixed_list(torch.float16)
    run_products_triton(products)
    together = [p.out.clone() for p in products]
    run_products_triton(products, reserved_sms=100)
    assert all(torch.equal(p.out, out) for p, out in zip(products, together, strict=True))
    with pytest.raises(ValueError, match="reserved_sms"):
        run_products_triton(products, reserved_sms=10_000)


def test_more_than_2_31_elements_do_not_wrap_offsets(run) -> None:
    x = torch.empty(320, 2560, 3072, dtype=torch.float16, device=DEVICE)
    x[-2:] = _matrices(2, 2560, 3072, torch.float16)
    x[:-2] = 0
    gram = torch.empty(320, 2560, 2560, dtype=torch.float16, device=DEVICE)
    run([Product(a=x, b=x.mT, out=gram, alpha=2.0**-6, symmetric=True)])
    tail = torch.empty_like(gram[-2:])
    run([Product(a=x[-2:], b=x[-2:].mT, out=tail, alpha=2.0**-6, symmetric=True)])
    assert torch.equal(gram[-2:], tail)
    assert not gram[:-2].any()
    y = torch.empty_like(x)
    run([Product(a=gram, b=x, out=y, alpha=2.0**-6)])
    _check(run, Product(a=tail, b=x[-2:], out=torch.empty_like(x[-2:]), alpha=2.0**-6))
    short = torch.empty_like(x[-2:])
    run([Product(a=tail, b=x[-2:], out=short, alpha=2.0**-6)])
    assert torch.equal(y[-2:], short)


def test_captured_launches_replay_after_other_launches(run) -> None:
    p = _mixed_list(torch.float16)[1]
    run([p])
    expected = p.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run([p])
    for other in _mixed_list(torch.float16):
        run([other])
    p.out.zero_()
    graph.replay()
    assert torch.equal(p.out, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(3, 2048, 1408), (64, 128, 1000), (1, 7, 9), (2, 1, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_cast_equals_the_formula_and_the_norm_float64(
    shape: tuple[int, int, int], transposed: bool, dtype: torch.dtype
) -> None:
    x = _matrices(*shape, dtype) * 1e-3
    x = x.mT if transposed else x
    y, norm = scaled_cast(x, torch.float16)
    scale = power_of_two_scale(x.abs().amax(dim=(1, 2)))
    assert torch.equal(y, (x.float() * scale[:, None, None]).half())
    assert y.is_contiguous() or y.mT.is_contiguous()
    exact = torch.linalg.matrix_norm(y.double())
    torch.testing.assert_close(norm.double(), exact, rtol=5e-7, atol=0.0)
    assert torch.equal(frobenius_norm(y), norm)


def test_norm_depends_on_neither_alignment_nor_batch() -> None:
    """An odd size: matrices start at any multiple of two bytes."""
    x = _matrices(5, 301, 333, torch.float16)
    norm = frobenius_norm(x)
    y, cast_norm = scaled_cast(x, torch.float16)
    for i in range(5):
        assert torch.equal(frobenius_norm(x[i : i + 1])[0], norm[i])
        y_i, norm_i = scaled_cast(x[i : i + 1], torch.float16)
        assert torch.equal(y_i[0], y[i])
        assert torch.equal(norm_i[0], cast_norm[i])
    wide = torch.zeros(5, 301, 400, dtype=torch.float16, device=DEVICE)
    wide[:, :, 7:340] = x
    assert torch.equal(frobenius_norm(wide[:, :, 7:340]), norm)
