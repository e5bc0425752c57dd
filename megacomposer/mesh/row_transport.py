"""Moves runs of rows between the ranks of a group: by a collective, or by copies from the peers'
memory over NVLink.

Shape suffixes: S rows of the buffer that is sent, H hidden dim.
"""

from __future__ import annotations

import dataclasses
import functools
import socket
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from megacomposer.mesh.exchange_group import group_timeout

TransportName = Literal["collective", "peer"]
Direction = Literal["to_experts", "from_experts"]

_GROWTH = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """One part of an exchange, as this rank sees it. Runs lie in rank order in both buffers."""

    sent_rows: tuple[int, ...]
    """For each rank of the group."""
    first_sent_row: int
    """Of the buffer that is sent; the runs follow each other from there."""
    received_rows: tuple[int, ...]
    """From each rank of the group."""
    peer_first_rows: tuple[int, ...]
    """Where in each rank's buffer the run for this rank starts."""


class Transfer(Protocol):
    """A move under way."""

    def wait(self) -> object:
        """Makes the current stream wait for the received rows."""
        ...


class RowTransport(Protocol):
    """All ranks of a group make the same calls in the same order."""

    def buffer(
        self, direction: Direction, rows: int, most_rows: int, like: torch.Tensor
    ) -> torch.Tensor:
        """Dense [rows, H] to be filled and sent, of like's width and dtype. most_rows: the largest
        `rows` of any rank. Filled and moved before the next buffer of this direction is asked for.
        """
        ...

    def start(self, buffer: torch.Tensor, move: Move, out: torch.Tensor) -> Transfer:
        """Sends runs of a buffer that the current stream has filled; receives to `out`, dense [sum
        of received_rows, H]."""
        ...


class CollectiveTransport:
    """`all_to_all_single`, on NCCL and gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def buffer(
        self, direction: Direction, rows: int, most_rows: int, like: torch.Tensor
    ) -> torch.Tensor:
        return like.new_empty((rows, like.shape[1]))

    def start(self, buffer: torch.Tensor, move: Move, out: torch.Tensor) -> Transfer:
        last = move.first_sent_row + sum(move.sent_rows)
        # gloo takes the splits only as Python lists.
        work = dist.all_to_all_single(
            out, buffer[move.first_sent_row : last], list(move.received_rows),
            list(move.sent_rows), group=self._group, async_op=True,
        )  # fmt: skip
        assert work is not None
        return work


class PeerTransport:
    """Reads the peers' memory with the copy engines, which need no multiprocessor: so the exchange
    does not slow the experts down, as NCCL's kernels would that run beside theirs.

    What a rank sends it writes to symmetric memory, one buffer for each direction, which all layers
    share. A barrier among the ranks comes before each read. Directions alternate, so the barrier of
    one also says that the reads of the other are over and its buffer may be filled again; where two
    of one direction follow each other, an extra barrier says it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device)
        self._timeout_ms = int(group_timeout(group).total_seconds() * 1e3)
        self._buffers: dict[Direction, torch.Tensor] = {}
        self._handles: dict[Direction, Any] = {}  # torch names no type for them
        self._last: Direction | None = None

    def buffer(
        self, direction: Direction, rows: int, most_rows: int, like: torch.Tensor
    ) -> torch.Tensor:
        row_bytes = like.shape[1] * like.element_size()
        held = self._buffers.get(direction)
        if held is None or held.numel() < most_rows * row_bytes:
            held = self._allocate(direction, int(most_rows * row_bytes * _GROWTH))
        elif self._last == direction:
            self._barrier(direction)  # peers are done with what was sent before
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._last = direction
        return held[: rows * row_bytes].view(like.dtype).view(rows, like.shape[1])

    def start(self, buffer: torch.Tensor, move: Move, out: torch.Tensor) -> Transfer:
        stream, rank = self._stream, self._group.rank()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        assert self._last is not None
        handle = self._barrier(self._last)
        runs = out.split(list(move.received_rows))
        with torch.cuda.stream(stream):
            for step in range(len(runs)):  # each rank reads from another one at a time
                peer = (rank + step) % len(runs)
                first, shape = move.peer_first_rows[peer] * out.shape[1], runs[peer].shape
                if shape[0]:
                    runs[peer].copy_(handle.get_buffer(peer, shape, out.dtype, first))
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def _barrier(self, direction: Direction) -> Any:
        """The handle of that buffer; the stream waits until all ranks' streams are here."""
        handle = self._handles[direction]
        with torch.cuda.stream(self._stream):
            handle.barrier(channel=0, timeout_ms=self._timeout_ms)
        return handle

    def _allocate(self, direction: Direction, size_bytes: int) -> torch.Tensor:
        """Collective. The old buffer, if any, may be read by peers until all are here."""
        import torch.distributed._symmetric_memory as symmetric

        torch.cuda.synchronize(self._device)
        dist.barrier(self._group, device_ids=[self._device.index])
        self._buffers.pop(direction, None)
        self._handles.pop(direction, None)
        size_bytes = max(1, -(-size_bytes // 2**20)) * 2**20
        held = symmetric.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self._handles[direction] = symmetric.rendezvous(held, self._group.group_name)
        self._buffers[direction] = held
        return held


@functools.cache
def _peer_transport(group: dist.ProcessGroup) -> PeerTransport:
    return PeerTransport(group, torch.device("cuda", torch.cuda.current_device()))


def make_transport(group: dist.ProcessGroup, name: TransportName) -> RowTransport:
    """The transport of a group; layers share the buffers of a peer transport. Collective.

    Raises:
        ValueError: "peer" where not all ranks have a GPU of their own on one host, or may not read
            each other's memory.
    """
    if name == "collective":
        return CollectiveTransport(group)
    reason = _no_peer_memory(group)
    if reason:
        raise ValueError(f"model.moe_exchange is 'peer' but {reason}; use collective")
    return _peer_transport(group)


def _no_peer_memory(group: dist.ProcessGroup) -> str:
    """Why the ranks of the group cannot read each other's memory, the same on all; empty if they
    can. Collective."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    own = torch.cuda.current_device()
    place = (socket.gethostname(), str(torch.cuda.get_device_properties(own).uuid), own)
    places = [place] * group.size()
    dist.all_gather_object(places, place, group=group)
    reason = ""
    if len({host for host, _, _ in places}) > 1:
        reason = "the ranks of an expert-parallel group are on several hosts"
    elif len({gpu for _, gpu, _ in places}) < len(places):
        reason = "ranks of an expert-parallel group share a GPU"
    for _, gpu, index in places:
        # Of a GPU that this process does not see, symmetric memory finds out by itself.
        is_seen = index < torch.cuda.device_count() and gpu == str(
            torch.cuda.get_device_properties(index).uuid
        )
        if is_seen and index != own and not torch.cuda.can_device_access_peer(own, index):
            reason = reason or f"GPU {own} cannot read the memory of GPU {index}"
    reasons = [reason] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    return next(filter(None, reasons), "")
