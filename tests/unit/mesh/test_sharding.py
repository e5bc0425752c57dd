"""Random layouts: over all ranks the primary blocks tile each global tensor exactly once."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch

from megacomposer.mesh.sharding import (
    Block,
    TensorLayout,
    gather_to_global,
    row_layout,
    scatter_from_global,
    whole_layout,
)

CASES = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor on tp x shards x replicas ranks."""

    kind: str
    """rows, halves (gate and up), columns, or whole: what tensor parallelism does to it."""
    shape: tuple[int, ...]
    tp: int
    shards: int
    replicas: int
    chunks: tuple[int, ...]
    """Rows that each FSDP shard keeps of the TP-local tensor; some may be 0."""

    @property
    def layouts(self) -> list[TensorLayout]:
        return [
            self._layout(tp_rank, shard, replica)
            for replica in range(self.replicas)
            for shard in range(self.shards)
            for tp_rank in range(self.tp)
        ]

    def _layout(self, tp_rank: int, shard: int, replica: int) -> TensorLayout:
        rows, columns = self.shape[0], None
        pieces = [(0, rows)]
        if self.kind == "rows":
            pieces = [(tp_rank * (rows // self.tp), rows // self.tp)]
        elif self.kind == "halves":
            half, part = rows // 2, rows // 2 // self.tp
            pieces = [(i * half + tp_rank * part, part) for i in range(2)]
        elif self.kind == "columns":
            part = self.shape[1] // self.tp
            columns = (tp_rank * part, part)
        primary = replica == 0 and (self.kind != "whole" or tp_rank == 0)
        held = (sum(self.chunks[:shard]), self.chunks[shard])
        return row_layout("w", self.shape, pieces, columns, held, is_primary=primary)


def random_cases() -> Iterator[Case]:
    chooser = random.Random(5)
    for _ in range(CASES):
        kind = chooser.choice(["rows", "halves", "columns", "whole"])
        tp, shards = chooser.choice([1, 2, 3, 4]), chooser.choice([1, 2, 3, 5, 8])
        rows = chooser.randint(0, 4) * tp * (2 if kind == "halves" else 1)
        tail = [chooser.randint(1, 3) * tp for _ in range(chooser.choice([0, 1, 1, 2]))]
        if kind == "columns" and not tail:
            tail = [tp]
        local_rows = rows if kind in ("columns", "whole") else rows // tp
        yield Case(
            kind=kind,
            shape=(rows, *tail),
            tp=tp,
            shards=shards,
            replicas=chooser.choice([1, 2]),
            chunks=random_chunks(chooser, local_rows, shards),
        )


def random_chunks(chooser: random.Random, rows: int, shards: int) -> tuple[int, ...]:
    """As torch.chunk cuts (equal, then a rest, then nothing), or at random places."""
    if chooser.random() < 0.5:
        size = -(-rows // shards) if rows else 0
        starts = [min(i * size, rows) for i in range(shards + 1)]
    else:
        starts = [0, *sorted(chooser.randint(0, rows) for _ in range(shards - 1)), rows]
    return tuple(end - start for start, end in zip(starts, starts[1:], strict=False))


def test_primary_blocks_tile_the_global_tensor_exactly_once() -> None:
    seen = set()
    for case in random_cases():
        count = torch.zeros(case.shape, dtype=torch.int64)
        held = torch.zeros(case.shape, dtype=torch.int64)
        for layout in case.layouts:
            local = torch.zeros(layout.local_shape, dtype=torch.int64)
            for block in layout.blocks:
                count[block.global_slices] += layout.is_primary
                held[block.global_slices] += 1
                local[block.local_slices] += 1
                assert math.prod(block.shape) > 0, case
            assert bool((local == 1).all()), case
        assert bool((count == 1).all()), case
        copies = case.replicas * (case.tp if case.kind == "whole" else 1)
        assert bool((held == copies).all()), case
        seen.add((case.kind, len(case.shape), 0 in case.chunks))
    # Every kind with and without an empty shard, in 1-D, 2-D and 3-D; 1-D has no columns.
    assert len(seen) == 4 * 3 * 2 - 2


def test_scattered_tensor_comes_back_whole() -> None:
    for number, case in enumerate(random_cases()):
        generator = torch.Generator().manual_seed(number)
        full = torch.randn(case.shape, generator=generator)
        gathered = torch.zeros(case.shape)
        for layout in case.layouts:
            local = torch.full(layout.local_shape, float("nan"))
            scatter_from_global(layout, full, local)
            # Without a process group this is the rank's term of the sum over ranks.
            gathered += gather_to_global(layout, local)
        assert torch.equal(gathered, full), case


def test_gather_on_a_replica_adds_nothing() -> None:
    layout = row_layout("w", (4, 2), [(0, 4)], None, (0, 4), is_primary=False)
    assert torch.equal(gather_to_global(layout, torch.ones(4, 2)), torch.zeros(4, 2))


def test_fused_gate_and_up_rows_land_in_both_halves() -> None:
    """TP rank 1 of 2 holds gate rows 3..5 and up rows 9..11; FSDP keeps its local rows 2..4."""
    layout = row_layout("w", (12, 5), [(3, 3), (9, 3)], None, (2, 3), is_primary=True)
    assert layout.local_shape == (3, 5)
    assert layout.blocks == (
        Block(local_offset=(0, 0), global_offset=(5, 0), shape=(1, 5)),
        Block(local_offset=(1, 0), global_offset=(9, 0), shape=(2, 5)),
    )


def test_rank_without_rows_has_no_block() -> None:
    layout = row_layout("w", (3, 4, 5), [(0, 3)], None, (3, 0), is_primary=True)
    assert layout.blocks == ()
    assert layout.local_shape == (0, 4, 5)


def test_whole_layout_covers_its_tensor() -> None:
    layout = whole_layout("w", (2, 3), is_primary=True)
    full = torch.arange(6.0).view(2, 3)
    local = torch.zeros(2, 3)
    scatter_from_global(layout, full, local)
    assert torch.equal(local, full)
    assert torch.equal(gather_to_global(layout, local), full)


def test_layout_that_leaves_local_storage_uncovered_is_an_error() -> None:
    block = Block(local_offset=(0, 0), global_offset=(0, 0), shape=(1, 3))
    with pytest.raises(AssertionError, match="'w', 3"):
        TensorLayout(
            name="w", global_shape=(2, 3), local_shape=(2, 3), blocks=(block,), is_primary=True
        )
