"""Cases of batched_products for the interpreter: the torch path, and Triton through pointers and
through descriptors; run by test_batched_products.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from megacomposer.kernels import batched_products_triton as triton_path
from megacomposer.kernels.batched_products import Product, run_products

SMALL_TILE = triton_path.Tiling(m=16, n=16, k=16, warps=4, stages=2, programs=1)


@pytest.fixture(autouse=True, params=["torch", "pointers", "descriptors"])
def path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> str:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "torch" if request.param == "torch" else "triton")
    monkeypatch.setattr(triton_path, "_has_descriptors", lambda x: request.param == "descriptors")
    return request.param


def _use_tile(monkeypatch: pytest.MonkeyPatch, tile: triton_path.Tiling) -> None:
    monkeypatch.setattr(triton_path, "tiling", lambda product, descriptors: tile)


def _matrices(batch: int, rows: int, columns: int, *, transposed: bool = False) -> torch.Tensor:
    if transposed:
        return torch.randn(batch, columns, rows).mT
    return torch.randn(batch, rows, columns)


def _symmetric(batch: int, size: int) -> torch.Tensor:
    x = torch.randn(batch, size, size)
    return x + x.mT


def _exact(p: Product) -> torch.Tensor:
    result = p.alpha * (p.a.double() @ p.b.double())
    if p.matrix_scale is not None:
        result = result * p.matrix_scale[:, None, None].double()
    if p.beta:
        assert p.c is not None
        result = result + p.beta * p.c.double()
    return result + p.diagonal * torch.eye(*result.shape[1:], dtype=torch.float64)


def _check(products: Sequence[Product]) -> None:
    """Runs `products` and compares each with float64, entry by entry, at the scale of what was
    summed for that entry."""
    run_products(products)
    for p in products:
        absolute = dataclasses.replace(
            p,
            a=p.a.abs(),
            b=p.b.abs(),
            c=None if p.c is None else p.c.abs(),
            alpha=abs(p.alpha),
            beta=abs(p.beta),
            diagonal=abs(p.diagonal),
        )
        error = (p.out.double() - _exact(p)).abs()
        assert bool((error <= 2e-6 * _exact(absolute)).all())
        assert not p.symmetric or torch.equal(p.out, p.out.mT)


@pytest.mark.parametrize("layout", [*itertools.product([False, True], repeat=4)])
def test_every_layout_of_every_operand_equals_float64(
    layout: tuple[bool, bool, bool, bool],
) -> None:
    torch.manual_seed(0)
    m, n, k = 70, 132, 36
    a, b, c, out = (
        _matrices(2, *shape, transposed=transposed)
        for shape, transposed in zip(((m, k), (k, n), (m, n), (m, n)), layout, strict=True)
    )
    scale = torch.tensor([0.25, 3.0])
    _check(
        [
            Product(
                a=a,
                b=b,
                c=c,
                out=out.fill_(float("nan")),
                alpha=1.5,
                beta=-0.5,
                diagonal=3.0,
                matrix_scale=scale,
            )
        ]
    )


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 200, 3), (130, 1, 65), (65, 63, 1), (1, 70, 130)]
)
def test_sizes_that_no_tile_divides(m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    a, b, out = _matrices(3, m, k), _matrices(3, k, n), torch.empty(3, m, n)
    _check([Product(a=a, b=b, out=out, alpha=2.0, diagonal=-1.0)])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 17, 128, 150])
def test_symmetric_result_is_complete_and_exactly_symmetric(
    monkeypatch: pytest.MonkeyPatch, size: int, transposed: bool
) -> None:
    """Tiles of 16: up to ten tile rows, so more than one group of eight."""
    _use_tile(monkeypatch, SMALL_TILE)
    torch.manual_seed(size)
    x = _matrices(2, size, 20, transposed=transposed)
    out, c = torch.empty(2, size, size), _symmetric(2, size)
    if transposed:
        out = out.mT
    _check([Product(a=x, b=x.mT, out=out, c=c, beta=2.0, diagonal=0.5, symmetric=True)])


@pytest.mark.parametrize(("m", "n"), [(16, 64), (64, 16)])
def test_tiles_that_are_not_square_cover_the_result(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int
) -> None:
    _use_tile(monkeypatch, dataclasses.replace(SMALL_TILE, m=m, n=n, overlap_stores=True))
    a, b = _matrices(2, 150, 40), _matrices(2, 40, 200)
    _check([Product(a=a, b=b, out=torch.empty(2, 150, 200))])


def test_product_that_is_symmetric_only_in_exact_arithmetic_is_stored_symmetric() -> None:
    x = _symmetric(1, 100) / 10
    square = (x.double() @ x.double()).float()  # commutes with x
    out = torch.empty(1, 100, 100)
    run_products([Product(a=x, b=square, out=out, symmetric=True)])
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out, x @ x @ x, rtol=1e-4, atol=1e-4)


def _mixed_list() -> list[Product]:
    torch.manual_seed(1)
    products = []
    for batch, m, n, k in [(3, 70, 40, 50), (1, 20, 200, 33), (2, 130, 64, 64), (1, 1, 1, 1)]:
        a, b = _matrices(batch, m, k), _matrices(batch, k, n, transposed=True)
        products.append(Product(a=a, b=b, out=torch.empty(batch, m, n), alpha=0.5))
        products.append(
            Product(
                a=a,
                b=a.mT,
                out=torch.empty(batch, m, m),
                c=_symmetric(batch, m),
                beta=1.0,
                matrix_scale=torch.rand(batch),
                symmetric=True,
            )
        )
    return products


def test_products_of_many_shapes_in_one_call_equal_float64() -> None:
    _check(_mixed_list())


def test_bits_do_not_depend_on_batch_position_list_or_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products = _mixed_list()
    run_products(products)
    together = [p.out.clone() for p in products]
    monkeypatch.setattr(triton_path, "_INTERPRETED_PROGRAMS", 7)
    monkeypatch.setattr(triton_path, "_MAX_PRODUCTS", 3)
    run_products(products[::-1])
    assert all(torch.equal(p.out, out) for p, out in zip(products, together, strict=True))
    for p, out in zip(products, together, strict=True):
        for i in range(len(p.a)):
            only = slice(i, i + 1)
            scale = None if p.matrix_scale is None else p.matrix_scale[only]
            c = None if p.c is None else p.c[only]
            alone = torch.empty_like(out[only])
            run_products(
                [
                    dataclasses.replace(
                        p, a=p.a[only], b=p.b[only], c=c, out=alone, matrix_scale=scale
                    )
                ]
            )
            assert torch.equal(alone, out[only])


def test_operands_and_result_may_be_parts_of_larger_tensors() -> None:
    torch.manual_seed(2)
    a = torch.randn(5, 90, 100)[1::2, 10:80, 20:60]
    b = torch.randn(2, 70, 100)[:, 3:67, 40:80].mT
    whole = torch.full((3, 90, 120), 7.0)
    out = whole[:2, 5:75, 16:80]
    _check([Product(a=a, b=b, out=out)])
    out.fill_(7.0)
    assert bool((whole == 7.0).all())


def test_result_may_overwrite_c() -> None:
    torch.manual_seed(3)
    a, b, c = _matrices(2, 70, 30), _matrices(2, 30, 90), _matrices(2, 70, 90)
    apart = torch.empty_like(c)
    run_products([Product(a=a, b=b, out=apart, c=c, beta=1.0)])
    run_products([Product(a=a, b=b, out=c, c=c, beta=1.0)])
    assert torch.equal(c, apart)


def test_one_scale_for_all_matrices_may_be_expanded() -> None:
    a, b = _matrices(3, 8, 8), _matrices(3, 8, 8)
    scale = torch.tensor([0.5]).expand(3)
    _check([Product(a=a, b=b, out=torch.empty(3, 8, 8), matrix_scale=scale)])


def test_half_precision_result_of_single_precision_operands_is_rounded_once() -> None:
    a, b = _matrices(2, 40, 20), _matrices(2, 20, 40)
    single, half = torch.empty(2, 40, 40), torch.empty(2, 40, 40, dtype=torch.float16)
    run_products([Product(a=a, b=b, out=single)])
    run_products([Product(a=a, b=b, out=half)])
    assert torch.equal(half, single.half())


def test_nothing_to_do_is_no_error() -> None:
    run_products([])
    for batch, m, n in ((0, 4, 5), (2, 0, 5), (2, 4, 0)):
        a, b = torch.randn(batch, m, 3), torch.randn(batch, 3, n)
        run_products([Product(a=a, b=b, out=torch.empty(batch, m, n))])


def test_empty_sum_leaves_the_other_terms(path: str) -> None:
    if path == "torch":
        return
    c, out = _matrices(1, 20, 30), torch.empty(1, 20, 30)
    empty = Product(a=torch.empty(1, 20, 0), b=torch.empty(1, 0, 30), out=out, c=c, beta=2.0)
    triton_path.run_products_triton([empty])
    assert torch.equal(out, 2 * c)


def test_operand_without_unit_stride_is_refused(path: str) -> None:
    if path == "torch":
        return
    a = torch.randn(1, 8, 8, 2)[..., 0]
    with pytest.raises(ValueError, match="unit stride"):
        run_products([Product(a=a, b=a.contiguous(), out=torch.empty(1, 8, 8))])
