"""Where every rank keeps its part of one parameter; known without process groups."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import Shape, TensorLayout, row_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How one parameter is cut: by TP or EP first, then in rows as FSDP2 cuts them."""

    name: str
    """Layout-free name; the checkpoint key."""
    global_shape: Shape
    kind: Literal["dense", "expert"] = "dense"
    """Which of the two HSDP meshes shards it. An expert parameter's dim 0 is split over EP."""
    tp_dim: Literal[0, 1] | None = None
    """Dim that TP splits; None keeps a copy on every TP rank."""
    halves: int = 1
    """Equal runs of rows that TP splits one by one: 2 for a fused gate/up weight."""

    def __post_init__(self) -> None:
        assert self.kind == "dense" or self.tp_dim is None, self.name
        assert self.halves == 1 or self.tp_dim == 0, self.name

    def on(self, layout: Layout) -> TensorLayout:
        """What `layout.rank` stores.

        Raises:
            ValueError: the split dim is not a multiple of the ranks that split it.
        """
        rows = self.global_shape[0]
        pieces, columns = [(0, rows)], None
        if self.kind == "expert":
            part = self._part(rows, layout.ep, "ep")
            pieces = [(layout.ep_rank * part, part)]
        elif self.tp_dim == 0:
            part = self._part(rows, self.halves * layout.tp, "tp")
            pieces = [
                (half * rows // self.halves + layout.tp_rank * part, part)
                for half in range(self.halves)
            ]
        elif self.tp_dim == 1:
            part = self._part(self.global_shape[1], layout.tp, "tp")
            columns = (layout.tp_rank * part, part)
        if self.kind == "expert":
            shard_rank, num_shards = layout.expert_shard_rank, layout.expert_shard
            is_primary = layout.expert_replicate_rank == 0
        else:
            shard_rank, num_shards = layout.dense_shard_rank, layout.dense_shard
            copied_over_tp = self.tp_dim is None and layout.tp_rank > 0
            is_primary = layout.dense_replicate_rank == 0 and not copied_over_tp
        # FSDP2 cuts dim 0 as torch.chunk does.
        local_rows = sum(length for _, length in pieces)
        chunk = -(-local_rows // num_shards)
        start = min(shard_rank * chunk, local_rows)
        return row_layout(
            self.name,
            self.global_shape,
            pieces,
            columns,
            (start, min(chunk, local_rows - start)),
            is_primary=is_primary,
        )

    def _part(self, extent: int, parts: int, axis: str) -> int:
        if extent % parts:
            raise ValueError(
                f"{self.name} of shape {self.global_shape} cannot be split over mesh.{axis}:"
                f" {parts} parts do not divide {extent}"
            )
        return extent // parts
