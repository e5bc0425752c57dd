"""How one rank's storage maps onto a global tensor: the map every room shares.

A parameter (or an optimizer moment) has one layout-free *global* shape. A rank stores a set of
rectangles of it, called blocks, inside one local tensor. TP, FSDP, EP, CP, uneven and empty shards
are all this one mechanism: `optim` gathers matrices from blocks, `checkpoint` writes blocks, and
the gradient norm counts each block once.
"""

from __future__ import annotations

import dataclasses
import math

import torch

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A rectangle of the global tensor and where this rank keeps it."""

    local_offset: Shape
    """Where the rectangle starts in the local storage tensor, one index per dim."""
    global_offset: Shape
    """Where it starts in the global tensor."""
    shape: Shape
    """Its extent; the same in both."""

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.shape, strict=True))

    @property
    def global_slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.global_offset, self.shape, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """What part of the global tensor `name` this rank stores."""

    name: str
    """Layout-free name; the checkpoint key."""
    global_shape: Shape
    local_shape: Shape
    blocks: tuple[Block, ...]
    """Disjoint; together they cover the local tensor exactly. Empty on a rank without a shard."""
    is_primary: bool
    """True on exactly one of the ranks that hold the same blocks: it writes and counts them."""

    def __post_init__(self) -> None:
        covered = sum(math.prod(block.shape) for block in self.blocks)
        assert covered == math.prod(self.local_shape), (self.name, covered, self.local_shape)


def whole_layout(name: str, shape: Shape, *, is_primary: bool) -> TensorLayout:
    """The layout of a tensor that every rank of its group stores whole."""
    zeros = (0,) * len(shape)
    block = Block(local_offset=zeros, global_offset=zeros, shape=shape)
    return TensorLayout(
        name=name, global_shape=shape, local_shape=shape, blocks=(block,), is_primary=is_primary
    )


def row_layout(
    name: str,
    global_shape: Shape,
    row_pieces: list[tuple[int, int]],
    column_piece: tuple[int, int] | None,
    storage_rows: tuple[int, int],
    *,
    is_primary: bool,
) -> TensorLayout:
    """The layout of a tensor split by tensor parallelism first and by FSDP on dim 0 after.

    Args:
        global_shape: shape of the unsharded tensor.
        row_pieces: (start, length) runs of global dim-0 indices that the TP- or EP-local tensor
            concatenates; a fused gate/up weight has two, every other weight one.
        column_piece: (start, length) of global dim-1 indices, or None when dim 1 is not split.
        storage_rows: (start, length) of the TP-local dim-0 indices that FSDP keeps on this rank.
        is_primary: see `TensorLayout`.
    """
    begin, end = storage_rows[0], storage_rows[0] + storage_rows[1]
    column_start, columns = column_piece or (0, global_shape[1] if len(global_shape) > 1 else 0)
    tail = () if len(global_shape) == 1 else (columns, *global_shape[2:])
    tail_offset = () if len(global_shape) == 1 else (column_start,) + (0,) * (len(global_shape) - 2)
    blocks, position = [], 0
    for start, length in row_pieces:
        low, high = max(begin, position), min(end, position + length)
        if low < high and math.prod(tail) > 0:
            blocks.append(
                Block(
                    local_offset=(low - begin,) + (0,) * len(tail),
                    global_offset=(start + low - position, *tail_offset),
                    shape=(high - low, *tail),
                )
            )
        position += length
    return TensorLayout(
        name=name,
        global_shape=global_shape,
        local_shape=(max(end - begin, 0), *tail),
        blocks=tuple(blocks),
        is_primary=is_primary,
    )


def scatter_from_global(layout: TensorLayout, full: torch.Tensor, local: torch.Tensor) -> None:
    """Copy this rank's blocks of `full` (global shape) into `local` (storage), in place."""
    for block in layout.blocks:
        local[block.local_slices].copy_(full[block.global_slices])


def gather_to_global(
    layout: TensorLayout,
    local: torch.Tensor,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """The whole global tensor on every rank. Exact: each element is one value plus zeros (so that a
    negative zero loses its sign on more than one rank).

    Collective over `group` (default: the world). For references, tests and export: the result has
    the global size on every rank.
    """
    full = torch.zeros(layout.global_shape, dtype=local.dtype, device=local.device)
    if layout.is_primary:
        for block in layout.blocks:
            full[block.global_slices].copy_(local[block.local_slices])
    if torch.distributed.is_initialized() and torch.distributed.get_world_size(group) > 1:
        torch.distributed.all_reduce(full, group=group)
    return full
