"""The Triton row movement of `moe_permute`: every row is read once and written once.

A token's program walks over its K rows by `row_of`, in the direction of either gather or scatter
(`gather_rows` alone goes by rows); since no row is twice in `row_of`, no two programs write the
same row, and sums have one order.
Blocks of a row are at most 4 KB, two 16-byte accesses a thread, except where a dot product wants
the row.

Accesses are vectors of V elements, the largest power of two up to 16 bytes that divides every
address, row stride and H; V is 1 where adjacent elements are not.
Shape suffixes: T tokens, K experts per token, R rows (T K at most), C of them, H hidden dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ACCESS_BYTES = 16
_BLOCK_BYTES = 4096
_WARP_BYTES = 1024
# Rows up to this many bytes are held whole by the kernel that needs their dot product.
_DOT_BLOCK_BYTES = 16384
# Most rows of a token whose reads are in flight together.
_MAX_UNROLL = 8


def spread_rows(
    x_TH: torch.Tensor,
    row_of_TK: torch.Tensor,
    probs_TK: torch.Tensor | None,
    out_RH: torch.Tensor,
) -> torch.Tensor:
    """out[row_of[t, k]] = probs[t, k] x[t] (probs 1 if None): [T, H] -> [R, H] in x's dtype.

    The product is fp32, rounded once; without probs bits are copied. Each token is read once. Any
    strides of x; out is dense. row_of: int64, every one of 0..R-1 once; a larger one is no row.
    """
    tokens, hidden = x_TH.shape
    choices = row_of_TK.shape[1]
    if out_RH.numel() == 0:
        return out_RH
    vector = _vector_elements(x_TH, out_RH)
    block, warps = _block(hidden, x_TH.element_size(), _BLOCK_BYTES)
    blocks = triton.cdiv(hidden, block)
    _spread_kernel[(tokens * blocks,)](
        x_TH, *_strides(x_TH, vector), out_RH, out_RH.shape[0], _dense(row_of_TK),
        _dense(probs_TK),
        HAS_PROBS=probs_TK is not None, K=choices, H=hidden, V=vector, BLOCK=block, BLOCKS=blocks,
        num_warps=warps,
    )  # fmt: skip
    return out_RH


def gather_rows(x_TH: torch.Tensor, token_of_row: torch.Tensor) -> torch.Tensor:
    """out[c] = x[token_of_row[c]]: [C, H], dense. For a range of rows, of which `row_of` would not
    tell which tokens to read. Any strides of x; token_of_row: int64 [C]."""
    rows, hidden = token_of_row.shape[0], x_TH.shape[1]
    out_CH = x_TH.new_empty((rows, hidden))
    if out_CH.numel() == 0:
        return out_CH
    vector = _vector_elements(x_TH, out_CH)
    block, warps = _block(hidden, x_TH.element_size(), _BLOCK_BYTES)
    blocks = triton.cdiv(hidden, block)
    _gather_kernel[(rows * blocks,)](
        x_TH, *_strides(x_TH, vector), token_of_row, out_CH,
        H=hidden, V=vector, BLOCK=block, BLOCKS=blocks, num_warps=warps,
    )  # fmt: skip
    return out_CH


def gather_sum(
    out_TH: torch.Tensor,
    rows_RH: torch.Tensor,
    row_of_TK: torch.Tensor,
    probs_TK: torch.Tensor | None,
    first_row: int = 0,
) -> torch.Tensor:
    """out[t] = sum_k probs[t, k] rows[row_of[t, k] - first_row]: [R, H] -> [T, H]; returns `out`.

    Summed in fp32 in the order of k, rounded once. Any strides of the rows; those of out are dense.
    row_of: int64, none below first_row; one of first_row + R or more is no row, and adds nothing.
    """
    tokens, choices = row_of_TK.shape
    hidden = rows_RH.shape[1]
    if out_TH.numel() == 0:
        return out_TH
    vector = _vector_elements(rows_RH, out_TH)
    unroll = max(n for n in range(1, _MAX_UNROLL + 1) if choices % n == 0)
    block, warps = _block(hidden, rows_RH.element_size(), _BLOCK_BYTES)
    blocks = triton.cdiv(hidden, block)
    _gather_sum_kernel[(tokens * blocks,)](
        rows_RH, *_strides(rows_RH, vector), first_row, rows_RH.shape[0],
        out_TH, out_TH.stride(0) // vector, _dense(row_of_TK), _dense(probs_TK),
        HAS_PROBS=probs_TK is not None, K=choices, UNROLL=unroll, H=hidden, V=vector,
        BLOCK=block, BLOCKS=blocks, num_warps=warps,
    )  # fmt: skip
    return out_TH


def combine_gradients(
    grad_TH: torch.Tensor,
    rows_RH: torch.Tensor,
    row_of_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    *,
    need_rows: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Both gradients of `gather_sum` in one pass over grad [T, H] and rows [R, H].

    d rows[row_of[t, k]] = probs[t, k] grad[t], in grad's dtype, if need_rows; and
    d probs[t, k] = <rows[row_of[t, k]], grad[t]>, summed in fp32, in probs' dtype. Any strides; the
    order of the sum over H depends on H and on how operands are aligned, on nothing else.
    """
    tokens, choices = row_of_TK.shape
    hidden = rows_RH.shape[1]
    drows_RH = grad_TH.new_empty(rows_RH.shape) if need_rows else None
    dprobs_TK = torch.empty((tokens, choices), dtype=probs_TK.dtype, device=probs_TK.device)
    if rows_RH.numel() == 0:
        return drows_RH, dprobs_TK.zero_()
    out_RH = grad_TH if drows_RH is None else drows_RH  # a stand-in that is not written
    vector = _vector_elements(grad_TH, rows_RH, out_RH)
    block, warps = _block(hidden, rows_RH.element_size(), _DOT_BLOCK_BYTES)
    _combine_gradients_kernel[(tokens,)](
        grad_TH, *_strides(grad_TH, vector), rows_RH, *_strides(rows_RH, vector), out_RH,
        dprobs_TK, _dense(row_of_TK), _dense(probs_TK),
        NEED_ROWS=need_rows, K=choices, H=hidden, V=vector, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return drows_RH, dprobs_TK


def _block(hidden: int, element_bytes: int, most_bytes: int) -> tuple[int, int]:
    """(elements of a block, warps), a function of the row alone, whatever the number of tokens."""
    block = min(triton.next_power_of_2(hidden), most_bytes // element_bytes)
    return block, max(1, min(16, block * element_bytes // _WARP_BYTES))


def _vector_elements(*tensors: torch.Tensor) -> int:
    """V for these [*, H] of one hidden dim; the element size is that of the first."""
    vector = _ACCESS_BYTES // tensors[0].element_size()
    for x in tensors:
        if x.stride(1) != 1:
            return 1
        while x.shape[1] % vector or x.stride(0) % vector or _address_units(x) % vector:
            vector //= 2
    return vector


def _address_units(x: torch.Tensor) -> int:
    return x.data_ptr() // x.element_size()


def _strides(x: torch.Tensor, vector: int) -> tuple[int, int]:
    """Row stride in vectors, so that the compiler sees its alignment, and column stride."""
    return x.stride(0) // vector, x.stride(1)


def _dense(map_or_probs_TK: torch.Tensor | None) -> torch.Tensor | None:
    """Small beside the rows, so copied where it is strided."""
    return None if map_or_probs_TK is None else map_or_probs_TK.contiguous()


@triton.jit
def _token_and_column(H: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """int64 token, int32 [BLOCK] columns and which of them exist, of one (token, block) program."""
    program = tl.program_id(0)
    token = program // BLOCKS
    column = (program - token * BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    return token.to(tl.int64), column, column < H


@triton.jit
def _spread_kernel(
    x_ptr, x_row_step, x_column_stride, out_ptr, rows, row_of_ptr, probs_ptr,
    HAS_PROBS: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, column, exists = _token_and_column(H, BLOCK, BLOCKS)
    source = token * x_row_step * V + column.to(tl.int64) * x_column_stride
    x = tl.load(x_ptr + source, mask=exists)
    for choice in range(K):
        row = tl.load(row_of_ptr + token * K + choice)
        value = x
        if HAS_PROBS:
            prob = tl.load(probs_ptr + token * K + choice)
            value = (x.to(tl.float32) * prob.to(tl.float32)).to(x.dtype)
        is_there = column < tl.where(row < rows, H, 0)
        tl.store(out_ptr + row * H + column, value, mask=is_there)


@triton.jit
def _gather_kernel(
    x_ptr, x_row_step, x_column_stride, token_ptr, out_ptr,
    H: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, column, exists = _token_and_column(H, BLOCK, BLOCKS)
    token = tl.load(token_ptr + row)
    source = token * x_row_step * V + column.to(tl.int64) * x_column_stride
    tl.store(out_ptr + row * H + column, tl.load(x_ptr + source, mask=exists), mask=exists)


@triton.jit
def _gather_sum_kernel(
    rows_ptr, rows_row_step, rows_column_stride, first_row, rows, out_ptr, out_row_step,
    row_of_ptr, probs_ptr,
    HAS_PROBS: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, H: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, column, exists = _token_and_column(H, BLOCK, BLOCKS)
    rows_ptr += column.to(tl.int64) * rows_column_stride
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, K, UNROLL):
        for step in tl.static_range(UNROLL):
            choice = first + step
            row = tl.load(row_of_ptr + token * K + choice) - first_row
            is_there = column < tl.where(row < rows, H, 0)
            term = tl.load(rows_ptr + row * rows_row_step * V, mask=is_there, other=0.0)
            term = term.to(tl.float32)
            if HAS_PROBS:
                term *= tl.load(probs_ptr + token * K + choice).to(tl.float32)
            total += term
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_row_step * V + column, out, mask=exists)


@triton.jit
def _row_products(
    grad, rows_ptr, drows_ptr, column, exists, prob, column_stride, NEED_ROWS: tl.constexpr
):
    """Writes prob * grad to a block of d rows; rows * grad of that block, float32."""
    if NEED_ROWS:
        drow = (grad * prob).to(drows_ptr.dtype.element_ty)
        tl.store(drows_ptr + column, drow, mask=exists)
    source = rows_ptr + column.to(tl.int64) * column_stride
    return tl.load(source, mask=exists, other=0.0).to(tl.float32) * grad


@triton.jit
def _combine_gradients_kernel(
    grad_ptr, grad_row_step, grad_column_stride, rows_ptr, rows_row_step, rows_column_stride,
    drows_ptr, dprobs_ptr, row_of_ptr, probs_ptr,
    NEED_ROWS: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    grad_ptr += token * grad_row_step * V
    if H <= BLOCK:
        whole_ptr = grad_ptr + lane.to(tl.int64) * grad_column_stride
        whole_grad = tl.load(whole_ptr, mask=lane < H, other=0.0).to(tl.float32)
    for choice in range(K):
        row = tl.load(row_of_ptr + token * K + choice)
        prob = tl.load(probs_ptr + token * K + choice).to(tl.float32)
        row_ptr = rows_ptr + row * rows_row_step * V
        drow_ptr = drows_ptr + row * H
        if H <= BLOCK:
            products = _row_products(
                whole_grad, row_ptr, drow_ptr, lane, lane < H, prob, rows_column_stride, NEED_ROWS
            )
        else:
            # A longer gradient comes again from the L1 or L2 cache for every choice.
            products = tl.zeros((BLOCK,), dtype=tl.float32)
            for first in range(0, H, BLOCK):
                column = first + lane
                exists = column < H
                grad = tl.load(
                    grad_ptr + column.to(tl.int64) * grad_column_stride, mask=exists, other=0.0
                ).to(tl.float32)
                products += _row_products(
                    grad, row_ptr, drow_ptr, column, exists, prob, rows_column_stride, NEED_ROWS
                )
        dprob = tl.sum(products, axis=0)
        tl.store(dprobs_ptr + token * K + choice, dprob.to(dprobs_ptr.dtype.element_ty))
