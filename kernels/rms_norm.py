"""RMS normalisation (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * weight.

Shape suffixes: R rows (all leading dims together), H normalised dim, P programs of the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .dispatch import choose


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dim of x [..., H] to unit root mean square and scale it by weight [H].

    x: bf16, fp16, fp32 or float64; weight: x's dtype or fp32. The result has x's shape and dtype,
    the statistics are fp32 (float64 for float64 input), the product is rounded once. Differentiable
    in x and weight; any strides, zero rows and expanded gradients are accepted; the weight gradient
    is summed in a fixed order in fp32. Rows are independent, so any sharding of the leading dims
    needs no communication forward; the weight gradient of a shard is a partial sum.

    Raises ValueError if weight is not [H], or H is 0.
    """
    if x.dim() == 0 or x.shape[-1] == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be [H] with H = the last dim of x and H >= 1, "
            f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    implementation = choose("rms_norm", x)
    if implementation == "triton":
        return _RmsNorm.apply(x, weight, float(eps))
    if implementation == "reference":
        return rms_norm_reference(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`F.rms_norm`; operands of different dtypes meet in fp32. Shapes as in `rms_norm`."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, in fp32 (float64 for float64 input). Shapes and dtypes as in `rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    mean_square = x_wide.square().mean(dim=-1, keepdim=True)
    return (x_wide * torch.rsqrt(mean_square + eps) * weight.to(wide)).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """The Triton path. Saves x, weight and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_RH = _rows(x)
        rows, dim = x_RH.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd_R = torch.empty(rows, dtype=torch.float32, device=x.device)
        weight = weight.contiguous()
        block_rows, block_dim, warps = _tile(dim)
        if rows > 0:
            _forward_kernel[(triton.cdiv(rows, block_rows),)](
                x_RH, weight, y, rstd_R, rows, x_RH.stride(0), eps,
                H=dim, BLOCK_R=block_rows, BLOCK_H=block_dim, num_warps=warps,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, rstd_R)
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, rstd_R = ctx.saved_tensors
        x_RH, grad_RH = _rows(x), _rows(grad_y)
        rows, dim = x_RH.shape
        block_rows, block_dim, warps = _tile(dim)
        tiles = triton.cdiv(rows, block_rows)
        programs = min(tiles, _backward_programs(block_dim))
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else None
        partial_PH = rstd_R.new_empty((programs if need_dw else 0, dim))
        if rows > 0:
            _backward_kernel[(programs,)](
                x_RH, weight, grad_RH, rstd_R, x_RH if dx is None else dx, partial_PH,
                rows, x_RH.stride(0), grad_RH.stride(0), tiles,
                H=dim, BLOCK_R=block_rows, BLOCK_H=block_dim, PROGRAMS=programs,
                NEED_DX=need_dx, NEED_DW=need_dw, num_warps=warps,
            )  # fmt: skip
        # A sum over zero programs is zero, so zero rows need no case of their own.
        dw = partial_PH.sum(dim=0).to(weight.dtype) if need_dw else None
        return dx, dw, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., H] as [R, H] with adjacent last-dim elements, copied only where it must be."""
    x_RH = x.reshape(-1, x.shape[-1])
    return x_RH if x_RH.stride(1) == 1 else x_RH.contiguous()


def _tile(dim: int) -> tuple[int, int, int]:
    """(rows of a tile, columns of a tile, warps), a function of H alone: results of a row do not
    depend on how many rows there are. About 4096 elements a tile, a whole row always."""
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, min(32, 4096 // block_dim))
    warps = min(16, max(4, block_rows * block_dim // 1024))
    return block_rows, block_dim, warps


def _backward_programs(block_dim: int) -> int:
    """Programs (rows of fp32 weight-gradient partials): enough to fill a large GPU, few enough that
    the partials (8 MB up to H = 8192) stay in its L2. Fixed, so that the summation order is."""
    return min(1056, max(264, 2**21 // block_dim))


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    x_row_stride,
    eps,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_H)
    row_ok = row < rows
    column_ok = column < H
    mask = row_ok[:, None] & column_ok[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row_stride + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column_ok, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) * (1.0 / H)
    rstd = tl.rsqrt(mean_square + eps)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(rstd_ptr + row, rstd, mask=row_ok)
    tl.store(y_ptr + row[:, None] * H + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    weight_ptr,
    grad_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    x_row_stride,
    grad_row_stride,
    tiles,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
):
    # With x_hat = x * rstd:  dx = rstd * (w dy - x_hat mean(w dy x_hat)),  dw = sum_rows dy x_hat.
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_H)
    column_ok = column < H
    dw = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for tile in range(program, tiles, PROGRAMS):
        row = (tl.arange(0, BLOCK_R) + tile * BLOCK_R).to(tl.int64)  # rows, not offsets, fit int32
        row_ok = row < rows
        mask = row_ok[:, None] & column_ok[None, :]
        x = tl.load(x_ptr + row[:, None] * x_row_stride + column[None, :], mask=mask, other=0.0)
        grad = tl.load(
            grad_ptr + row[:, None] * grad_row_stride + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row_ok, other=0.0)
        x_hat = x.to(tl.float32) * rstd[:, None]
        if NEED_DX:
            # Read again for every tile (it stays in L1): held across the loop it would, with x, the
            # gradient and dw, take every register of a multiprocessor at H = 16384.
            weight = tl.load(weight_ptr + column, mask=column_ok, other=0.0).to(tl.float32)
            weighted = grad * weight[None, :]
            projection = tl.sum(weighted * x_hat, axis=1) * (1.0 / H)
            dx = (weighted - x_hat * projection[:, None]) * rstd[:, None]
            tl.store(
                dx_ptr + row[:, None] * H + column[None, :],
                dx.to(dx_ptr.dtype.element_ty),
                mask=mask,
            )
        if NEED_DW:
            dw += tl.sum(grad * x_hat, axis=0)
    if NEED_DW:
        tl.store(partial_ptr + program.to(tl.int64) * H + column, dw, mask=column_ok)
