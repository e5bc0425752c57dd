"""What one rank packs, sends, assembles and gets back: its side of the plan, as tables.

A gather brings the pieces of a matrix to its owner; a scatter takes the result to every rank that
stores a piece. Between one pair of ranks, pieces lie in the order of the bucket's matrices, so both
ends know every offset and nothing but elements travels, each piece padded to 8 of them. What a rank
sends to itself lies behind all else and is copied, not sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megacomposer.kernels.muon_update import Piece, PieceTable, Rectangle, RectangleTable
from megacomposer.optim.muon_pieces import MatrixPiece
from megacomposer.optim.muon_plan import Bucket, MuonPlan

ALIGNMENT = 8
"""Elements. Stacks and pieces on the wire start at multiples, for accesses of 16 bytes."""
Located = tuple[int, MatrixPiece]
"""(index into the plan's matrices, one of its pieces)."""


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Makes what follows (on CUDA: on the current stream) wait for the exchange."""


class Link:
    """Starts exchanges and counts them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.collectives = 0
        self.sent_bytes = 0
        """To other ranks, not counting what a rank sends to itself."""
        self.received_bytes = 0
        self.reduced_bytes = 0

    def exchange(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        sizes: Sizes,
        group: dist.ProcessGroup,
    ) -> Pending:
        """Sends consecutive runs of `source` to the ranks of `group` and receives theirs, in order
        of the ranks; this rank's own run is the last of both."""
        self._keep(source, target, sizes, group.rank())
        width = source.element_size()
        sends, receives = sizes.others(group.rank())
        self.collectives += 1
        self.sent_bytes += sum(sends) * width
        self.received_bytes += sum(receives) * width
        # As bytes: no backend need know the dtype.
        pending: Pending = dist.all_to_all_single(
            target[: sum(receives)].view(torch.uint8),
            source[: sum(sends)].view(torch.uint8),
            [count * width for count in receives],
            [count * width for count in sends],
            group=group,
            async_op=True,
        )
        return pending

    def _keep(self, source: torch.Tensor, target: torch.Tensor, sizes: Sizes, own: int) -> None:
        """Copies what this rank sends to itself: a collective would do it on its few blocks. Before
        the exchange, for whose end the others wait."""
        sends, receives = sizes.others(own)
        assert sizes.sends[own] == sizes.receives[own], (own, sizes)
        first, last = sum(sends), sum(receives)
        kept = source[first : first + sizes.sends[own]]
        target[last : last + sizes.receives[own]].copy_(kept)

    def reduce_max(self, values: torch.Tensor) -> None:
        """The maximum over the world, in place."""
        self.collectives += 1
        self.reduced_bytes += values.numel() * values.element_size()
        dist.all_reduce(values, op=dist.ReduceOp.MAX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Elements to and from each rank of a group."""

    sends: list[int]
    receives: list[int]

    def others(self, own: int) -> tuple[list[int], list[int]]:
        """Sends and receives, with 0 for this rank's own run."""
        sends, receives = [*self.sends], [*self.receives]
        sends[own] = receives[own] = 0
        return sends, receives


class Held:
    """The matrices of which this rank stores a piece."""

    def __init__(self, plan: MuonPlan, rank: int) -> None:
        self.pieces: dict[int, list[MatrixPiece]] = {}
        """By index into the plan's matrices."""
        self.number: dict[int, int] = {}
        """The same keys -> place in this rank's vectors (amax, scales)."""
        for index, matrix in enumerate(plan.matrices):
            parameter = plan.parameters[matrix.parameter]
            position = parameter.grid.position(rank)
            pieces = parameter.geometry.pieces[position].get(matrix.index)
            if pieces is not None:
                self.number[index] = len(self.pieces)
                self.pieces[index] = pieces

    def piece(self, plan: MuonPlan, index: int, piece: MatrixPiece, wire_offset: int) -> Piece:
        """For the passes over storage, numbered for `amax` and `scales`."""
        return Piece(
            tensor=plan.matrices[index].parameter,
            offset=piece.offset,
            stride=piece.stride,
            rows=piece.rows,
            columns=piece.columns,
            matrix=self.number[index],
            wire_offset=wire_offset,
        )


class Stacks:
    """Where the matrices that a rank owns lie in a flat buffer: equal shapes side by side."""

    def __init__(self, plan: MuonPlan, owned: Sequence[int]) -> None:
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index in owned:
            matrix = plan.matrices[index]
            by_shape.setdefault((matrix.rows, matrix.columns), []).append(index)
        self.shapes: list[tuple[int, int, int]] = []
        self.place: dict[int, tuple[int, int]] = {}
        """Index into the plan's matrices -> (number of its stack, first element in the stack)."""
        self.starts: list[int] = []
        self.elements = 0
        for number, ((rows, columns), indices) in enumerate(by_shape.items()):
            self.shapes.append((len(indices), rows, columns))
            self.starts.append(self.elements)
            self.elements += _aligned(len(indices) * rows * columns)
            for i, index in enumerate(indices):
                self.place[index] = (number, i * rows * columns)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """[B, rows, columns] of each stack in the flat buffer."""
        return [
            buffer[start : start + b * m * n].view(b, m, n)
            for start, (b, m, n) in zip(self.starts, self.shapes, strict=True)
        ]

    def start(self, index: int) -> int:
        number, within = self.place[index]
        return self.starts[number] + within


class Rule(NamedTuple):
    """What the coefficients of a matrix's update depend on."""

    parameter: int
    rows: int
    columns: int


class UpdateTable:
    """The pieces that an update is written to."""

    def __init__(
        self,
        plan: MuonPlan,
        held: Held,
        located: Sequence[tuple[Located, int]],
        device: torch.device,
    ) -> None:
        """`located`: pieces, each with its first element in the update."""
        number: dict[int, int] = {}
        pieces = []
        for (index, piece), wire_offset in located:
            matrix = number.setdefault(index, len(number))
            entry = held.piece(plan, index, piece, wire_offset)
            pieces.append(dataclasses.replace(entry, matrix=matrix))
        self.table = PieceTable(pieces, device)
        matrices = [plan.matrices[index] for index in number]
        self.rules = [Rule(matrix.parameter, matrix.rows, matrix.columns) for matrix in matrices]
        """Of each matrix of the table."""


class WholeWork:
    """Matrices that this rank both stores whole and owns: packed straight into stacks."""

    def __init__(
        self, plan: MuonPlan, matrices: Sequence[int], held: Held, device: torch.device
    ) -> None:
        self.stacks = Stacks(plan, matrices)
        self.table = PieceTable(
            [
                held.piece(
                    plan, index, piece, self.stacks.start(index) + _place(plan, index, piece)
                )
                for index in matrices
                for piece in held.pieces[index]
            ],
            device,
        )
        self._plan, self._held, self._device = plan, held, device

    def updates(self) -> list[UpdateTable]:
        """For each stack, reading the update from its result."""
        located: list[list[tuple[Located, int]]] = [[] for _ in self.stacks.shapes]
        for index, (number, within) in self.stacks.place.items():
            for piece in self._held.pieces[index]:
                at = within + _place(self._plan, index, piece)
                located[number].append(((index, piece), at))
        return [UpdateTable(self._plan, self._held, part, self._device) for part in located]


class Exchange:
    """This rank's side of one bucket."""

    def __init__(
        self,
        plan: MuonPlan,
        bucket: Bucket,
        held: Held,
        members: range,
        rank: int,
        device: torch.device,
    ) -> None:
        """`members`: the ranks of the exchange group, in its order."""
        self.kind, self.gathers = bucket.kind, bucket.gathers
        matrices = [i for i in bucket.matrices if plan.matrices[i].owner in members]
        self.is_idle = not matrices
        """No rank of this group has a part in the bucket."""
        owned = [i for i in matrices if plan.matrices[i].owner == rank]
        self.stacks = Stacks(plan, owned)
        sends: list[list[Located]] = [[] for _ in members]
        receives: list[list[Located]] = [[] for _ in members]
        results: list[list[Located]] = [[] for _ in members]
        returns: list[list[Located]] = [[] for _ in members]
        for index in matrices:
            owner = plan.matrices[index].owner
            to_owner = members.index(owner)
            parameter = plan.parameters[plan.matrices[index].parameter]
            grid, replica = parameter.grid, parameter.grid.replica(owner)
            own_pieces = [(index, piece) for piece in held.pieces.get(index, ())]
            returns[to_owner] += own_pieces
            if grid.replica(rank) == replica:  # the owner's own replica feeds it
                sends[to_owner] += own_pieces
            if owner != rank:
                continue
            for position in parameter.geometry.holders[plan.matrices[index].index]:
                pieces = parameter.geometry.pieces[position][plan.matrices[index].index]
                located = [(index, piece) for piece in pieces]
                receives[members.index(grid.rank(position, replica))] += located
                for holder in grid.holders(position):
                    results[members.index(holder)] += located
        own = members.index(rank)
        self.gather = Sizes(sends=_sizes(sends), receives=_sizes(receives))
        self.scatter = Sizes(sends=_sizes(results), receives=_sizes(returns))
        if self.gathers:
            self.pack = PieceTable(
                [held.piece(plan, *located, offset) for located, offset in _offsets(sends, own)],
                device,
            )
            self.assembly = RectangleTable(
                [_assemble(plan, self.stacks, *entry) for entry in _offsets(receives, own)], device
            )
        else:
            self.pack = WholeWork(plan, owned, held, device).table
        self.disassembly = _disassemble(plan, self.stacks, _offsets(results, own), device)
        self.update = UpdateTable(plan, held, _offsets(returns, own), device)

    @property
    def held_elements(self) -> int:
        """Room for the pieces that this rank stores."""
        gathered = sum(self.gather.sends) if self.gathers else 0
        return max(gathered, sum(self.scatter.receives))

    @property
    def owned_elements(self) -> int:
        """Room for the pieces of the matrices that it owns, for all replicas."""
        gathered = sum(self.gather.receives) if self.gathers else 0
        return max(gathered, sum(self.scatter.sends))


def local_work(
    plan: MuonPlan,
    rank: int,
    held: Held,
    device: torch.device,
    *,
    limit_bytes: float,
    wire_bytes: int,
    chunks: int,
) -> list[WholeWork]:
    """What this rank does without any other, in about `chunks` parts or more, each bounded."""
    own = [index for index in plan.local if plan.matrices[index].owner == rank]
    sizes = [plan.matrices[i].rows * plan.matrices[i].columns * wire_bytes for i in own]
    limit = min(limit_bytes, -(-sum(sizes) // chunks))
    parts: list[list[int]] = []
    room = 0.0
    for index, size in zip(own, sizes, strict=True):
        if not parts or room < size:
            parts.append([])
            room = limit
        parts[-1].append(index)
        room -= size
    return [WholeWork(plan, part, held, device) for part in parts]


def _place(plan: MuonPlan, index: int, piece: MatrixPiece) -> int:
    """First element of a piece in its matrix, which it crosses from side to side."""
    columns = plan.matrices[index].columns
    assert piece.columns == columns, (plan.matrices[index], piece)
    return piece.row * columns


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _sizes(lists: Iterable[Sequence[Located]]) -> list[int]:
    return [sum(_aligned(piece.rows * piece.columns) for _, piece in located) for located in lists]


def _offsets(lists: Sequence[Sequence[Located]], own: int) -> list[tuple[Located, int]]:
    """Every piece with its first element in a wire buffer, this rank's own run last."""
    entries, offset = [], 0
    for located in (*lists[:own], *lists[own + 1 :], lists[own]):
        for entry in located:
            entries.append((entry, offset))
            offset += _aligned(entry[1].rows * entry[1].columns)
    return entries


def _assemble(plan: MuonPlan, stacks: Stacks, located: Located, offset: int) -> Rectangle:
    index, piece = located
    columns = plan.matrices[index].columns
    return Rectangle(
        source_offset=offset,
        source_stride=piece.columns,
        target_offset=stacks.start(index) + piece.row * columns + piece.column,
        target_stride=columns,
        rows=piece.rows,
        columns=piece.columns,
    )


def _disassemble(
    plan: MuonPlan, stacks: Stacks, entries: Sequence[tuple[Located, int]], device: torch.device
) -> list[RectangleTable]:
    """For each stack, from its result to the wire buffer."""
    rectangles: list[list[Rectangle]] = [[] for _ in stacks.shapes]
    for (index, piece), offset in entries:
        columns = plan.matrices[index].columns
        number, within = stacks.place[index]
        rectangles[number].append(
            Rectangle(
                source_offset=within + piece.row * columns + piece.column,
                source_stride=columns,
                target_offset=offset,
                target_stride=piece.columns,
                rows=piece.rows,
                columns=piece.columns,
            )
        )
    return [RectangleTable(part, device) for part in rectangles]
