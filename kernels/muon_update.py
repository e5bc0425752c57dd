"""Muon's elementwise passes over many parameters at once: momentum, pack, copy, update.

Newton-Schulz works on whole logical matrices, storage holds parts of them. A `PieceTable` lists the
parts; each pass goes over all of them, in one launch on CUDA. Every element sees the same roundings
whatever piece it lies in, so no result depends on how the matrices are cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from . import muon_update_triton
from .dispatch import choose

CHUNK = 8192
"""Elements of one program of the Triton kernels."""
_FLAT_WIDTH = 2**30  # row width given to a run without gaps, where any width addresses the same
_MAX_ALIGNMENT = 16  # elements


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one logical matrix: a rectangle in a tensor, contiguous in a wire buffer."""

    tensor: int
    """Index into the lists of gradients, momenta and parameters."""
    offset: int
    """Its first element, counted from the start of that contiguous tensor."""
    stride: int
    """Elements between its rows in the tensor."""
    rows: int
    """Rows of the rectangle."""
    columns: int
    """Columns of the rectangle; adjacent in the tensor."""
    matrix: int
    """Index into per-matrix vectors: amax, scales, coefficients, decays."""
    wire_offset: int
    """Its first element in the wire buffer, where it is row-major without gaps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rectangle:
    """A copy between two flat buffers. All fields count elements."""

    source_offset: int
    """First element in the source."""
    source_stride: int
    """Elements between rows in the source."""
    target_offset: int
    """First element in the target."""
    target_stride: int
    """Elements between rows in the target."""
    rows: int
    """Rows of the rectangle."""
    columns: int
    """Columns of the rectangle; adjacent in both."""


class PieceTable:
    """Pieces, on the host and as the kernels read them. Pieces without elements are left out."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device | str) -> None:
        """Raises ValueError for a negative field, or rows that overlap."""
        self.pieces = tuple(piece for piece in pieces if piece.rows and piece.columns)
        self.tensors = sorted({piece.tensor for piece in self.pieces})
        self.num_matrices = max((piece.matrix + 1 for piece in self.pieces), default=0)
        self.elements = dict.fromkeys(self.tensors, 0)
        self.extents = dict.fromkeys(self.tensors, 0)
        self.wire_extent = 0
        slots = {tensor: slot for slot, tensor in enumerate(self.tensors)}
        table = []
        for piece in self.pieces:
            _check_fields(piece, piece.stride)
            count, t = piece.rows * piece.columns, piece.tensor
            self.elements[t] += count
            self.extents[t] = max(self.extents[t], _end(piece, piece.offset, piece.stride))
            self.wire_extent = max(self.wire_extent, piece.wire_offset + count)
            width, gap = _width_and_gaps(piece, piece.stride)
            numbers = (piece.offset, width, gap, count, piece.wire_offset)
            table.append((slots[t], *numbers, piece.matrix, math.gcd(_MAX_ALIGNMENT, *numbers)))
        self.rows, self.chunks = _on_device(table, [row[4] for row in table], device)
        self.device = self.rows.device


class RectangleTable:
    """Rectangles, on the host and as the kernel reads them. Those without elements are left out."""

    def __init__(self, rectangles: Sequence[Rectangle], device: torch.device | str) -> None:
        """Raises ValueError for a negative field, or rows that overlap."""
        self.rectangles = tuple(part for part in rectangles if part.rows and part.columns)
        self.source_extent = self.target_extent = 0
        table = []
        for part in self.rectangles:
            _check_fields(part, part.source_stride, part.target_stride)
            source_end = _end(part, part.source_offset, part.source_stride)
            target_end = _end(part, part.target_offset, part.target_stride)
            self.source_extent = max(self.source_extent, source_end)
            self.target_extent = max(self.target_extent, target_end)
            width, *gaps = _width_and_gaps(part, part.source_stride, part.target_stride)
            numbers = (part.source_offset, part.target_offset, width, *gaps)
            count = part.rows * part.columns
            table.append((*numbers, count, math.gcd(_MAX_ALIGNMENT, *numbers, count)))
        self.rows, self.chunks = _on_device(table, [row[5] for row in table], device)
        self.device = self.rows.device


@torch.no_grad()
def update_momentum(
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    table: PieceTable,
    *,
    mu: float,
    nesterov: bool,
    num_matrices: int,
) -> torch.Tensor:
    """momentum <- momentum * mu + gradient, in place, and the largest entry of each direction.

    The direction is momentum * mu + gradient with `nesterov`, else the momentum. All products and
    sums are rounded one by one to float32.

    Args:
        gradients, momenta: contiguous float32, pairwise of one size; the table tiles them exactly.

    Returns:
        float32 [num_matrices]: max |direction| over the pieces of each matrix here, 0 where there
        are none; NaN where a direction is.

    Raises:
        ValueError: the tensors or `num_matrices` do not fit the table.
    """
    for name, tensors in (("gradients", gradients), ("momenta", momenta)):
        _check_tensors(name, tensors, table)
        for index, tensor in enumerate(tensors):
            if tensor.numel() != table.elements.get(index, 0):
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, its pieces "
                    f"{table.elements.get(index, 0)}: the table must tile every tensor"
                )
    _check_matrices("num_matrices", num_matrices, table)
    if not table.pieces:
        return torch.zeros(num_matrices, device=table.device)
    if choose("muon_momentum", _flat(momenta[table.tensors[0]])) == "triton":
        return muon_update_triton.update_momentum(
            _addresses(table, gradients, momenta), table.rows, table.chunks,
            mu=mu, nesterov=nesterov, num_matrices=num_matrices, chunk=CHUNK,
        )  # fmt: skip
    for index in table.tensors:
        _flat(momenta[index]).mul_(mu).add_(_flat(gradients[index]))
    amax = torch.zeros(num_matrices, device=table.device)
    for piece in table.pieces:
        largest = _direction(gradients, momenta, piece, mu, nesterov).abs().amax()
        amax[piece.matrix] = torch.maximum(amax[piece.matrix], largest)
    return amax


@torch.no_grad()
def pack(
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    table: PieceTable,
    *,
    mu: float,
    nesterov: bool,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes cast(direction * scale) of every piece to its place in the wire buffer `out`.

    The direction is that of `update_momentum`, which has run; the rest of `out` is left alone.

    Args:
        scales: contiguous float32 [at least the table's matrices].
        out: flat, fp16, bf16 or fp32.

    Raises:
        ValueError: a tensor does not fit the table.
    """
    for name, tensors in (("gradients", gradients), ("momenta", momenta)):
        _check_tensors(name, tensors, table)
    _check_flat("scales", scales, table.num_matrices, table.device)
    if scales.dtype != torch.float32:
        raise ValueError(f"scales must be float32, got {scales.dtype}")
    _check_flat("out", out, table.wire_extent, table.device)
    if not table.pieces:
        return
    if choose("muon_pack", out) == "triton":
        muon_update_triton.pack(
            _addresses(table, gradients, momenta), table.rows, table.chunks, scales, out,
            mu=mu, nesterov=nesterov, chunk=CHUNK,
        )  # fmt: skip
        return
    for piece in table.pieces:
        direction = _direction(gradients, momenta, piece, mu, nesterov)
        _on_wire(out, piece).copy_(direction * scales[piece.matrix])


@torch.no_grad()
def copy_rectangles(source: torch.Tensor, target: torch.Tensor, table: RectangleTable) -> None:
    """Copies every rectangle of the table from `source` to `target`, bit for bit.

    Args:
        source, target: flat, of one dtype (fp16, bf16 or fp32); they must not overlap.

    Raises:
        ValueError: the buffers differ in dtype, or do not fit the table.
    """
    if source.dtype != target.dtype:
        raise ValueError(f"source is {source.dtype} and target {target.dtype}; use one dtype")
    _check_flat("source", source, table.source_extent, table.device)
    _check_flat("target", target, table.target_extent, table.device)
    if not table.rectangles:
        return
    if choose("muon_copy", source) == "triton":
        muon_update_triton.copy_rectangles(source, target, table.rows, table.chunks, chunk=CHUNK)
        return
    for part in table.rectangles:
        shape = (part.rows, part.columns)
        _strided(target, shape, part.target_offset, part.target_stride).copy_(
            _strided(source, shape, part.source_offset, part.source_stride)
        )


@torch.no_grad()
def apply_update(
    parameters: Sequence[torch.Tensor],
    table: PieceTable,
    update: torch.Tensor,
    *,
    coefficients: Sequence[float],
    decays: Sequence[float],
    cautious: bool,
) -> None:
    """parameter <- parameter * decay - coefficient * update over every piece, in place.

    Both products and the difference are rounded one by one to float32. With `cautious` the decay
    applies only where update * parameter > 0, so that it never works against the update
    (after arXiv 2411.16085).

    Args:
        parameters: contiguous float32.
        update: the wire buffer, flat, fp16, bf16 or fp32.
        coefficients, decays: one per matrix, rounded to float32 once.

    Raises:
        ValueError: a tensor or a sequence does not fit the table.
    """
    _check_tensors("parameters", parameters, table)
    _check_flat("update", update, table.wire_extent, table.device)
    _check_matrices("coefficients", len(coefficients), table)
    _check_matrices("decays", len(decays), table)
    if not table.pieces:
        return
    if choose("muon_update", update) == "triton":
        muon_update_triton.apply_update(
            _addresses(table, parameters), table.rows, table.chunks, update,
            _to_device([*coefficients], torch.float32, table.device),
            _to_device([*decays], torch.float32, table.device),
            cautious=cautious, chunk=CHUNK,
        )  # fmt: skip
        return
    for piece in table.pieces:
        p = _in_tensor(parameters, piece)
        u = _on_wire(update, piece).float()
        decayed = p * decays[piece.matrix]
        if cautious:
            decayed = torch.where(u * p > 0, decayed, p)
        p.copy_(decayed - u * coefficients[piece.matrix])


def _direction(
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    piece: Piece,
    mu: float,
    nesterov: bool,
) -> torch.Tensor:
    momentum = _in_tensor(momenta, piece)
    return momentum * mu + _in_tensor(gradients, piece) if nesterov else momentum


def _strided(
    tensor: torch.Tensor, shape: tuple[int, int], offset: int, stride: int
) -> torch.Tensor:
    return tensor.detach().as_strided(shape, (stride, 1), tensor.storage_offset() + offset)


def _in_tensor(tensors: Sequence[torch.Tensor], piece: Piece) -> torch.Tensor:
    """[rows, columns] view of the piece in its tensor."""
    return _strided(tensors[piece.tensor], (piece.rows, piece.columns), piece.offset, piece.stride)


def _on_wire(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[rows, columns] view of the piece in a wire buffer."""
    return _strided(buffer, (piece.rows, piece.columns), piece.wire_offset, piece.columns)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _check_fields(part: Piece | Rectangle, *strides: int) -> None:
    fields = dataclasses.asdict(part)
    if min(fields.values()) < 0:
        raise ValueError(f"{part} has a negative field")
    if part.rows > 1 and min(strides) < part.columns:
        raise ValueError(f"the rows of {part} overlap: its stride is less than its columns")


def _end(part: Piece | Rectangle, offset: int, stride: int) -> int:
    return offset + (part.rows - 1) * stride + part.columns


def _width_and_gaps(part: Piece | Rectangle, *strides: int) -> tuple[int, ...]:
    """Row width and the gap after a row under each stride, as the kernels address them."""
    if part.rows == 1 or all(stride == part.columns for stride in strides):
        return (_FLAT_WIDTH, *(0 for _ in strides))
    if part.columns > _FLAT_WIDTH:
        raise ValueError(f"{part} has gaps between rows of more than 2^30 columns")
    return (part.columns, *(stride - part.columns for stride in strides))


def _on_device(
    table: Sequence[tuple[int, ...]], counts: Sequence[int], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table's rows, and (row, first element) of every chunk of CHUNK elements; both int64."""
    rows = torch.tensor(table, dtype=torch.int64)
    chunks_per_row = -(-torch.tensor(counts, dtype=torch.int64) // CHUNK)
    row = torch.repeat_interleave(torch.arange(len(counts)), chunks_per_row)
    before = torch.repeat_interleave(chunks_per_row.cumsum(0) - chunks_per_row, chunks_per_row)
    first = (torch.arange(row.numel()) - before) * CHUNK
    return rows.to(device), torch.stack((row, first), dim=1).to(device)


def _addresses(table: PieceTable, *lists: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [tensors of the table, lists]: where each tensor starts."""
    addresses = [[tensors[index].data_ptr() for tensors in lists] for index in table.tensors]
    return _to_device(addresses, torch.int64, table.device)


def _to_device(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Pinned, so that the copy need not wait; the allocator keeps the block until it is done.
    pinned = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def _check_tensors(name: str, tensors: Sequence[torch.Tensor], table: PieceTable) -> None:
    if table.tensors and table.tensors[-1] >= len(tensors):
        raise ValueError(f"{name} has {len(tensors)} tensors, the table needs more")
    for index in table.tensors:
        tensor = tensors[index]
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{name}[{index}] must be contiguous float32, got {tensor.dtype}")
        if tensor.device != table.device:
            raise ValueError(f"{name}[{index}] is on {tensor.device}, the table on {table.device}")
        if tensor.numel() < table.extents[index]:
            raise ValueError(
                f"{name}[{index}] has {tensor.numel()} elements, its pieces reach "
                f"{table.extents[index]}"
            )


def _check_flat(name: str, buffer: torch.Tensor, extent: int, device: torch.device) -> None:
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() < extent:
        raise ValueError(
            f"{name} must be flat, contiguous and of at least {extent} elements, "
            f"got shape {tuple(buffer.shape)}"
        )
    if buffer.device != device:
        raise ValueError(f"{name} is on {buffer.device}, the table on {device}")


def _check_matrices(name: str, count: int, table: PieceTable) -> None:
    if count < table.num_matrices:
        raise ValueError(f"{name}: {count} matrices, the table has {table.num_matrices}")
