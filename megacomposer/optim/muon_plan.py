"""Who orthogonalises which matrix, and which matrices travel together: equal on every rank.

Pure arithmetic on placements: a plan for any world can be made on any machine.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.optim.cost import (
    APPLY_BYTES,
    MOMENTUM_BYTES,
    PACK_BYTES,
    Rates,
    newton_schulz_cost_s,
)
from megacomposer.optim.muon_owners import (
    Item,
    Kind,
    Loads,
    choose_owners,
    cut_buckets,
)
from megacomposer.optim.muon_pieces import Geometry, RankGrid, layouts_of_world

if TYPE_CHECKING:
    from megacomposer.model.parameters import Matrix


FEWEST_BUCKETS = 4
"""Into which the exchanges are cut at least, so that one is computed while another is sent."""
LEAST_BUCKET_BYTES = 16 * 2**20
"""A smaller bucket takes longer to launch, some 40 kernels of 10 us, than to send at 45 GB/s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """One parameter, and where its matrices are stored."""

    placement: Placement
    grid: RankGrid
    geometry: Geometry


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMatrix:
    """One logical matrix and its owner."""

    parameter: int
    """Index into the plan's parameters."""
    index: int
    """Index into the matrices of that parameter."""
    rows: int
    columns: int
    owner: int
    """The rank that orthogonalises it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Matrices that travel in one exchange."""

    kind: Kind
    """`dense` matrices travel over the world; `expert` ones among the ranks of equal EP rank, all
    those groups at once."""
    gathers: bool
    """False where every owner stores its matrices whole: then only results travel."""
    matrices: tuple[int, ...]
    """Indices into the plan's matrices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonPlan:
    """What every rank does in one step."""

    world_size: int
    parameters: tuple[PlannedParameter, ...]
    matrices: tuple[PlannedMatrix, ...]
    buckets: tuple[Bucket, ...]
    """In the order in which every rank exchanges them."""
    local: tuple[int, ...]
    """Matrices that only their owner stores: they travel nowhere."""
    load_s: tuple[float, ...]
    """Predicted Newton-Schulz seconds of each rank."""
    digest: str
    """SHA-256 over everything that the ranks must agree in."""

    @property
    def imbalance(self) -> float:
        """The largest predicted load over the mean; 1 is perfect."""
        total = sum(self.load_s)
        return max(self.load_s) * self.world_size / total if total > 0 else 1.0


def make_plan(
    parameters: Sequence[tuple[Placement, Sequence[Matrix]]],
    layout: Layout,
    *,
    steps: int,
    bucket_bytes: float,
    wire_bytes: int = 2,
    rates: Rates | None = None,
) -> MuonPlan:
    """The plan for every Muon parameter, whichever rank `layout` is of.

    `choose_owners` says who orthogonalises what, `cut_buckets` what travels together.

    Args:
        parameters: placement and logical matrices of each; `layout` need not be started.
        steps: of Newton-Schulz, for the costs.
        bucket_bytes: most bytes of matrices that a rank owns in a bucket, but for rounding to whole
            matrices. Less where that would make fewer than `FEWEST_BUCKETS`.
        wire_bytes: of an element on the wire.
        rates: None for those of one H200; the same on all ranks.

    Raises:
        ValueError: matrices that do not tile a parameter, or pieces that do not tile a matrix.
    """
    rates = Rates() if rates is None else rates
    planned = _plan_parameters(parameters, layout)
    items = _list_matrices(planned, parameters, layout, steps, wire_bytes)
    loads = Loads(_storage_s(planned, layout.world_size, wire_bytes, rates), rates)
    choose_owners(items, loads, layout)
    buckets = _make_buckets([item for item in items if item.travels], bucket_bytes)
    number = {id(item): i for i, item in enumerate(items)}
    matrices = tuple(
        PlannedMatrix(
            parameter=item.parameter,
            index=item.index,
            rows=item.rows,
            columns=item.columns,
            owner=item.owner,
        )
        for item in items
    )
    plan_buckets = tuple(
        Bucket(
            kind=bucket[0].kind,
            gathers=bucket[0].gathers,
            matrices=tuple(number[id(item)] for item in bucket),
        )
        for bucket in buckets
    )
    return MuonPlan(
        world_size=layout.world_size,
        parameters=planned,
        matrices=matrices,
        buckets=plan_buckets,
        local=tuple(i for i, item in enumerate(items) if not item.travels),
        load_s=_load_s(items, layout.world_size),
        digest=_digest(parameters, layout, matrices, plan_buckets),
    )


def _plan_parameters(
    parameters: Sequence[tuple[Placement, Sequence[Matrix]]], layout: Layout
) -> tuple[PlannedParameter, ...]:
    layouts = layouts_of_world(layout)
    # Layers are alike: each shape is looked at once.
    known: dict[tuple[Placement, tuple[Matrix, ...]], Geometry] = {}
    planned = []
    for placement, matrices in parameters:
        grid = RankGrid(layout, placement)
        key = (dataclasses.replace(placement, name=""), tuple(matrices))
        if key not in known:
            known[key] = Geometry(placement, matrices, grid, layouts)
        planned.append(PlannedParameter(placement=placement, grid=grid, geometry=known[key]))
    return tuple(planned)


def _list_matrices(
    planned: Sequence[PlannedParameter],
    parameters: Sequence[tuple[Placement, Sequence[Matrix]]],
    layout: Layout,
    steps: int,
    wire_bytes: int,
) -> list[Item]:
    cost_s = functools.cache(lambda m, n: newton_schulz_cost_s(m, n, steps=steps))
    items = []
    for number, (parameter, (placement, matrices)) in enumerate(
        zip(planned, parameters, strict=True)
    ):
        for index, (matrix, holders) in enumerate(
            zip(matrices, parameter.geometry.holders, strict=True)
        ):
            ep_rank = 0
            if placement.kind == "expert":
                ep_rank = parameter.grid.rank(holders[0], 0) % layout.ep
                assert all(
                    parameter.grid.rank(position, 0) % layout.ep == ep_rank for position in holders
                ), (placement.name, index)
            items.append(
                Item(
                    name=placement.name,
                    parameter=number,
                    index=index,
                    rows=matrix.rows,
                    columns=matrix.columns,
                    kind=placement.kind,
                    ep_rank=ep_rank,
                    position=holders[0] if len(holders) == 1 else None,
                    grid=parameter.grid,
                    cost_s=cost_s(matrix.rows, matrix.columns),
                    num_bytes=matrix.rows * matrix.columns * wire_bytes,
                )
            )
    return items


def _storage_s(
    planned: Sequence[PlannedParameter], world_size: int, wire_bytes: int, rates: Rates
) -> list[float]:
    """Of the passes over what each rank stores."""
    element_bytes = MOMENTUM_BYTES + PACK_BYTES + APPLY_BYTES + 2 * wire_bytes
    alike = Counter(id(parameter.geometry) for parameter in planned)
    first = {id(parameter.geometry): parameter for parameter in reversed(planned)}
    elements = [0] * world_size
    for key, count in alike.items():
        grid, geometry = first[key].grid, first[key].geometry
        for rank in range(world_size):
            elements[rank] += count * geometry.elements[grid.position(rank)]
    return [count * element_bytes / rates.elementwise_bytes_per_s for count in elements]


def _load_s(items: Sequence[Item], world_size: int) -> tuple[float, ...]:
    load_s = [0.0] * world_size
    for item in items:
        load_s[item.owner] += item.cost_s
    return tuple(load_s)


def _make_buckets(items: Sequence[Item], bucket_bytes: float) -> list[list[Item]]:
    """Buckets of one kind each, in the order of the step.

    Those that only send results are spread among those that gather, one of them first: it is
    computed while the first gathers are on their way.
    """
    owned = Counter[int]()
    for item in items:
        owned[item.owner] += item.num_bytes
    most = max(owned.values(), default=0)
    bucket_bytes = min(bucket_bytes, max(most / FEWEST_BUCKETS, LEAST_BUCKET_BYTES))
    streams: dict[tuple[bool, Kind], list[Item]] = {}
    for item in items:
        streams.setdefault((item.gathers, item.kind), []).append(item)
    buckets = {key: cut_buckets(stream, bucket_bytes) for key, stream in streams.items()}
    placed = []
    for gathers in (False, True):
        both = [bucket for key in sorted(buckets) if key[0] is gathers for bucket in buckets[key]]
        for i, bucket in enumerate(both):
            placed.append(((i + 0.5 * gathers) / len(both), gathers, i, bucket))
    return [bucket for _, _, _, bucket in sorted(placed, key=lambda entry: entry[:3])]


def _digest(
    parameters: Sequence[tuple[Placement, Sequence[Matrix]]],
    layout: Layout,
    matrices: Sequence[PlannedMatrix],
    buckets: Sequence[Bucket],
) -> str:
    digest = hashlib.sha256(repr(sorted(layout.describe().items())).encode())
    for placement, _ in parameters:
        digest.update(repr(placement).encode())
    numbers = array.array("q")
    for matrix in matrices:
        numbers.extend((matrix.parameter, matrix.rows, matrix.columns, matrix.owner))
    for bucket in buckets:
        numbers.extend((-1, bucket.kind == "expert", bucket.gathers, *bucket.matrices))
    digest.update(numbers.tobytes())
    return digest.hexdigest()
