"""Rows of tokens in expert order, and their sums, a range of rows at a time: what `permute` and
`combine` of moe_permute.py do with all rows at once, for which [R, H] must be in memory.

Shape suffixes: N tokens, K rows per token at most, R rows, C rows of a range, H hidden dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dispatch import accumulation_dtype


def gather_rows(x_NH: torch.Tensor, token_of_row: torch.Tensor) -> torch.Tensor:
    """out[c] = x[token_of_row[c]]: [C, H], dense, in Triton. token_of_row: int64 [C]."""
    rows, width = token_of_row.shape[0], x_NH.shape[1]
    out = x_NH.new_empty((rows, width))
    block = _block(width)
    _gather_kernel[(rows, triton.cdiv(width, block))](
        x_NH, x_NH.stride(0), x_NH.stride(1), token_of_row, out, width,
        BLOCK_H=block, num_warps=_warps(block),
    )  # fmt: skip
    return out


class RowSum:
    """The sum over each token's rows, which are given range after range, the first row first. Where
    every token has one row nothing is added: rows go to their places as they come."""

    def __init__(
        self, out_NH: torch.Tensor, rows_of_NK: torch.Tensor, rows: slice, *, in_triton: bool
    ) -> None:
        """out: dense [N, H]; rows_of: int64 [N, K], each of the numbers of `rows` once, and others
        for no row; those of a range are added in the order of k."""
        tokens, choices = rows_of_NK.shape
        self._out_NH, self._rows_of_NK, self._in_triton = out_NH, rows_of_NK.contiguous(), in_triton
        self._start, self._next, self._end = rows.start, rows.start, rows.stop
        self._places = choices == 1 and tokens == rows.stop - rows.start
        self._total_NH: torch.Tensor | None = None

    def add(self, rows_CH: torch.Tensor) -> None:
        """The next C rows, dense. The sum is fp32 (float64 for float64) until the last of them."""
        first, self._next = self._next, self._next + rows_CH.shape[0]
        target_NH = self._out_NH
        if self._next < self._end and not self._places:
            target_NH = self._total_NH
            if target_NH is None:
                wide = accumulation_dtype(rows_CH.dtype)
                target_NH = torch.empty_like(self._out_NH, dtype=wide)
        add = _add_rows if self._in_triton else _add_rows_torch
        add(target_NH, self._total_NH, rows_CH, self._rows_of_NK, first, places=self._places)
        self._total_NH = None if self._places else target_NH

    def finish(self) -> None:
        """After the last range: `out` is what it is to be, rounded once to its dtype."""
        assert self._next == self._end
        if self._start == self._end:
            self._out_NH.zero_()


def _add_rows(
    out_NH: torch.Tensor,
    total_NH: torch.Tensor | None,
    rows_CH: torch.Tensor,
    rows_of_NK: torch.Tensor,
    first: int,
    *,
    places: bool,
) -> None:
    """out = total + rows; `out` may be `total`. Placed rows alone are written."""
    (tokens, choices), (rows, width) = rows_of_NK.shape, rows_CH.shape
    assert rows_CH.is_contiguous()
    block = _block(width)
    _add_kernel[(tokens, triton.cdiv(width, block))](
        out_NH if total_NH is None else total_NH, rows_CH, rows_of_NK, out_NH, first, rows,
        HAS_TOTAL=total_NH is not None, PLACES=places, K=choices, H=width, BLOCK_H=block,
        num_warps=_warps(block),
    )  # fmt: skip


def _add_rows_torch(
    out_NH: torch.Tensor,
    total_NH: torch.Tensor | None,
    rows_CH: torch.Tensor,
    rows_of_NK: torch.Tensor,
    first: int,
    *,
    places: bool,
) -> None:
    if places:
        row_of_N = rows_of_NK[:, 0] - first
        inside_N = (row_of_N >= 0) & (row_of_N < rows_CH.shape[0])
        out_NH[inside_N] = rows_CH.index_select(0, row_of_N[inside_N])
        return
    if total_NH is None:
        total_NH = torch.zeros_like(out_NH, dtype=accumulation_dtype(rows_CH.dtype))
    for row_of_N in (rows_of_NK - first).t().contiguous().unbind(0):
        inside_N = (row_of_N >= 0) & (row_of_N < rows_CH.shape[0])
        terms_NH = rows_CH.index_select(0, row_of_N.clamp(0, rows_CH.shape[0] - 1))
        total_NH += torch.where(inside_N[:, None], terms_NH, 0.0)
    out_NH.copy_(total_NH)


def _block(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def _warps(block: int) -> int:
    """16 bytes of a bf16 operand for each thread, in at least one warp."""
    return max(1, block // 256)


@triton.jit
def _gather_kernel(
    x_ptr, row_stride, column_stride, token_ptr, out_ptr, width, BLOCK_H: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < width
    token = tl.load(token_ptr + row)
    x = tl.load(x_ptr + token * row_stride + column * column_stride, mask=mask)
    tl.store(out_ptr + row * width + column, x, mask=mask)


@triton.jit
def _add_kernel(
    total_ptr,
    rows_ptr,
    rows_of_ptr,
    out_ptr,
    start,
    rows,
    HAS_TOTAL: tl.constexpr,
    PLACES: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,  # so that accesses under a mask of it are seen to be whole vectors
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < H
    if PLACES:  # a token without a row in the range is another range's
        row = tl.load(rows_of_ptr + token) - start
        mask = column < tl.where((row >= 0) & (row < rows), H, 0)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if HAS_TOTAL:
        total = tl.load(total_ptr + token * H + column, mask=mask, other=0.0)
    for choice in tl.static_range(K):
        row = tl.load(rows_of_ptr + token * K + choice) - start
        inside = tl.where((row >= 0) & (row < rows), H, 0)
        x = tl.load(rows_ptr + row * H + column, mask=column < inside, other=0.0)
        total += x.to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=mask)
