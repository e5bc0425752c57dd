"""The Triton kernels behind `muon_update`: one launch a pass, whatever the number of tensors.

A program takes one chunk of one piece, a block at a time. Rows are addressed by their gap: element
i of a piece lies at i + (i // width) * gap, and a run without gaps is a piece of width 2^30 and gap
0. Where address, width, gap and size of the piece allow it, accesses are vectors of V = 4 elements
(16 bytes in float32); elsewhere V is 1, in the same code. Products and sums are never fused
(`enable_fp_fusion`), so that results equal those of torch bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(2048)  # elements; few enough for the registers of many programs at once
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_INTEGERS = {2: torch.int16, 4: torch.int32}


def update_momentum(
    addresses: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    *,
    mu: float,
    nesterov: bool,
    num_matrices: int,
    chunk: int,
) -> torch.Tensor:
    """addresses: int64 [tensors, 2] of gradients and momenta. The rest: `muon_update`."""
    amax = torch.zeros(num_matrices, dtype=torch.int32, device=addresses.device)
    _momentum_kernel[(chunks.shape[0],)](
        addresses, rows, chunks, amax, mu, NESTEROV=nesterov, CHUNK=chunk, **_OPTIONS
    )
    return amax.view(torch.float32)


def pack(
    addresses: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    mu: float,
    nesterov: bool,
    chunk: int,
) -> None:
    """addresses: int64 [tensors, 2] of gradients and momenta. The rest: `muon_update`."""
    _pack_kernel[(chunks.shape[0],)](
        addresses, rows, chunks, scales, out, mu, NESTEROV=nesterov, CHUNK=chunk, **_OPTIONS
    )


def copy_rectangles(
    source: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    *,
    chunk: int,
) -> None:
    """See `muon_update`."""
    integer = _INTEGERS[source.element_size()]
    _copy_kernel[(chunks.shape[0],)](
        source.view(integer), target.view(integer), rows, chunks,
        BYTES=source.element_size(), CHUNK=chunk, **_OPTIONS,
    )  # fmt: skip


def apply_update(
    addresses: torch.Tensor,
    rows: torch.Tensor,
    chunks: torch.Tensor,
    update: torch.Tensor,
    coefficients: torch.Tensor,
    decays: torch.Tensor,
    *,
    cautious: bool,
    chunk: int,
) -> None:
    """addresses: int64 [tensors, 1] of parameters; coefficients, decays: float32 on the device."""
    _update_kernel[(chunks.shape[0],)](
        addresses, rows, chunks, update, coefficients, decays,
        CAUTIOUS=cautious, CHUNK=chunk, **_OPTIONS,
    )  # fmt: skip


@triton.jit
def _piece(rows_ptr, chunks_ptr):
    """(slot, offset, width, gap, elements, wire offset, matrix, alignment, first element)."""
    chunk_ptr = chunks_ptr + tl.program_id(0).to(tl.int64) * 2
    first = tl.load(chunk_ptr + 1)
    row_ptr = rows_ptr + tl.load(chunk_ptr) * 8
    slot = tl.load(row_ptr)
    offset = tl.load(row_ptr + 1)
    width = tl.load(row_ptr + 2)
    gap = tl.load(row_ptr + 3)
    elements = tl.load(row_ptr + 4)
    wire_offset = tl.load(row_ptr + 5)
    matrix = tl.load(row_ptr + 6)
    alignment = tl.load(row_ptr + 7)
    return slot, offset, width, gap, elements, wire_offset, matrix, alignment, first


@triton.jit
def _pointer(address, V: tl.constexpr):
    """A float32 pointer; for V > 1 the address is a multiple of 16."""
    pointer = address.to(tl.pointer_type(tl.float32))
    if V > 1:
        # On this value, which the branch for V = 1 does not share.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _visible(offset, V: tl.constexpr):
    """offset, a multiple of V, so written that the compiler sees it to be one."""
    return offset // V * V


@triton.jit
def _end(elements, first, CHUNK: tl.constexpr):
    """Elements in the chunk, int32."""
    return tl.minimum(elements - first, CHUNK).to(tl.int32)


@triton.jit
def _lanes(step, end, V: tl.constexpr):
    """Elements of a block counted from the chunk's first, int32 [_BLOCK / V, V], and which vectors
    exist, [_BLOCK / V, 1]: a mask by element would split the accesses."""
    vectors = ((step // V + tl.arange(0, _BLOCK // V)) * V)[:, None]
    return vectors + tl.arange(0, V)[None, :], vectors < end


@triton.jit
def _jumps(step, first, width, gap, V: tl.constexpr):
    """What the gaps before each lane add to its position, int64 [_BLOCK / V, 1]."""
    row = first // width
    column = (first - row * width).to(tl.int32) // V
    further = (column + step // V + tl.arange(0, _BLOCK // V)) // (width // V).to(tl.int32)
    return ((row + further.to(tl.int64)) * (gap // V) * V)[:, None]


@triton.jit
def _momentum_chunk(
    gradient, momentum, offset, width, gap, elements, first, mu,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    gradient_ptr = _pointer(gradient, V) + _visible(offset + first, V)
    momentum_ptr = _pointer(momentum, V) + _visible(offset + first, V)
    largest = tl.zeros((_BLOCK // V, V), tl.int32)
    end = _end(elements, first, CHUNK)
    for step in tl.range(0, end, _BLOCK):
        lanes, exists = _lanes(step, end, V)
        positions = _jumps(step, first, width, gap, V) + lanes
        g = tl.load(gradient_ptr + positions, mask=exists, other=0.0)
        m = tl.load(momentum_ptr + positions, mask=exists, other=0.0) * mu + g
        tl.store(momentum_ptr + positions, m, mask=exists)
        direction = m * mu + g if NESTEROV else m
        # Without their sign bit, floats order as integers do, with NaN above infinity.
        largest = tl.maximum(largest, direction.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _momentum_kernel(
    addresses_ptr, rows_ptr, chunks_ptr, amax_ptr, mu,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot, offset, width, gap, elements, _, matrix, alignment, first = _piece(rows_ptr, chunks_ptr)
    gradient = tl.load(addresses_ptr + slot * 2)
    momentum = tl.load(addresses_ptr + slot * 2 + 1)
    if (alignment >= 4) & ((gradient | momentum) % 16 == 0):
        largest = _momentum_chunk(
            gradient, momentum, offset, width, gap, elements, first, mu, NESTEROV, CHUNK, 4
        )
    else:
        largest = _momentum_chunk(
            gradient, momentum, offset, width, gap, elements, first, mu, NESTEROV, CHUNK, 1
        )
    tl.atomic_max(amax_ptr + matrix, largest, sem="relaxed")


@triton.jit
def _pack_chunk(
    gradient, momentum, offset, width, gap, elements, first, mu, scale, wire_ptr, wire_offset,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    gradient_ptr = _pointer(gradient, V) + _visible(offset + first, V)
    momentum_ptr = _pointer(momentum, V) + _visible(offset + first, V)
    wire_ptr += _visible(wire_offset + first, V)
    end = _end(elements, first, CHUNK)
    for step in tl.range(0, end, _BLOCK):
        lanes, exists = _lanes(step, end, V)
        positions = _jumps(step, first, width, gap, V) + lanes
        direction = tl.load(momentum_ptr + positions, mask=exists, other=0.0)
        if NESTEROV:
            g = tl.load(gradient_ptr + positions, mask=exists, other=0.0)
            direction = direction * mu + g
        scaled = (direction * scale).to(wire_ptr.dtype.element_ty)
        tl.store(wire_ptr + lanes, scaled, mask=exists)


@triton.jit
def _pack_kernel(
    addresses_ptr, rows_ptr, chunks_ptr, scales_ptr, wire_ptr, mu,
    NESTEROV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot, offset, width, gap, elements, wire_offset, matrix, alignment, first = _piece(
        rows_ptr, chunks_ptr
    )
    gradient = tl.load(addresses_ptr + slot * 2)
    momentum = tl.load(addresses_ptr + slot * 2 + 1)
    scale = tl.load(scales_ptr + matrix)
    if (alignment >= 4) & ((gradient | momentum | wire_ptr.to(tl.int64)) % 16 == 0):
        _pack_chunk(
            gradient, momentum, offset, width, gap, elements, first, mu, scale, wire_ptr,
            wire_offset, NESTEROV, CHUNK, 4,
        )  # fmt: skip
    else:
        _pack_chunk(
            gradient, momentum, offset, width, gap, elements, first, mu, scale, wire_ptr,
            wire_offset, NESTEROV, CHUNK, 1,
        )  # fmt: skip


@triton.jit
def _update_chunk(
    parameter, offset, width, gap, elements, first, coefficient, decay, wire_ptr, wire_offset,
    CAUTIOUS: tl.constexpr, CHUNK: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    parameter_ptr = _pointer(parameter, V) + _visible(offset + first, V)
    wire_ptr += _visible(wire_offset + first, V)
    end = _end(elements, first, CHUNK)
    for step in tl.range(0, end, _BLOCK):
        lanes, exists = _lanes(step, end, V)
        positions = _jumps(step, first, width, gap, V) + lanes
        p = tl.load(parameter_ptr + positions, mask=exists, other=0.0)
        u = tl.load(wire_ptr + lanes, mask=exists, other=0.0).to(tl.float32)
        decayed = p * decay
        if CAUTIOUS:
            decayed = tl.where(u * p > 0, decayed, p)
        tl.store(parameter_ptr + positions, decayed - u * coefficient, mask=exists)


@triton.jit
def _update_kernel(
    addresses_ptr, rows_ptr, chunks_ptr, wire_ptr, coefficients_ptr, decays_ptr,
    CAUTIOUS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot, offset, width, gap, elements, wire_offset, matrix, alignment, first = _piece(
        rows_ptr, chunks_ptr
    )
    parameter = tl.load(addresses_ptr + slot)
    coefficient = tl.load(coefficients_ptr + matrix)
    decay = tl.load(decays_ptr + matrix)
    if (alignment >= 4) & ((parameter | wire_ptr.to(tl.int64)) % 16 == 0):
        _update_chunk(
            parameter, offset, width, gap, elements, first, coefficient, decay, wire_ptr,
            wire_offset, CAUTIOUS, CHUNK, 4,
        )  # fmt: skip
    else:
        _update_chunk(
            parameter, offset, width, gap, elements, first, coefficient, decay, wire_ptr,
            wire_offset, CAUTIOUS, CHUNK, 1,
        )  # fmt: skip


@triton.jit
def _copy_chunk(
    source_ptr, target_ptr, source_offset, target_offset, width, source_gap, target_gap, elements,
    first, CHUNK: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    source_ptr += _visible(source_offset + first, V)
    target_ptr += _visible(target_offset + first, V)
    end = _end(elements, first, CHUNK)
    for step in tl.range(0, end, _BLOCK):
        lanes, exists = _lanes(step, end, V)
        source = _jumps(step, first, width, source_gap, V) + lanes
        target = _jumps(step, first, width, target_gap, V) + lanes
        tl.store(target_ptr + target, tl.load(source_ptr + source, mask=exists), mask=exists)


@triton.jit
def _copy_kernel(
    source_ptr, target_ptr, rows_ptr, chunks_ptr, BYTES: tl.constexpr, CHUNK: tl.constexpr
):
    chunk_ptr = chunks_ptr + tl.program_id(0).to(tl.int64) * 2
    first = tl.load(chunk_ptr + 1)
    row_ptr = rows_ptr + tl.load(chunk_ptr) * 7
    source_offset = tl.load(row_ptr)
    target_offset = tl.load(row_ptr + 1)
    width = tl.load(row_ptr + 2)
    source_gap = tl.load(row_ptr + 3)
    target_gap = tl.load(row_ptr + 4)
    elements = tl.load(row_ptr + 5)
    alignment = tl.load(row_ptr + 6)
    V: tl.constexpr = 16 // BYTES
    if (alignment >= V) & ((source_ptr.to(tl.int64) | target_ptr.to(tl.int64)) % 16 == 0):
        _copy_chunk(
            source_ptr, target_ptr, source_offset, target_offset, width, source_gap, target_gap,
            elements, first, CHUNK, V,
        )  # fmt: skip
    else:
        _copy_chunk(
            source_ptr, target_ptr, source_offset, target_offset, width, source_gap, target_gap,
            elements, first, CHUNK, 1,
        )  # fmt: skip
