"""The Triton kernel of batched_products_triton: output tiles of a list of products."""

from __future__ import annotations

import triton
import triton.language as tl

# Of an int64 table with a row for each product: tiles up to its end, M, N, K, B; address, stride
# and matrix stride of a, b, out and c; address and stride of matrix_scale; the float32 bits of
# alpha, beta and diagonal.
TABLE_COLUMNS = tl.constexpr(22)


@triton.jit
def products_kernel(
    table_ptr,
    num_products,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    C_T: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    OVERLAP_STORES: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    start = tl.full((), 0, tl.int32)
    for product in range(num_products):
        row_ptr = table_ptr + product * TABLE_COLUMNS
        end = tl.load(row_ptr).to(tl.int32)
        # the first tile of this product that falls to this program
        first = start + (program + programs - start % programs) % programs
        if first < end:
            _product(
                row_ptr, first - start, end - start, programs, DTYPE, OUT_DTYPE, A_T, B_T, C_T,
                SYMMETRIC, DESCRIPTORS, EVEN, TILE_M, TILE_N, TILE_K, OVERLAP_STORES,
            )  # fmt: skip
        start = end


@triton.jit
def _product(
    row_ptr,
    first,
    count,
    step,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    C_T: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    OVERLAP_STORES: tl.constexpr,
):
    M = _load_size(row_ptr + 1, EVEN)
    N = _load_size(row_ptr + 2, EVEN)
    K = _load_size(row_ptr + 3, EVEN)
    B = tl.load(row_ptr + 4).to(tl.int32)
    a = _tensor(row_ptr + 5, B, M, K, DTYPE, A_T, TILE_M, TILE_K, DESCRIPTORS, EVEN)
    b = _tensor(row_ptr + 8, B, K, N, DTYPE, B_T, TILE_K, TILE_N, DESCRIPTORS, EVEN)
    out = _tensor(row_ptr + 11, B, M, N, OUT_DTYPE, False, TILE_M, TILE_N, DESCRIPTORS, EVEN)
    if C_T is not None:
        c = _tensor(row_ptr + 14, B, M, N, DTYPE, C_T, TILE_M, TILE_N, DESCRIPTORS, EVEN)
    scale_ptr = tl.load(row_ptr + 17).to(tl.pointer_type(tl.float32))
    scale_stride = tl.load(row_ptr + 18)
    has_scale = scale_ptr.to(tl.int64) != 0
    alpha = tl.load(row_ptr + 19).to(tl.int32).to(tl.float32, bitcast=True)
    beta = tl.load(row_ptr + 20).to(tl.int32).to(tl.float32, bitcast=True)
    diagonal = tl.load(row_ptr + 21).to(tl.int32).to(tl.float32, bitcast=True)
    tile_rows = tl.cdiv(M, TILE_M)
    tile_columns = tl.cdiv(N, TILE_N)
    tiles = tile_rows * (tile_rows + 1) // 2 if SYMMETRIC else tile_rows * tile_columns
    for index in tl.range(first, count, step, num_stages=2 if OVERLAP_STORES else 1):
        matrix = index // tiles
        tile_row, tile_column = _tile(index % tiles, tile_rows, tile_columns, SYMMETRIC)
        row = tile_row * TILE_M
        column = tile_column * TILE_N
        sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        if DTYPE.is_fp32():
            # long sums in parts, whose errors do not add up
            for part_start in range(0, K, 512):
                part = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
                for k in range(part_start, tl.minimum(part_start + 512, K), TILE_K):
                    a_tile = _load(a, matrix, row, k, M, K, A_T, TILE_M, TILE_K, DESCRIPTORS)
                    b_tile = _load(b, matrix, k, column, K, N, B_T, TILE_K, TILE_N, DESCRIPTORS)
                    part = tl.dot(a_tile, b_tile, part, input_precision="ieee")
                sums += part
        else:
            for k in range(0, K, TILE_K):
                a_tile = _load(a, matrix, row, k, M, K, A_T, TILE_M, TILE_K, DESCRIPTORS)
                b_tile = _load(b, matrix, k, column, K, N, B_T, TILE_K, TILE_N, DESCRIPTORS)
                sums = tl.dot(a_tile, b_tile, sums)
        scale = tl.load(scale_ptr + matrix * scale_stride, mask=has_scale, other=1.0)
        sums *= alpha * scale
        if C_T is not None:
            c_tile = _load(c, matrix, row, column, M, N, C_T, TILE_M, TILE_N, DESCRIPTORS)
            sums += beta * c_tile.to(tl.float32)
        rows = (row + tl.arange(0, TILE_M))[:, None]
        columns = (column + tl.arange(0, TILE_N))[None, :]
        if SYMMETRIC:
            if tile_row == tile_column:
                sums = tl.where(rows == columns, sums + diagonal, sums)
                result = sums.to(OUT_DTYPE)
                result = tl.where(rows >= columns, result, tl.trans(result))
            else:
                result = sums.to(OUT_DTYPE)
                mirrored = tl.trans(result)
                _store(out, matrix, column, row, mirrored, M, N, TILE_N, TILE_M, DESCRIPTORS)
        else:
            result = tl.where(rows == columns, sums + diagonal, sums).to(OUT_DTYPE)
        _store(out, matrix, row, column, result, M, N, TILE_M, TILE_N, DESCRIPTORS)


@triton.jit
def _tile(index, tile_rows, tile_columns, SYMMETRIC: tl.constexpr):
    """Row and column of a tile: in groups of 8 tile rows, a group column by column. A group of the
    lower triangle is the rectangle left of its diagonal block, then that block's own triangle."""
    GROUP: tl.constexpr = 8
    if SYMMETRIC:
        first = _triangle_row(index) // GROUP * GROUP
        index -= first * (first + 1) // 2
        height = tl.minimum(tile_rows - first, GROUP)
        below = tl.maximum(index - first * height, 0)
        i = _triangle_row(below)
        is_left = index < first * height
        row = tl.where(is_left, index % height, i)
        column = tl.where(is_left, index // height, first + below - i * (i + 1) // 2)
    else:
        first = index // (GROUP * tile_columns) * GROUP
        index -= first * tile_columns
        height = tl.minimum(tile_rows - first, GROUP)
        row = index % height
        column = index // height
    return first + row, column


@triton.jit
def _triangle_row(index):
    """The largest i with i (i + 1) / 2 <= index."""
    i = ((tl.sqrt((8 * index + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
    i -= (i * (i + 1) // 2 > index).to(tl.int32)
    return i + ((i + 1) * (i + 2) // 2 <= index).to(tl.int32)


@triton.jit
def _load_size(ptr, EVEN: tl.constexpr):
    size = tl.load(ptr).to(tl.int32)
    return tl.multiple_of(size, 16) if EVEN else size


@triton.jit
def _tensor(
    fields_ptr,
    batch,
    rows,
    columns,
    DTYPE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """What `_load` and `_store` take: a descriptor, or a pointer and the two strides."""
    ptr = tl.load(fields_ptr).to(tl.pointer_type(DTYPE))
    stride = tl.load(fields_ptr + 1)
    matrix_stride = tl.load(fields_ptr + 2)
    if DESCRIPTORS:
        if TRANSPOSED:
            return tl.make_tensor_descriptor(
                ptr, [batch, columns, rows], [matrix_stride, stride, 1], [1, TILE_C, TILE_R]
            )
        else:
            return tl.make_tensor_descriptor(
                ptr, [batch, rows, columns], [matrix_stride, stride, 1], [1, TILE_R, TILE_C]
            )
    else:
        if EVEN:
            ptr = tl.multiple_of(ptr, 16)
            stride = tl.multiple_of(stride, 4)
            matrix_stride = tl.multiple_of(matrix_stride, 4)
        return ptr, stride, matrix_stride


@triton.jit
def _load(
    tensor,
    matrix,
    row,
    column,
    rows,
    columns,
    TRANSPOSED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """[TILE_R, TILE_C], zero outside the matrix."""
    if DESCRIPTORS:
        if TRANSPOSED:
            return tl.trans(tensor.load([matrix, column, row]).reshape(TILE_C, TILE_R))
        else:
            return tensor.load([matrix, row, column]).reshape(TILE_R, TILE_C)
    else:
        ptr, stride, matrix_stride = tensor
        # what the loop over k moves is one scalar; the rest is the same at every step
        ptr += matrix * matrix_stride
        ptr += row + column * stride if TRANSPOSED else row * stride + column
        r = tl.arange(0, TILE_R)[:, None]
        c = tl.arange(0, TILE_C)[None, :]
        offsets = r + c * stride if TRANSPOSED else r * stride + c
        return tl.load(ptr + offsets, mask=(r < rows - row) & (c < columns - column), other=0.0)


@triton.jit
def _store(
    tensor,
    matrix,
    row,
    column,
    value,
    rows,
    columns,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    if DESCRIPTORS:
        tensor.store([matrix, row, column], value.reshape(1, TILE_R, TILE_C))
    else:
        ptr, stride, matrix_stride = tensor
        ptr += matrix * matrix_stride + row * stride + column
        r = tl.arange(0, TILE_R)[:, None]
        c = tl.arange(0, TILE_C)[None, :]
        tl.store(ptr + r * stride + c, value, mask=(r < rows - row) & (c < columns - column))
