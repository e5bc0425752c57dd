"""States to save, cut up like a model's, and processes that die while they save them."""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from megacomposer.checkpoint.lock import RunLock
from megacomposer.checkpoint.native import save_checkpoint
from megacomposer.checkpoint.planner import Tensors
from megacomposer.mesh.sharding import (
    TensorLayout,
    row_layout,
    scatter_from_global,
    whole_layout,
)

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "column": ((12, 5), torch.float32),
    "gate_up": ((24, 3), torch.float32),
    "row": ((7, 12), torch.float32),
    "norm": ((5,), torch.float32),
    "experts": ((4, 6, 3), torch.float32),
    "half": ((12, 3), torch.bfloat16),
    "counts": ((4,), torch.int64),
    "scalar": ((), torch.int64),
    "empty": ((0, 3), torch.float32),
}
"""Global shape and dtype by key; `row` is split on dim 1, `gate_up` in two halves."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A layout of tp * shards * replicas ranks, tensor-parallel rank fastest."""

    tp: int = 1
    shards: int = 1
    replicas: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.shards * self.replicas


def global_value(key: str, seed: int) -> torch.Tensor:
    """What the tensor `key` holds in full; another for every seed."""
    shape, dtype = SHAPES[key]
    # No random generator: a checkpoint of an older version has to hold the same.
    start = 1_000_003 * seed + 10_007 * list(SHAPES).index(key)
    values = (torch.arange(math.prod(shape)) + start) * 2_654_435_761 % 2**32 - 2**31
    return values.reshape(shape).to(dtype)


def layout_of(key: str, scheme: Scheme, rank: int) -> TensorLayout:
    """The blocks of `key` that `rank` holds; FSDP pieces are uneven and some are empty."""
    shape, _ = SHAPES[key]
    tp_rank, data_rank = rank % scheme.tp, rank // scheme.tp
    shard, replica = data_rank % scheme.shards, data_rank // scheme.shards
    if not shape:
        return whole_layout(key, shape, is_primary=rank == 0)
    over_tp = key in ("column", "gate_up", "row", "half")
    is_primary = replica == 0 and (over_tp or tp_rank == 0)
    rows, columns = shape[0], None
    pieces = [(0, rows)]
    if key in ("column", "half"):
        pieces = [_piece(rows, scheme.tp, tp_rank)]
    elif key == "gate_up":
        start, length = _piece(rows // 2, scheme.tp, tp_rank)
        pieces = [(start, length), (rows // 2 + start, length)]
    elif key == "row":
        columns = _piece(shape[1], scheme.tp, tp_rank)
    held = _piece(sum(length for _, length in pieces), scheme.shards, shard)
    return row_layout(key, shape, pieces, columns, held, is_primary=is_primary)


def sample(scheme: Scheme, rank: int, seed: int | None, keys: Any = tuple(SHAPES)) -> Tensors:
    """Local tensors with the values of `seed`, or with -1 everywhere when it is None.

    Each is a view into a larger buffer, as after FSDP's padding.
    """
    tensors: Tensors = {}
    for key in keys:
        layout = layout_of(key, scheme, rank)
        shape = layout.local_shape
        buffer = torch.full((3, *shape), -1, dtype=SHAPES[key][1])
        local = buffer[1]
        if seed is not None:
            scatter_from_global(layout, global_value(key, seed), local)
        tensors[key] = (layout, local)
    return tensors


def differing_keys(tensors: Tensors, scheme: Scheme, rank: int, seed: int | None) -> list[str]:
    """The keys whose local tensor is not, bit for bit, that of `sample(..., seed)`."""
    wanted = sample(scheme, rank, seed, tuple(tensors))
    return [key for key in tensors if not torch.equal(tensors[key][1], wanted[key][1])]


def rng_sample(rank: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"words": torch.arange(3) + 100 * rank + seed}


def save_sample(root: Path, step: int, *, keep_last: int = 0, scheme: Scheme | None = None) -> Path:
    """Save `sample` with seed `step` from this rank (of the world, or alone)."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return save_checkpoint(
        root,
        step,
        sample(scheme or Scheme(), rank, step),
        {"model_fingerprint": "m1", "tokens": 10 * step},
        rng_sample(rank, step),
        keep_last=keep_last,
    )


@functools.cache
def quick_processes() -> ForkServerContext:
    """Processes that start with torch imported already, in a fraction of a second."""
    context = multiprocessing.get_context("forkserver")
    # By absolute imports only: the server does not see pytest's own `pythonpath`.
    context.set_forkserver_preload(["pytest", "megacomposer.checkpoint.native"])
    return context


def hold_lock(run_dir: Path, ready: Connection) -> None:
    """Take the run's lock, say so, and keep it until killed."""
    with RunLock(run_dir):
        ready.send("locked")
        signal.pause()


def save_until_killed(root: Path, rank: int, world_size: int, progress: Connection) -> None:
    """Save steps 1, 2, 3, ... and send each to `progress` once its save has returned."""
    if world_size > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{root}.store", rank=rank, world_size=world_size
        )
    for step in range(1, 100_000):
        save_sample(root, step, keep_last=2, scheme=Scheme(shards=world_size))
        if rank == 0:
            progress.send(step)


def save_and_die_before(root: Path, step: int, operation: int | None, count_file: Path) -> None:
    """Save `step` and be killed by SIGKILL just before the `operation`-th change of a file.

    Python's own audit events tell of every open, rename, mkdir and removal, so nothing in the
    program knows of it. With None it lives and writes how many such changes there were.
    """
    seen = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        path = str(arguments[0]) if arguments else ""
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            return
        if event == "open" and arguments[1] in ("r", "rb"):
            return
        # Removal works on bare names relative to an open directory.
        if path.startswith(str(root)) or event in ("os.remove", "os.rmdir"):
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)
    save_sample(root, step, keep_last=1)
    count_file.write_text(str(seen))


def _piece(extent: int, parts: int, part: int) -> tuple[int, int]:
    """(start, length) of torch.chunk's piece; the last ones may be shorter or empty."""
    length = -(-extent // parts)
    start = min(part * length, extent)
    return start, min(length, extent - start)
