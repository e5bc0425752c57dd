"""Which rank orthogonalises which matrix: balanced by cost, and close to where it is stored."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megacomposer.mesh.layout import Layout
from megacomposer.optim.cost import Rates
from megacomposer.optim.muon_pieces import RankGrid

Kind = Literal["dense", "expert"]
LINK_USE = 0.6
"""Part of its rate that a link is planned for: in an exchange, ranks wait for each other. Predicted
steps of Kimi K2 (muon_scale) on 192 to 1,024 GPUs are within 3 % of those of the best choice."""
LEAST_GAIN = 0.01
"""Moves that shorten the longest load by a smaller part are not worth their exchange."""
LARGE_LOAD = 0.05
"""A matrix of more than this part of the mean load is placed before those with replicas."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Item:
    """A matrix while it is planned."""

    name: str
    parameter: int
    index: int
    rows: int
    columns: int
    kind: Kind
    ep_rank: int
    """Of an expert's matrix; 0 for a dense one."""
    position: int | None
    """The one position that stores it whole, or None."""
    grid: RankGrid
    cost_s: float
    num_bytes: int
    owner: int = -1
    is_away: bool = False
    """Its owner does not store it."""

    @property
    def gathers(self) -> bool:
        return self.position is None or self.is_away

    @property
    def travels(self) -> bool:
        return self.gathers or self.grid.num_replicas > 1

    @property
    def order(self) -> tuple[float, int, str, int]:
        """Costliest first; never a tie."""
        return -self.cost_s, -self.num_bytes, self.name, self.index

    def owners(self, layout: Layout) -> range:
        """The ranks that may have it."""
        step = layout.ep if self.kind == "expert" else 1
        return range(self.ep_rank, layout.world_size, step)


class Move(NamedTuple):
    """A whole matrix that changes its owner."""

    item: Item
    source: int
    target: int
    transfer_s: float
    """In which the links of both are busy for it."""

    def reversed(self) -> Move:
        return Move(self.item, self.target, self.source, -self.transfer_s)


class Loads:
    """What each rank has to do so far."""

    def __init__(self, storage_s: Sequence[float], rates: Rates) -> None:
        """`storage_s`: of the passes over what each rank stores, which no owner can change."""
        self.compute_s = np.array(storage_s, dtype=np.float64)
        self.link_s = np.zeros_like(self.compute_s)
        """In which its links carry matrices that it owns or that left it."""
        self._near_bytes_per_s = LINK_USE * rates.near_bytes_per_s
        self._far_bytes_per_s = LINK_USE * rates.far_bytes_per_s
        if len(storage_s) <= rates.gpus_per_node:
            self._far_bytes_per_s = self._near_bytes_per_s
        self._node = np.arange(len(storage_s)) // rates.gpus_per_node
        self._bytes = [0] * len(storage_s)

    def key(self, rank: int) -> tuple[float, int, int]:
        return float(self.compute_s[rank]), self._bytes[rank], rank

    def done_s(self, ranks: range) -> np.ndarray:
        """When each of the ranks is done, exchanges beside compute."""
        chosen = slice(ranks.start, ranks.stop, ranks.step)
        return np.maximum(self.compute_s[chosen], self.link_s[chosen])

    def give(self, item: Item, rank: int) -> None:
        item.owner = rank
        self.compute_s[rank] += item.cost_s
        self._bytes[rank] += item.num_bytes
        copies = item.grid.num_replicas + (1 if item.position is None else -1)
        self.link_s[rank] += copies * item.num_bytes / self._far_bytes_per_s

    def offer(self, item: Item, ranks: range) -> Move | None:
        """The move of a whole matrix to the one of `ranks` that is done with it first; None unless
        both that rank and the owner are then done before the owner was."""
        source, chosen = item.owner, slice(ranks.start, ranks.stop, ranks.step)
        is_near = self._node[chosen] == self._node[source]
        transfer_s = (
            item.num_bytes
            * (1 + item.grid.num_replicas)
            / np.where(is_near, self._near_bytes_per_s, self._far_bytes_per_s)
        )
        ends_s = np.maximum(self.compute_s[chosen] + item.cost_s, self.link_s[chosen] + transfer_s)
        ends_s = np.maximum(ends_s, self.link_s[source] + transfer_s)
        place = int(np.argmin(ends_s + transfer_s))
        if ends_s[place] >= max(self.compute_s[source], self.link_s[source]):
            return None
        return Move(item, source, ranks[place], float(transfer_s[place]))

    def move(self, move: Move) -> None:
        item = move.item
        self.compute_s[move.source] -= item.cost_s
        self.compute_s[move.target] += item.cost_s
        for rank in (move.source, move.target):
            self.link_s[rank] += move.transfer_s
        item.owner = move.target
        item.is_away = item.grid.position(move.target) != item.position


class _LeastLoaded:
    """The least loaded of some ranks, while loads only grow."""

    def __init__(self, loads: Loads, ranks: Iterable[int]) -> None:
        self._loads = loads
        self._heap = [loads.key(rank) for rank in ranks]
        heapq.heapify(self._heap)

    def rank(self) -> int:
        while True:
            rank = self._heap[0][2]
            key = self._loads.key(rank)
            if key == self._heap[0]:
                return rank
            heapq.heapreplace(self._heap, key)


def choose_owners(items: Sequence[Item], loads: Loads, layout: Layout) -> None:
    """Gives every matrix its owner.

    One that lies whole on a rank stays there, or on the least loaded of its replicas. Every other
    goes to the least loaded rank that may have it, the costliest first (LPT): any rank of the world
    for a dense matrix, ranks of its EP rank for an expert's. Then whole matrices leave the ranks
    that would be done last, as long as their links can carry them in time.
    """
    whole = [item for item in items if item.position is not None]
    split = [item for item in items if item.position is None]
    # What has the least choice first: then the small ones fill up what the large ones leave.
    _place_whole([item for item in whole if item.grid.num_replicas == 1], loads)
    large_s = LARGE_LOAD * sum(item.cost_s for item in items) / layout.world_size
    _place_split([item for item in split if item.cost_s > large_s], loads, layout)
    _place_whole([item for item in whole if item.grid.num_replicas > 1], loads)
    _place_split([item for item in split if item.cost_s <= large_s], loads, layout)
    _move_whole(whole, loads, layout)


def _place_whole(whole: Sequence[Item], loads: Loads) -> None:
    """Matrices that one rank stores whole stay there, or with the least loaded replica."""
    holders: dict[tuple[Kind, int, int], _LeastLoaded] = {}
    for item in sorted(whole, key=lambda item: item.order):
        assert item.position is not None
        key = (item.kind, item.grid.num_positions, item.position)
        if key not in holders:
            holders[key] = _LeastLoaded(loads, item.grid.holders(item.position))
        loads.give(item, holders[key].rank())


def _place_split(split: Sequence[Item], loads: Loads, layout: Layout) -> None:
    """Owners for matrices that no rank stores whole, costliest first."""
    targets: dict[range, _LeastLoaded] = {}
    for item in sorted(split, key=lambda item: item.order):
        ranks = item.owners(layout)
        if ranks not in targets:
            targets[ranks] = _LeastLoaded(loads, ranks)
        loads.give(item, targets[ranks].rank())


def _move_whole(whole: Sequence[Item], loads: Loads, layout: Layout) -> None:
    """Takes matrices off the rank that is done last, as long as one can be moved to advantage."""
    owned: dict[range, dict[int, list[Item]]] = {}
    for item in sorted(whole, key=lambda item: item.order, reverse=True):
        owned.setdefault(item.owners(layout), {}).setdefault(item.owner, []).append(item)
    for ranks in sorted(owned, key=lambda ranks: (ranks.step, ranks.start)):
        best_s, trail = math.inf, list[Move]()
        while True:
            done_s = loads.done_s(ranks)
            last = int(np.argmax(done_s))
            if done_s[last] < (1 - LEAST_GAIN) * best_s:
                best_s, trail = done_s[last], []
            left = owned[ranks].get(ranks[last])
            if not left:
                break
            move = loads.offer(left.pop(), ranks)
            if move is not None:
                loads.move(move)
                trail.append(move)
        for move in reversed(trail):  # these gained nothing in the end
            loads.move(move.reversed())


def cut_buckets(items: Sequence[Item], bucket_bytes: float) -> list[list[Item]]:
    """The fewest buckets such that no owner has much more than `bucket_bytes` in one.

    Every owner's matrices are spread evenly over all of them, in their order: so the ranks come to
    each exchange at about the same time.
    """
    total, before = Counter[int](), Counter[int]()
    for item in items:
        total[item.owner] += item.num_bytes
    count = max(1, -int(-max(total.values(), default=0) // bucket_bytes))
    buckets: list[list[Item]] = [[] for _ in range(count)]
    for item in items:
        middle = 2 * before[item.owner] + item.num_bytes
        buckets[count * middle // (2 * total[item.owner])].append(item)
        before[item.owner] += item.num_bytes
    return [bucket for bucket in buckets if bucket]
