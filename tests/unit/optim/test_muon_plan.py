from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from parameter_shards import column_matrices, row_matrices

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.mesh.sharding import TensorLayout, scatter_from_global
from megacomposer.model import presets
from megacomposer.model.parameter_shapes import parameter_placements
from megacomposer.model.parameters import Matrix
from megacomposer.optim.cost import Rates
from megacomposer.optim.muon_exchange import ALIGNMENT, Exchange, Held
from megacomposer.optim.muon_pieces import Geometry, RankGrid, layouts_of_world
from megacomposer.optim.muon_plan import LEAST_BUCKET_BYTES, MuonPlan, make_plan

CPU = torch.device("cpu")
EXPERTS = (8, 14, 20)
PARAMETERS: list[tuple[Placement, tuple[Matrix, ...]]] = [
    (Placement(name="query", global_shape=(24, 20), tp_dim=0), row_matrices((24, 20), 8)),
    (Placement(name="out", global_shape=(20, 24), tp_dim=1), column_matrices((20, 24), 8)),
    (
        Placement(name="gate_up", global_shape=(24, 20), tp_dim=0, halves=2),
        row_matrices((24, 20), 12),
    ),
    (Placement(name="latent", global_shape=(5, 20)), row_matrices((5, 20), 5)),
    (Placement(name="experts", global_shape=EXPERTS, kind="expert"), row_matrices(EXPERTS, 7)),
]
MESHES = {
    "fsdp 8": MeshConfig(),
    "hsdp 2 x 4, experts 4 x 2": MeshConfig(dense_shard=4, expert_shard=2),
    "tp 2, ep 4": MeshConfig(tp=2, ep=4),
    "tp 2, cp 2, dense 2 x 2, ep 2, experts 2 x 2": MeshConfig(
        tp=2, cp=2, dense_shard=2, ep=2, expert_shard=2
    ),
    "ep 8": MeshConfig(ep=8),
    "tp 4, all replicated": MeshConfig(tp=4, dense_shard=1, ep=2, expert_shard=1),
}
WORLD = 8


def _layout(mesh: MeshConfig, *, rank: int = 0, world_size: int = WORLD) -> Layout:
    return Layout(mesh, world_size=world_size, rank=rank, device_type="cpu")


def _plan(
    parameters: list[tuple[Placement, tuple[Matrix, ...]]],
    mesh: MeshConfig,
    *,
    rank: int = 0,
    world_size: int = WORLD,
    bucket_bytes: float = 300.0,
    rates: Rates | None = None,
) -> MuonPlan:
    layout = _layout(mesh, rank=rank, world_size=world_size)
    return make_plan(parameters, layout, steps=5, bucket_bytes=bucket_bytes, rates=rates)


@pytest.mark.parametrize("name", MESHES)
def test_grid_puts_a_rank_where_it_does_not_store(name: str) -> None:
    layouts = layouts_of_world(_layout(MESHES[name]))
    for placement, _ in PARAMETERS:
        grid = RankGrid(layouts[0], placement)
        assert grid.num_positions * grid.num_replicas == WORLD
        stored = [placement.on(layout).blocks for layout in layouts]
        for rank in range(WORLD):
            position, replica = grid.position(rank), grid.replica(rank)
            assert grid.rank(position, replica) == rank
            for holder in grid.holders(position):
                assert stored[holder] == stored[rank], (placement.name, holder, rank)


@pytest.mark.parametrize("name", MESHES)
def test_pieces_are_read_from_the_wrong_place(name: str) -> None:
    layouts = layouts_of_world(_layout(MESHES[name]))
    for placement, matrices in PARAMETERS:
        grid = RankGrid(layouts[0], placement)
        geometry = Geometry(placement, matrices, grid, layouts)
        full = torch.randn(placement.global_shape)
        found = [torch.zeros(matrix.rows, matrix.columns) for matrix in matrices]
        for position in range(grid.num_positions):
            stored = placement.on(layouts[grid.rank(position, 0)])
            local = torch.empty(stored.local_shape)
            scatter_from_global(stored, full, local)
            for index, pieces in geometry.pieces[position].items():
                for piece in pieces:
                    part = local.as_strided(
                        (piece.rows, piece.columns), (piece.stride, 1), piece.offset
                    )
                    rows = slice(piece.row, piece.row + piece.rows)
                    found[index][rows, piece.column : piece.column + piece.columns] = part
        for matrix, value in zip(matrices, found, strict=True):
            assert torch.equal(value, full[matrix.slices].view_as(value))


@pytest.mark.parametrize("name", MESHES)
def test_ranks_plan_differently(name: str) -> None:
    plans = [_plan(PARAMETERS, MESHES[name], rank=rank) for rank in range(WORLD)]
    assert len({plan.digest for plan in plans}) == 1
    assert all(plan.matrices == plans[0].matrices for plan in plans)
    assert all(plan.buckets == plans[0].buckets for plan in plans)


@pytest.mark.parametrize("name", MESHES)
def test_matrix_has_no_place_or_two_in_a_step(name: str) -> None:
    plan = _plan(PARAMETERS, MESHES[name])
    seen = Counter([*plan.local, *(i for bucket in plan.buckets for i in bucket.matrices)])
    assert seen == Counter(range(len(plan.matrices)))
    assert len(plan.matrices) == sum(len(matrices) for _, matrices in PARAMETERS)
    for bucket in plan.buckets:
        owned = Counter[int]()
        for matrix in (plan.matrices[i] for i in bucket.matrices):
            owned[matrix.owner] += 2 * matrix.rows * matrix.columns
        assert max(owned.values()) < 300 + 2 * 12 * 20  # the bound and the largest matrix


@pytest.mark.parametrize("name", MESHES)
def test_one_rank_sends_what_the_other_does_not_expect(name: str) -> None:
    mesh = MESHES[name]
    plan = _plan(PARAMETERS, mesh)
    held = [Held(plan, rank) for rank in range(WORLD)]
    for bucket in plan.buckets:
        groups = [range(WORLD)]
        if bucket.kind == "expert":
            groups = [range(ep_rank, WORLD, mesh.ep) for ep_rank in range(mesh.ep)]
        for members in groups:
            sides = [Exchange(plan, bucket, held[r], members, r, CPU) for r in members]
            assert len({side.is_idle for side in sides}) == 1
            for i, one in enumerate(sides):
                assert one.gathers or one.gather.sends[i] == sum(one.gather.sends)
                wire = [*one.gather.sends, *one.gather.receives, *one.scatter.sends]
                assert {n % ALIGNMENT for n in (*wire, *one.stacks.starts)} <= {0}
                assert {piece.wire_offset % ALIGNMENT for piece in one.update.table.pieces} <= {0}
                for j, other in enumerate(sides):
                    assert one.gather.sends[j] == other.gather.receives[i]
                    assert one.scatter.sends[j] == other.scatter.receives[i]


def test_replicas_repeat_work_or_one_rank_does_it_all() -> None:
    heads = [(Placement(name="query", global_shape=(64, 20)), row_matrices((64, 20), 4))]
    for mesh in (
        MeshConfig(),
        MeshConfig(dense_shard=1),
        MeshConfig(tp=2),
        MeshConfig(dense_shard=2),
    ):
        plan = _plan(heads, mesh)
        assert Counter(matrix.owner for matrix in plan.matrices) == dict.fromkeys(range(WORLD), 2)
        assert plan.imbalance == pytest.approx(1.0)


def test_expensive_matrices_share_an_owner() -> None:
    sizes = {"large": 64, "middle": 32, "small": 8}
    shapes = [(f"{name}.{i}", n) for name, n in sizes.items() for i in range(WORLD)]
    parameters = [
        (Placement(name=name, global_shape=(n, n)), row_matrices((n, n), n)) for name, n in shapes
    ]
    plan = _plan(parameters, MeshConfig(), bucket_bytes=1e9)
    for start in range(0, len(shapes), WORLD):
        owners = {matrix.owner for matrix in plan.matrices[start : start + WORLD]}
        assert len(owners) == WORLD


def _experts(count: int) -> list[tuple[Placement, tuple[Matrix, ...]]]:
    """Two matrices in each of `count` experts."""
    shape = (count, 4, 6)
    placement = Placement(name="experts", global_shape=shape, kind="expert")
    return [(placement, row_matrices(shape, 2))]


# Links that cost nothing, passes over storage neither.
FREE = Rates(near_bytes_per_s=1e30, far_bytes_per_s=1e30, elementwise_bytes_per_s=1e30)


def test_whole_matrices_travel_without_need_or_leave_a_rank_overloaded() -> None:
    even = _plan(_experts(16), MeshConfig(ep=2), rates=FREE)
    assert even.buckets == ()
    assert even.imbalance == pytest.approx(1.0)
    # seven ranks have 3 experts of two matrices and one has 1: 44 over 8 is 6 for the most loaded
    near = _plan(_experts(22), MeshConfig(), rates=FREE)
    assert near.buckets == ()
    # four ranks of an EP rank have 2, 2, 1 and 0 experts
    uneven = _plan(_experts(10), MeshConfig(ep=2), rates=FREE)
    owners = Counter(matrix.owner for matrix in uneven.matrices)
    assert sorted(owners.values()) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert all(bucket.gathers and bucket.kind == "expert" for bucket in uneven.buckets)
    moved = [uneven.matrices[i] for bucket in uneven.buckets for i in bucket.matrices]
    assert {matrix.owner % 2 == matrix.index // 2 // 5 for matrix in moved} == {True}


def test_whole_matrices_move_over_links_that_take_longer_than_they_save() -> None:
    # ranks have 2, 2, 2, 2, 1, 0, 0 and 0 experts: the first node is full, the second is not
    nodes = dataclasses.replace(FREE, gpus_per_node=4)
    slow_far = _plan(_experts(9), MeshConfig(), rates=dataclasses.replace(nodes, far_bytes_per_s=1))
    assert slow_far.buckets == ()
    slow_near = dataclasses.replace(nodes, near_bytes_per_s=1)
    owners = Counter(m.owner for m in _plan(_experts(9), MeshConfig(), rates=slow_near).matrices)
    assert [owners[rank] for rank in range(4)] == [3] * 4
    assert max(owners.values()) == 3
    # all eight in one node
    alone = dataclasses.replace(slow_near, gpus_per_node=8)
    assert _plan(_experts(9), MeshConfig(), rates=alone).buckets == ()


def test_rank_is_planned_to_do_much_in_one_exchange_and_little_in_another() -> None:
    plan = _plan(_experts(96), MeshConfig(ep=2, expert_shard=1), bucket_bytes=2 * 96, rates=FREE)
    shares = [Counter(plan.matrices[i].owner for i in bucket.matrices) for bucket in plan.buckets]
    assert len(shares) == 3
    assert all(share == dict.fromkeys(range(WORLD), 8) for share in shares)


def test_exchanges_are_too_few_to_overlap_or_too_small() -> None:
    rows = LEAST_BUCKET_BYTES // 2 // 1024  # of a matrix with that many bytes
    for count, buckets in ((1, 1), (3, 3), (8, 4), (12, 4)):
        shape = (WORLD * count * rows, 1024)
        heads = [(Placement(name="heads", global_shape=shape), row_matrices(shape, rows))]
        plan = _plan(heads, MeshConfig(dense_shard=1), bucket_bytes=2.0**28)
        assert len(plan.buckets) == buckets


def test_digest_misses_a_difference() -> None:
    digests = [
        _plan(PARAMETERS, MESHES["fsdp 8"]).digest,
        _plan(PARAMETERS, MESHES["fsdp 8"], bucket_bytes=1e6).digest,
        _plan(PARAMETERS, MESHES["ep 8"]).digest,
        _plan(PARAMETERS[::-1], MESHES["fsdp 8"]).digest,
        _plan(
            [(PARAMETERS[0][0], row_matrices((24, 20), 12)), *PARAMETERS[1:]], MeshConfig()
        ).digest,
        _plan(PARAMETERS, MeshConfig(), world_size=4).digest,
    ]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("shape", "matrices", "message"),
    [
        ((8, 6), row_matrices((8, 6), 4)[:1], "24 of 48"),
        ((8, 6), (*row_matrices((8, 6), 4), *row_matrices((8, 6), 4)[:1]), "two of them"),
        ((8, 6), row_matrices((12, 6), 4), "not inside"),
        ((2, 4, 6), (Matrix(offset=(0, 0, 0), shape=(2, 4, 6)),), "must be 1"),
        ((2, 4, 6), (Matrix(offset=(0, 2, 0), shape=(1, 4, 6)),), "not inside"),
        ((8,), (Matrix(offset=(0,), shape=(8,)),), "cannot consist"),
    ],
)
def test_matrices_that_do_not_add_up_are_planned(
    shape: tuple[int, ...], matrices: tuple[Matrix, ...], message: str
) -> None:
    placement = Placement(name="weight", global_shape=shape)
    with pytest.raises(ValueError, match=message) as refusal:
        _plan([(placement, matrices)], MeshConfig())
    assert "weight" in str(refusal.value)


class _Gap(Placement):
    """Forgets what the last rank stores."""

    def on(self, layout: Layout) -> TensorLayout:
        stored = super().on(layout)
        if layout.rank < WORLD - 1:
            return stored
        return dataclasses.replace(stored, local_shape=(0, 6), blocks=())


def test_pieces_that_do_not_add_up_are_planned() -> None:
    placement = _Gap(name="weight", global_shape=(16, 6))
    with pytest.raises(ValueError, match="matrix 1 of weight, 8 x 6: they hold 36 of 48 elements"):
        _plan([(placement, row_matrices((16, 6), 8))], MeshConfig())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "mesh", [MeshConfig(ep=8), MeshConfig(ep=8, dense_shard=32, expert_shard=8)]
)
def test_plan_of_a_trillion_parameters_takes_minutes_or_is_lopsided(mesh: MeshConfig) -> None:
    parameters = [entry for entry in parameter_placements(presets.kimi_k2()) if entry[1]]
    plan = _plan(parameters, mesh, world_size=256, bucket_bytes=2.0**28, rates=FREE)
    assert len(plan.matrices) > 61 * 384 * 3
    assert plan.imbalance <= 1.1
