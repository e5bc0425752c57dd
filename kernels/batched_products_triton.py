"""The portable path of batched_products: one persistent Triton kernel over a list of products.

A launch takes the products of one `_Variant` (dtypes, operand layouts, tiling) and walks one list
of output tiles: products in order, the matrices of a product in order, the tiles of a matrix in
groups of tile rows, so that what runs together shares operands in the L2 cache. For symmetric
products the list holds the tiles of the lower triangle, and each is stored mirrored as well.

Tilings are a table of dtype and shape, the summed dim runs from first to last within one program,
and nothing is tuned at run time: the bits of a matrix depend on its own entries, shape and strides.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .batched_products import Product, row_major
from .batched_products_kernel import TABLE_COLUMNS, products_kernel

# Products of one launch; longer lists take several.
_MAX_PRODUCTS = 32
# In the interpreter: few, so that each program runs several tiles.
_INTERPRETED_PROGRAMS = 3
# Of a multiprocessor.
_REGISTERS = 2**16
_TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a program computes one tile of `out`."""

    m: int
    """Rows of a tile."""
    n: int
    """Columns of a tile."""
    k: int
    """Entries of the summed dim that one step takes."""
    warps: int
    stages: int
    """Steps whose operands are in shared memory at once."""
    programs: int
    """Programs that share a multiprocessor."""
    overlap_stores: bool = False
    """Whether a tile leaves from shared memory of its own while the next is computed."""


# Half precision through descriptors, by rows and columns of a tile.
_HALF = {
    (128, 256): Tiling(m=128, n=256, k=64, warps=8, stages=3, programs=1, overlap_stores=True),
    (128, 128): Tiling(m=128, n=128, k=64, warps=8, stages=3, programs=2),
    (128, 64): Tiling(m=128, n=64, k=64, warps=4, stages=4, programs=2),
    (64, 128): Tiling(m=64, n=128, k=64, warps=4, stages=4, programs=2),
    (64, 64): Tiling(m=64, n=64, k=64, warps=4, stages=4, programs=3),
}
# Half precision without them: on devices that have none, and for strides that they cannot take.
_HALF_BY_POINTERS = Tiling(m=64, n=64, k=64, warps=8, stages=3, programs=2)
# float32 is multiplied in float32, not TF32, and so outside the tensor cores.
_SINGLE = Tiling(m=64, n=64, k=16, warps=8, stages=2, programs=2)


def tiling(product: Product, *, descriptors: bool) -> Tiling:
    """A function of dtypes, strides and the shape of one matrix, and of nothing else."""
    if product.a.dtype == torch.float32:
        return _SINGLE
    if not descriptors:
        return _HALF_BY_POINTERS
    _, m, n = product.out.shape
    rows = _side(m, (128, 64))
    if product.symmetric:
        return _HALF[rows, rows]
    # a 128 x 256 tile of float32 results does not fit beside the operands
    is_wide = rows == 128 and product.out.dtype != torch.float32
    return _HALF[rows, _side(n, (256, 128, 64) if is_wide else (128, 64))]


def _side(size: int, sides: tuple[int, ...]) -> int:
    """The largest side that pads `size` by at most a fifth more than the smallest one does."""
    least = triton.cdiv(size, sides[-1]) * sides[-1]
    return next(side for side in sides if triton.cdiv(size, side) * side <= 1.2 * least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Variant:
    """What a launch is compiled for."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    tiling: Tiling
    a_is_transposed: bool
    """[K, M] in memory."""
    b_is_transposed: bool
    """[N, K] in memory."""
    c_is_transposed: bool | None
    """[N, M] in memory; None without c."""
    symmetric: bool
    descriptors: bool
    """Whether tiles move by the tensor memory accelerator."""
    even: bool
    """Whether pointers move 16 bytes at once: all tensors are `_Layout.aligned`, and M, N and K
    multiples of 16."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layout:
    """A [B, rows, columns] tensor as memory has it."""

    address: int
    is_transposed: bool
    """Adjacent along the rows' dim."""
    stride: int
    """Elements between rows, or between columns if transposed."""
    matrix_stride: int
    """Elements between matrices."""
    aligned: bool
    """Starts at 16 bytes, and steps by multiples of 16 between rows and between matrices."""

    @staticmethod
    def of(x: torch.Tensor) -> _Layout:
        batch, rows, columns = x.shape
        is_transposed = x.stride(2) != 1 and columns > 1
        if is_transposed and x.stride(1) != 1 and rows > 1:
            raise ValueError(f"needs unit stride in one of the last two dims, got {x.stride()}")
        lines, width = (columns, rows) if is_transposed else (rows, columns)
        unit = 16 // x.element_size()
        # where there is no second line, or no second matrix, the stride is free
        stride = x.stride(2 if is_transposed else 1) if lines > 1 else -(-width // unit) * unit
        matrix_stride = x.stride(0) if batch > 1 else -(-stride * lines // unit) * unit
        aligned = x.data_ptr() % 16 == 0
        aligned &= all(s > 0 and s % unit == 0 for s in (stride, matrix_stride))
        return _Layout(
            address=x.data_ptr(),
            is_transposed=is_transposed,
            stride=stride,
            matrix_stride=matrix_stride,
            aligned=aligned,
        )


def run_products_triton(products: Sequence[Product], *, reserved_sms: int = 0) -> None:
    """Computes every `out` of `products`, all on one device.

    reserved_sms: how many multiprocessors' share of programs is not launched, so that other work
        on the device, such as communication, finds room.

    Raises ValueError for a tensor without unit stride in its last two dims, and if no
    multiprocessor is left.
    """
    launches: dict[_Variant, list[tuple[int, ...]]] = {}
    for product in products:
        if product.out.numel() > 0:
            variant, row = _table_row(row_major(product))
            launches.setdefault(variant, []).append(row)
    for variant, rows in launches.items():
        for start in range(0, len(rows), _MAX_PRODUCTS):
            part = rows[start : start + _MAX_PRODUCTS]
            _launch(variant, part, products[0].out.device, reserved_sms)


def _table_row(product: Product) -> tuple[_Variant, tuple[int, ...]]:
    """The variant of a product with row-contiguous `out`, and its row of the kernel's table."""
    a, b, out = (_Layout.of(x) for x in (product.a, product.b, product.out))
    c = _Layout.of(product.c) if product.c is not None and product.beta != 0.0 else None
    batch, m, n = product.out.shape
    k = product.a.shape[2]
    aligned = all(layout.aligned for layout in (a, b, out, c) if layout is not None)
    descriptors = aligned and k > 0 and _has_descriptors(product.a)
    tile = tiling(product, descriptors=descriptors)
    variant = _Variant(
        dtype=product.a.dtype,
        out_dtype=product.out.dtype,
        tiling=tile,
        a_is_transposed=a.is_transposed,
        b_is_transposed=b.is_transposed,
        c_is_transposed=None if c is None else c.is_transposed,
        symmetric=product.symmetric,
        descriptors=descriptors,
        even=aligned and not descriptors and m % 16 == n % 16 == k % 16 == 0,
    )
    tile_rows, tile_columns = -(-m // tile.m), -(-n // tile.n)
    count = tile_rows * (tile_rows + 1) // 2 if product.symmetric else tile_rows * tile_columns
    row = [batch * count, m, n, k, batch]
    for layout in (a, b, out, c):
        row += [layout.address, layout.stride, layout.matrix_stride] if layout else [0, 0, 0]
    scale = product.matrix_scale
    assert scale is None or scale.dtype == torch.float32, scale.dtype
    row += [0, 0] if scale is None else [scale.data_ptr(), scale.stride(0)]
    row += [_float_bits(x) for x in (product.alpha, product.beta, product.diagonal)]
    return variant, tuple(row)


def _float_bits(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def _has_descriptors(x: torch.Tensor) -> bool:
    """Whether the device has the tensor memory accelerator; float32 gains nothing from it."""
    if not x.is_cuda or x.dtype == torch.float32:
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)


def _launch(
    variant: _Variant, rows: list[tuple[int, ...]], device: torch.device, reserved_sms: int
) -> None:
    ends = list(itertools.accumulate(row[0] for row in rows))
    table = tuple((end, *row[1:]) for end, row in zip(ends, rows, strict=True))
    assert ends[-1] < 2**31, ends
    tile = variant.tiling
    programs = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count - reserved_sms
        if processors < 1:
            raise ValueError(f"reserved_sms={reserved_sms} leaves no multiprocessor")
        programs = processors * tile.programs
        triton.set_allocator(_workspace)
    products_kernel[(min(programs, ends[-1]),)](
        _device_table(table, device),
        len(rows),
        DTYPE=_TRITON_DTYPES[variant.dtype],
        OUT_DTYPE=_TRITON_DTYPES[variant.out_dtype],
        A_T=variant.a_is_transposed,
        B_T=variant.b_is_transposed,
        C_T=variant.c_is_transposed,
        SYMMETRIC=variant.symmetric,
        DESCRIPTORS=variant.descriptors,
        EVEN=variant.even,
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        OVERLAP_STORES=tile.overlap_stores,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=min(255, _REGISTERS // (32 * tile.warps * tile.programs)),
    )


def _workspace(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Where the programs keep their descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _device_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.tensor(rows, dtype=torch.int64)
    captured = _captured_rows()
    if not torch.cuda.is_current_stream_capturing():
        return _cached_table(rows, device, torch.cuda.current_stream(device).cuda_stream)
    # Every replay copies from the host again: from memory that is never given out twice.
    return captured.put(rows).to(device, non_blocking=True)


@functools.lru_cache(maxsize=1024)
def _cached_table(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int
) -> torch.Tensor:
    """Buffers of a training step come back at the same addresses, and their tables with them."""
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


class _CapturedRows:
    """Pinned memory for the tables of captured launches, allocated before any capture."""

    def __init__(self) -> None:
        self._memory = torch.empty((2**14, TABLE_COLUMNS.value), dtype=torch.int64, pin_memory=True)
        self._used = 0

    def put(self, rows: tuple[tuple[int, ...], ...]) -> torch.Tensor:
        start, self._used = self._used, self._used + len(rows)
        if self._used > len(self._memory):
            raise RuntimeError(f"more than {len(self._memory)} products in captured CUDA graphs")
        part = self._memory[start : self._used]
        part.copy_(torch.tensor(rows, dtype=torch.int64))
        return part


_captured_rows = functools.cache(_CapturedRows)
