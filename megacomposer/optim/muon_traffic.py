"""What a plan makes every rank compute, copy and send, for all ranks at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from megacomposer.optim.muon_plan import Bucket, MuonPlan, PlannedParameter

PerRank = np.ndarray
"""float64 [world size]."""
CostOf = Callable[[int, int], float]
"""Seconds of Newton-Schulz for a matrix of so many rows and columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """Elements that each rank sends and receives in one exchange, own pieces not counted."""

    near: np.ndarray
    """float64 [2, world size]: out and in, within a node."""
    far: np.ndarray
    """The same between nodes."""
    meets: np.ndarray
    """bool [world size, world size]: whether two ranks exchange anything, symmetric; False for a
    rank and itself."""

    def latest(self, times: PerRank) -> PerRank:
        """For each rank the latest of its own time and those of the ranks it exchanges with."""
        latest: PerRank = np.where(self.meets, times[None, :], times[:, None]).max(1)
        return latest

    def seconds(
        self, element_bytes: int, near_bytes_per_s: float, far_bytes_per_s: float
    ) -> PerRank:
        """Of each rank alone, with both links and both directions in use at once."""
        near, far = self.near.max(0) / near_bytes_per_s, self.far.max(0) / far_bytes_per_s
        seconds: PerRank = np.maximum(near, far) * element_bytes
        return seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketWork:
    """One exchange and the work on its matrices."""

    gathers: bool
    gather: Flow
    scatter: Flow
    newton_schulz_s: PerRank
    packed: PerRank
    """Elements written to a send buffer, or straight into a stack of whole matrices."""
    copied: PerRank
    """Elements copied between receive buffer, stack and send buffer."""
    applied: PerRank
    """Elements of storage that the update changes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Work on the matrices that travel nowhere."""

    newton_schulz_s: PerRank
    elements: PerRank


def local_work(plan: MuonPlan, cost_s: CostOf) -> LocalWork:
    """All of it, for each rank."""
    matrices = [plan.matrices[index] for index in plan.local]
    owners = np.array([matrix.owner for matrix in matrices], dtype=np.int64)
    costs = [cost_s(matrix.rows, matrix.columns) for matrix in matrices]
    sizes = [matrix.rows * matrix.columns for matrix in matrices]
    return LocalWork(
        newton_schulz_s=_sum_by_rank(owners, costs, plan.world_size),
        elements=_sum_by_rank(owners, sizes, plan.world_size),
    )


def bucket_work(plan: MuonPlan, bucket: Bucket, cost_s: CostOf, ranks_per_node: int) -> BucketWork:
    """The work of each rank on one bucket; nodes are runs of `ranks_per_node` ranks."""
    world_size = plan.world_size
    gathers, scatters = _Moves(), _Moves()
    owners, costs, sizes = [], [], []
    for index in bucket.matrices:
        matrix = plan.matrices[index]
        owners.append(matrix.owner)
        costs.append(cost_s(matrix.rows, matrix.columns))
        sizes.append(matrix.rows * matrix.columns)
    for (parameter, number), owned_by in _alike(plan, bucket.matrices).items():
        held = _Holders(parameter, number)
        owner = np.array(owned_by, dtype=np.int64)
        replica = np.array([parameter.grid.replica(rank) for rank in owned_by], dtype=np.int64)
        gathers.add(held.ranks[:, replica], owner[None, :], held.elements[:, None])
        scatters.add(owner[None, None, :], held.ranks[:, :, None], held.elements[:, None, None])
    sender, receiver, moved = gathers.joined()
    source, holder, spread = scatters.joined()
    owner = np.array(owners, dtype=np.int64)
    stored = _sum_by_rank(sender, moved, world_size)
    owned = _sum_by_rank(owner, sizes, world_size)
    copied = _sum_by_rank(source, spread, world_size)
    if bucket.gathers:
        copied = copied + owned
    else:
        moved = np.zeros_like(moved)
    return BucketWork(
        gathers=bucket.gathers,
        gather=_flow(sender, receiver, moved, world_size, ranks_per_node),
        scatter=_flow(source, holder, spread, world_size, ranks_per_node),
        newton_schulz_s=_sum_by_rank(owner, costs, world_size),
        packed=stored,
        copied=copied,
        applied=_sum_by_rank(holder, spread, world_size),
    )


def _alike(
    plan: MuonPlan, matrices: Iterable[int]
) -> dict[tuple[PlannedParameter, int], list[int]]:
    """Owners of the matrices that are stored alike: the same matrix of equal layers."""
    first: dict[int, PlannedParameter] = {}
    owners: dict[tuple[int, int], list[int]] = {}
    for index in matrices:
        matrix = plan.matrices[index]
        parameter = plan.parameters[matrix.parameter]
        geometry = id(parameter.geometry)
        first.setdefault(geometry, parameter)
        owners.setdefault((geometry, matrix.index), []).append(matrix.owner)
    return {(first[geometry], index): ranks for (geometry, index), ranks in owners.items()}


class _Holders:
    """The ranks that store a matrix, and how many of its elements each."""

    def __init__(self, parameter: PlannedParameter, index: int) -> None:
        geometry = parameter.geometry
        positions = geometry.holders[index]
        self.ranks = np.array([parameter.grid.holders(position) for position in positions])
        """int64 [positions, replicas]."""
        self.elements = np.array(
            [
                sum(piece.rows * piece.columns for piece in geometry.pieces[position][index])
                for position in positions
            ],
            dtype=np.float64,
        )


class _Moves:
    """Elements on their way from a rank to a rank."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []

    def add(self, source: np.ndarray, target: np.ndarray, elements: np.ndarray) -> None:
        """Three arrays that broadcast to one shape."""
        self._parts.append(tuple(a.ravel() for a in np.broadcast_arrays(source, target, elements)))

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, target, elements), each flat."""
        source, target, elements = (
            np.concatenate(arrays) for arrays in zip(*self._parts, strict=True)
        )
        return source, target, elements


def _flow(
    source: np.ndarray,
    target: np.ndarray,
    elements: np.ndarray,
    world_size: int,
    ranks_per_node: int,
) -> Flow:
    is_moved = (source != target) & (elements > 0)
    is_far = source // ranks_per_node != target // ranks_per_node
    meets = np.zeros((world_size, world_size), dtype=bool)
    meets[source[is_moved], target[is_moved]] = True
    sums = []
    for chosen in (is_moved & ~is_far, is_moved & is_far):
        ends = (source[chosen], target[chosen])
        sums.append(np.stack([_sum_by_rank(end, elements[chosen], world_size) for end in ends]))
    return Flow(near=sums[0], far=sums[1], meets=meets | meets.T)


def _sum_by_rank(
    ranks: np.ndarray, values: np.ndarray | list[float] | list[int], size: int
) -> PerRank:
    return np.bincount(ranks, weights=np.asarray(values, dtype=np.float64), minlength=size)
