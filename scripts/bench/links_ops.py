"""What links.py runs: collectives and copies between peers, and their time on the slowest rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from megacomposer.kernels.bench import benchmark
from megacomposer.mesh.exchange_group import exchange_group
from megacomposer.runtime.process import Process

COLLECTIVES = ("all_to_all", "exchange", "all_reduce", "reduce_scatter", "all_gather")
"""`exchange` is `all_to_all` as Muon starts it: in bytes, and nothing from a rank to itself."""
PEER_COPIES = ("peer_read", "peer_write")
"""All ranks at once, out of the next rank's memory or into it, by the copy engines."""
Run = Callable[[], object]
_WARMUP = 3


class Ranks:
    """All ranks of the job and the communicators between them."""

    def __init__(self, process: Process) -> None:
        self.size, self.rank, self.device = process.world_size, process.rank, process.device
        assert dist.group.WORLD is not None
        self._groups = {0: dist.group.WORLD}

    def group(self, most_blocks: int) -> dist.ProcessGroup:
        """The default communicator for 0, else one of so many thread blocks; collective."""
        if most_blocks not in self._groups:
            group = exchange_group([range(self.size)], most_blocks=most_blocks)
            self._groups[most_blocks] = group
        return self._groups[most_blocks]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Memory of this rank's and the next rank's that both see, and a plain buffer beside it."""

    remote: torch.Tensor
    """uint8 [bytes], of the next rank."""
    local: torch.Tensor
    """The same size, in memory of this rank that no other writes."""
    owned: torch.Tensor
    """What the others see of this rank; here so that it stays alive."""


def open_peer(ranks: Ranks, size: int) -> Peer:
    """Symmetric memory of `size` bytes on every rank; collective."""
    import torch.distributed._symmetric_memory as symmetric_memory

    owned = symmetric_memory.empty(size, dtype=torch.uint8, device=ranks.device)
    handle = symmetric_memory.rendezvous(owned, dist.group.WORLD.group_name)
    owned.random_()
    remote = handle.get_buffer((ranks.rank + 1) % ranks.size, (size,), torch.uint8)
    return Peer(remote=remote, local=torch.empty_like(remote).random_(), owned=owned)


def operation(op: str, size: int, ranks: Ranks, most_blocks: int, peer: Peer | None) -> Run:
    """`size` is of the whole buffer: sent, reduced, gathered or copied."""
    if op in PEER_COPIES:
        assert peer is not None
        remote, local = peer.remote[:size], peer.local[:size]
        return lambda: local.copy_(remote) if op == "peer_read" else remote.copy_(local)
    group, device = ranks.group(most_blocks), ranks.device
    whole = torch.randn(size // 4, device=device).mul_(1e-30)  # room for many sums of sums
    part = torch.randn(size // 4 // ranks.size, device=device)
    received = torch.empty_like(whole)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(received, whole, group=group)
    assert op == "exchange", op
    splits = [size // (ranks.size - 1)] * ranks.size
    splits[ranks.rank] = 0
    out, into = (x.view(torch.uint8)[: sum(splits)] for x in (whole, received))
    return lambda: dist.all_to_all_single(into, out, splits, splits, group=group)


def measure(run: Run, op: str, size: int, ranks: Ranks) -> dict[str, object]:
    """Milliseconds on the slowest rank, and the bytes that a rank's link carried each way a second
    (the bus bandwidth of nccl-tests)."""
    dist.barrier()
    timing = benchmark(run, device=ranks.device, warmup=_WARMUP)
    found: list[object] = [None] * ranks.size
    dist.all_gather_object(found, (timing.median_ms, timing.p20_ms, timing.p80_ms))
    median_ms, p20_ms, p80_ms = max(found)
    crossed = float(size)
    if op not in ("exchange", *PEER_COPIES):
        crossed *= (2 if op == "all_reduce" else 1) * (ranks.size - 1) / ranks.size
    return {
        "op": op,
        "bytes": size,
        "world_size": ranks.size,
        "ms": median_ms,
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "bus_bytes_per_s": crossed / (median_ms * 1e-3),
    }
