"""Which ranks hold which rectangle of each logical matrix: arithmetic on placements alone.

Shapes are two-dimensional here: the leading dims of a stack of experts are folded into its rows,
so an expert's matrix is a rectangle like any other.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.mesh.sharding import TensorLayout

if TYPE_CHECKING:
    from megacomposer.model.parameters import Matrix

Rectangle2D = tuple[int, int, int, int]
"""(first row, first column, rows, columns)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatrixPiece:
    """A rectangle of one logical matrix, and where the ranks of one position store it."""

    row: int
    """Its first row in the matrix."""
    column: int
    rows: int
    columns: int
    offset: int
    """Its first element in the contiguous local storage."""
    stride: int
    """Elements between its rows there."""


class RankGrid:
    """The ranks of the world as (position, replica): ranks of one position store the same part.

    A replica is a smallest set of ranks that together store a parameter whole.
    """

    def __init__(self, layout: Layout, placement: Placement) -> None:
        if placement.kind == "expert":
            self._inner, self._shard = layout.ep, layout.expert_shard
        else:
            self._inner, self._shard = layout.tp, layout.dense_shard
        # A dense weight that TP does not split is stored by every TP rank alike.
        self._is_split = placement.kind == "expert" or placement.tp_dim is not None
        self.num_positions = self._shard * (self._inner if self._is_split else 1)
        self.num_replicas = layout.world_size // self.num_positions

    def position(self, rank: int) -> int:
        within = rank % (self._shard * self._inner)
        return within if self._is_split else within // self._inner

    def replica(self, rank: int) -> int:
        outer = rank // (self._shard * self._inner)
        return outer if self._is_split else outer * self._inner + rank % self._inner

    def rank(self, position: int, replica: int) -> int:
        if self._is_split:
            return replica * self.num_positions + position
        outer, inner = divmod(replica, self._inner)
        return (outer * self._shard + position) * self._inner + inner

    def holders(self, position: int) -> list[int]:
        """The ranks that store what `position` does, one for each replica."""
        return [self.rank(position, replica) for replica in range(self.num_replicas)]


class Geometry:
    """The pieces of every matrix of one parameter, at every position; shared by equal layers."""

    def __init__(
        self,
        placement: Placement,
        matrices: Sequence[Matrix],
        grid: RankGrid,
        layouts: Sequence[Layout],
    ) -> None:
        """`layouts[rank]` is the layout of each rank. ValueError where parts do not add up."""
        shape = placement.global_shape
        if len(shape) < 2:
            raise ValueError(f"{placement.name} of shape {shape} cannot consist of matrices")
        rectangles = [_folded_matrix(placement, matrix) for matrix in matrices]
        whole = (math.prod(shape[:-1]), shape[-1])
        fault = tiling_fault(rectangles, *whole)
        if fault is not None:
            raise ValueError(f"matrices of {placement.name} of shape {shape}: {fault}")
        self.pieces: list[dict[int, list[MatrixPiece]]] = []
        """Per position: matrix index -> its pieces there, in the order of the matrices."""
        self.holders: list[list[int]] = [[] for _ in matrices]
        """Per matrix: the positions that hold a piece of it, ascending."""
        self.elements: list[int] = []
        """Per position: elements stored there."""
        finder = _Overlaps(rectangles)
        for position in range(grid.num_positions):
            stored = placement.on(layouts[grid.rank(position, 0)])
            found = _intersect(stored, finder)
            self.pieces.append(found)
            self.elements.append(math.prod(stored.local_shape))
            for index in found:
                self.holders[index].append(position)
        self._check(placement, rectangles)

    def _check(self, placement: Placement, rectangles: Sequence[Rectangle2D]) -> None:
        for index, (_, _, rows, columns) in enumerate(rectangles):
            pieces = [
                (piece.row, piece.column, piece.rows, piece.columns)
                for position in self.holders[index]
                for piece in self.pieces[position][index]
            ]
            fault = tiling_fault(pieces, rows, columns)
            if fault is not None:
                raise ValueError(
                    f"stored pieces of matrix {index} of {placement.name}, {rows} x {columns}: "
                    f"{fault}"
                )


def layouts_of_world(layout: Layout) -> list[Layout]:
    """The same layout as every rank of it sees it, without process groups."""
    sizes = layout.describe()
    world_size = sizes.pop("world_size")
    config = MeshConfig(**sizes)
    return [
        Layout(config, world_size=world_size, rank=rank, device_type="cpu")
        for rank in range(world_size)
    ]


def tiling_fault(parts: Sequence[Rectangle2D], rows: int, columns: int) -> str | None:
    """Why the parts do not tile a rows x columns rectangle, or None where they do."""
    active: list[Rectangle2D] = []
    for part in sorted(parts):
        row, column, height, width = part
        inside = 0 <= row <= row + height <= rows and 0 <= column <= column + width <= columns
        if not inside or height < 1 or width < 1:
            return f"{height} x {width} at ({row}, {column}) is not inside {rows} x {columns}"
        active = [other for other in active if other[0] + other[2] > row]
        for other in active:
            if other[1] < column + width and column < other[1] + other[3]:
                return f"two of them hold element ({row}, {max(column, other[1])})"
        active.append(part)
    covered = sum(height * width for _, _, height, width in parts)
    if covered != rows * columns:
        return f"they hold {covered} of {rows * columns} elements"
    return None


class _Overlaps:
    """Finds the rectangles that overlap another one without looking at all of them."""

    def __init__(self, rectangles: Sequence[Rectangle2D]) -> None:
        self._sorted = sorted((rectangle, index) for index, rectangle in enumerate(rectangles))
        self._first_rows = [rectangle[0] for rectangle, _ in self._sorted]
        self._most_rows = max((rectangle[2] for rectangle in rectangles), default=0)

    def of(self, part: Rectangle2D) -> list[tuple[int, Rectangle2D, Rectangle2D]]:
        """(index, the rectangle, its overlap with `part`)."""
        row, column, height, width = part
        start = bisect.bisect_right(self._first_rows, row - self._most_rows)
        end = bisect.bisect_left(self._first_rows, row + height)
        found = []
        for rectangle, index in self._sorted[start:end]:
            top, left = max(row, rectangle[0]), max(column, rectangle[1])
            bottom = min(row + height, rectangle[0] + rectangle[2])
            right = min(column + width, rectangle[1] + rectangle[3])
            if top < bottom and left < right:
                found.append((index, rectangle, (top, left, bottom - top, right - left)))
        return found


def _intersect(stored: TensorLayout, finder: _Overlaps) -> dict[int, list[MatrixPiece]]:
    """The pieces of matrices in one rank's storage."""
    pieces: dict[int, list[MatrixPiece]] = {}
    width = stored.local_shape[-1]
    for block in stored.blocks:
        *leading, height, columns = block.shape
        for place in itertools.product(*(range(extent) for extent in leading)):
            row, column = _fold(block.global_offset, place, stored.global_shape)
            local_row, local_column = _fold(block.local_offset, place, stored.local_shape)
            for index, matrix, overlap in finder.of((row, column, height, columns)):
                at_row = local_row + overlap[0] - row
                at_column = local_column + overlap[1] - column
                pieces.setdefault(index, []).append(
                    MatrixPiece(
                        row=overlap[0] - matrix[0],
                        column=overlap[1] - matrix[1],
                        rows=overlap[2],
                        columns=overlap[3],
                        offset=at_row * width + at_column,
                        stride=width,
                    )
                )
    return dict(sorted(pieces.items()))


def _fold(
    offset: tuple[int, ...], place: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, int]:
    """(row, column) of `offset`, moved by `place` in the leading dims, with those folded."""
    row = 0
    for start, step, extent in zip(offset[:-2], place, shape[:-2], strict=True):
        row = row * extent + start + step
    return row * shape[-2] + offset[-2], offset[-1]


def _folded_matrix(placement: Placement, matrix: Matrix) -> Rectangle2D:
    shape = placement.global_shape
    if len(matrix.shape) != len(shape) or math.prod(matrix.shape[:-2]) != 1:
        raise ValueError(
            f"a matrix of {placement.name} has shape {matrix.shape}; in a parameter of shape "
            f"{shape} its extents before the last two must be 1"
        )
    bounds = zip(matrix.offset, matrix.shape, shape, strict=True)
    if not all(0 <= start < start + extent <= size for start, extent, size in bounds):
        raise ValueError(f"{matrix} is not inside {placement.name} of shape {shape}")
    row, column = _fold(matrix.offset, (0,) * (len(shape) - 2), shape)
    return row, column, matrix.rows, matrix.columns
