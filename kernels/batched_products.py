"""Batches of matrix products with the epilogue that Newton-Schulz needs, many shapes at once.

    out = alpha * matrix_scale * (a @ b) + beta * c + diagonal * I,   accumulated in float32

Every product of a list is independent of the others, so that a list may be one launch. The bits of
one matrix depend on neither the rest of its batch nor the rest of the list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .dispatch import choose_products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One batch of equal products. Tensors have unit stride in one of their last two dims."""

    a: torch.Tensor
    """[B, M, K], fp16, bf16 or fp32."""
    b: torch.Tensor
    """[B, K, N], dtype of `a`."""
    out: torch.Tensor
    """[B, M, N], written; may have another floating dtype, and may not overlap the operands."""
    c: torch.Tensor | None = None
    """[B, M, N], dtype of `a`, in the memory order of `out`; needed where `beta` is not 0."""
    alpha: float = 1.0
    beta: float = 0.0
    diagonal: float = 0.0
    matrix_scale: torch.Tensor | None = None
    """float32 [B]: multiplies `alpha`, matrix by matrix."""
    symmetric: bool = False
    """M == N and the exact result is symmetric: one triangle may be computed and mirrored, and what
    is stored is exactly symmetric. `c`, if any, must be symmetric too."""
    lower_a: bool = False
    """`a` is symmetric, with unit stride along rows, and only its blocks of 256 x 256 on and below
    the diagonal are there; the others are never read. These three need `takes_lower`."""
    lower_b: bool = False
    lower_out: bool = False
    """With `symmetric`: only such blocks are written."""

    def __post_init__(self) -> None:
        batch, m, k = self.a.shape
        n = self.b.shape[-1]
        assert self.b.shape == (batch, k, n), (self.a.shape, self.b.shape)
        assert self.out.shape == (batch, m, n), (self.out.shape, batch, m, n)
        assert self.a.dtype == self.b.dtype, (self.a.dtype, self.b.dtype)
        assert self.c is not None or self.beta == 0.0
        assert self.c is None or (self.c.shape, self.c.dtype) == (self.out.shape, self.a.dtype)
        assert not self.symmetric or m == n, (m, n)
        assert self.symmetric or not self.lower_out

    def transposed(self) -> Product:
        """The same product written as out^T = b^T a^T."""
        return dataclasses.replace(
            self,
            a=self.b.mT,
            b=self.a.mT,
            lower_a=self.lower_b,
            lower_b=self.lower_a,
            out=self.out.mT,
            c=None if self.c is None else self.c.mT,
        )


def run_products(products: Sequence[Product], *, reserved_sms: int = 0) -> None:
    """Computes every `out`. All products are on one device, which keeps `reserved_sms` of its
    multiprocessors for other streams; neither changes a bit."""
    wanted = [row_major(product) for product in products if product.out.numel() > 0]
    by_backend: dict[str, list[Product]] = {}
    for product in wanted:
        by_backend.setdefault(choose_products(product.a, product.b, product.out), []).append(
            product
        )
    for backend, chosen in by_backend.items():
        if backend == "sm90":
            from .batched_products_sm90 import run_products_sm90

            run_products_sm90(chosen, reserved_sms=reserved_sms)
            continue
        assert not any(p.lower_a or p.lower_b or p.lower_out for p in chosen), backend
        if backend == "triton":
            from .batched_products_triton import run_products_triton

            run_products_triton(chosen, reserved_sms=reserved_sms)
        else:
            for product in chosen:
                product_torch(product)


def row_major(product: Product) -> Product:
    """The product in the form whose `out` is contiguous along its rows."""
    out = product.out
    is_row_major = out.stride(-1) == 1 or out.shape[-1] == 1
    return product if is_row_major else product.transposed()


def product_torch(product: Product) -> None:
    """One product by `torch.bmm`, in float32 after it; batch-invariant on the CPU only."""
    a, b = product.a, product.b
    if a.is_cuda and a.dtype != torch.float32:
        result = torch.bmm(a, b, out_dtype=torch.float32)
    else:
        result = torch.cat([_bmm_of_one(x, y) for x, y in zip(a.split(1), b.split(1), strict=True)])
    if product.matrix_scale is not None:
        result *= product.matrix_scale[:, None, None]
    result *= product.alpha
    if product.c is not None:
        result += product.c.float() * product.beta
    if product.diagonal:
        torch.diagonal(result, dim1=-2, dim2=-1).add_(product.diagonal)
    if product.symmetric:
        result = torch.tril(result) + torch.tril(result, -1).mT
    product.out.copy_(result)


def _bmm_of_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # MKL chooses by the alignment of each matrix: a copy starts where every allocation does
    return torch.bmm(x.float().clone(), y.float().clone())
