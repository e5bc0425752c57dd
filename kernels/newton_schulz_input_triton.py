"""The Triton passes of newton_schulz_input: largest entry, then scale, cast and squares.

Shape letters: B matrices, R lines of memory and C adjacent entries of each. Blocks of a matrix
depend on R and C alone, and sums of squares follow a tree of pairs that is written out: the order
of `tl.sum` is that of the registers, which the compiler lays out by the alignment of pointers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Entries that a program holds at once, and how often it comes back.
_LOG_BLOCK = 11
_STEPS = 16
_LOG_PARTIALS = 10
# Rows and columns that a program of the transposing copy moves.
_SQUARE = 64


def scaled_cast_triton(
    x: torch.Tensor, compute_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scaled_cast` for x [B, m, n] in fp16, bf16 or fp32; not empty."""
    x_BRC, is_transposed = _lines(x)
    amax_bits = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    rows, columns, block_R, block_C, blocks = _blocks(x_BRC)
    _amax_kernel[(len(x) * blocks,)](
        x_BRC, amax_bits, rows, columns, x_BRC.stride(1), x_BRC.stride(0), blocks,
        BLOCK_R=block_R, BLOCK_C=block_C, STEPS=_STEPS,
    )  # fmt: skip
    y_BRC = torch.empty(x_BRC.shape, dtype=compute_dtype, device=x.device)
    norm = _norm(x_BRC, y_BRC, amax_bits)
    return (y_BRC.mT if is_transposed else y_BRC), norm


def frobenius_norm_triton(y: torch.Tensor) -> torch.Tensor:
    """`frobenius_norm` for y [B, m, n] in fp16, bf16 or fp32; not empty."""
    return _norm(_lines(y)[0], None, None)


def row_major_copy(x: torch.Tensor) -> torch.Tensor:
    """x [B, m, n], unit stride along m, copied to unit stride along n; torch's copy takes 5 times
    as long (64 x 128 x 7168 on an H200)."""
    batch, rows, columns = x.shape
    y = torch.empty((batch, rows, columns), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, _SQUARE), triton.cdiv(columns, _SQUARE), batch)
    _transpose_kernel[grid](x, y, rows, columns, x.stride(2), x.stride(0), BLOCK=_SQUARE)
    return y


def _lines(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """x with adjacent entries last, and whether it was transposed for that."""
    if x.stride(2) == 1 or x.shape[2] == 1:
        return x, False
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x.mT, True
    raise ValueError(f"needs unit stride in one of the last two dims, got {x.stride()}")


def _blocks(x_BRC: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Rows, columns, rows and columns that a program holds at once, programs of a matrix."""
    _, rows, columns = x_BRC.shape
    block_C = min(512, triton.next_power_of_2(columns))
    block_R = 2**_LOG_BLOCK // block_C
    blocks = triton.cdiv(rows, block_R * _STEPS) * triton.cdiv(columns, block_C)
    return rows, columns, block_R, block_C, blocks


def _norm(
    x_BRC: torch.Tensor, y_BRC: torch.Tensor | None, amax_bits: torch.Tensor | None
) -> torch.Tensor:
    """The norm of each matrix of x, or of what is written to y: 2^k x in its dtype."""
    batch = len(x_BRC)
    rows, columns, block_R, block_C, blocks = _blocks(x_BRC)
    partial = torch.empty((batch, blocks), dtype=torch.float32, device=x_BRC.device)
    norm = torch.empty(batch, dtype=torch.float32, device=x_BRC.device)
    _squares_kernel[(batch * blocks,)](
        x_BRC, y_BRC, amax_bits, partial, rows, columns, x_BRC.stride(1), x_BRC.stride(0), blocks,
        BLOCK_R=block_R, BLOCK_C=block_C, STEPS=_STEPS, LEVELS=_LOG_BLOCK,
    )  # fmt: skip
    _root_kernel[(batch,)](partial, norm, blocks, LEVELS=_LOG_PARTIALS)
    return norm


@triton.jit
def _transpose_kernel(
    x_ptr, y_ptr, rows, columns, column_stride, matrix_stride, BLOCK: tl.constexpr
):
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += matrix * matrix_stride
    y_ptr += matrix * rows * columns
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    x = tl.load(x_ptr + column[:, None] * column_stride + row[None, :], mask=inside)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(y_ptr + row[:, None] * columns + column[None, :], tl.trans(x), mask=inside)


@triton.jit
def _amax_kernel(
    x_ptr,
    amax_bits_ptr,
    rows,
    columns,
    row_stride,
    matrix_stride,
    blocks,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
):
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    row, column = _corner(tl.program_id(0) % blocks, columns, BLOCK_R, BLOCK_C, STEPS)
    x_ptr += matrix * matrix_stride
    largest = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for step in tl.static_range(STEPS):
        r = row + step * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        c = column + tl.arange(0, BLOCK_C)[None, :]
        mask = (r < rows) & (c < columns)
        x = tl.load(x_ptr + r * row_stride + c, mask=mask, other=0.0).to(tl.float32)
        # as integers magnitudes keep their order, and NaN is above all
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax_bits_ptr + matrix, tl.max(largest), sem="relaxed")


@triton.jit
def _squares_kernel(
    x_ptr,
    y_ptr,
    amax_bits_ptr,
    partial_ptr,
    rows,
    columns,
    row_stride,
    matrix_stride,
    blocks,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STEPS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    program = tl.program_id(0)
    matrix = (program // blocks).to(tl.int64)
    row, column = _corner(program % blocks, columns, BLOCK_R, BLOCK_C, STEPS)
    x_ptr += matrix * matrix_stride
    if y_ptr is not None:
        y_ptr += matrix * rows * columns
        scale = _power_of_two_scale(tl.load(amax_bits_ptr + matrix))
    squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        r = row + step * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        c = column + tl.arange(0, BLOCK_C)[None, :]
        mask = (r < rows) & (c < columns)
        x = tl.load(x_ptr + r * row_stride + c, mask=mask, other=0.0).to(tl.float32)
        if y_ptr is not None:
            y = (x * scale).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + r * columns + c, y, mask=mask)
            x = y.to(tl.float32)
        squares += x * x
    tl.store(partial_ptr + program, _pairwise_sum(squares, LEVELS))


@triton.jit
def _root_kernel(partial_ptr, norm_ptr, blocks, LEVELS: tl.constexpr):
    BLOCK: tl.constexpr = 2**LEVELS
    matrix = tl.program_id(0)
    partial_ptr += matrix.to(tl.int64) * blocks
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += tl.load(partial_ptr + i, mask=i < blocks, other=0.0)
    tl.store(norm_ptr + matrix, tl.sqrt_rn(_pairwise_sum(sums, LEVELS)))


@triton.jit
def _corner(block, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr):
    across = tl.cdiv(columns, BLOCK_C)
    row = (block // across).to(tl.int64) * (BLOCK_R * STEPS)
    return row, block % across * BLOCK_C


@triton.jit
def _power_of_two_scale(amax_bits):
    """`power_of_two_scale` of the float32 with these bits, but for 0, which any factor keeps: its
    exponent field is that of frexp plus 126, or 0 where k is at its bound."""
    field = amax_bits >> 23
    k = tl.where(field == 255, 0, tl.minimum(141 - field, 126))
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pairwise_sum(x, LEVELS: tl.constexpr):
    """The sum of the 2^LEVELS elements of x, as a tree of neighbours."""
    x = tl.reshape(x, (2**LEVELS,))
    for _ in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
        x = left + right
    return tl.sum(x)
