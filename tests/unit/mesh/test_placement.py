"""The parts that all ranks store: together they are the parameter, whatever the layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement

# Rows that do and do not divide over FSDP, and fewer rows than shards.
PLACEMENTS = [
    Placement(name="norm", global_shape=(5,)),
    Placement(name="replicated", global_shape=(7, 3)),
    Placement(name="column", global_shape=(12, 3), tp_dim=0),
    Placement(name="gate and up", global_shape=(12, 2), tp_dim=0, halves=2),
    Placement(name="row", global_shape=(3, 6), tp_dim=1),
    Placement(name="experts", global_shape=(12, 2, 3), kind="expert"),
]


def worlds() -> list[list[Layout]]:
    """Every layout of 1 to 6 ranks whose tp divides the shapes above; one Layout per rank."""
    found = []
    for world in (1, 2, 3, 4, 6):
        sizes = [size for size in range(1, world + 1) if world % size == 0]
        for tp, cp, ep, dense, expert in itertools.product(sizes, repeat=5):
            config = MeshConfig(tp=tp, cp=cp, ep=ep, dense_shard=dense, expert_shard=expert)
            fits = world % (tp * cp) == 0 and (world // tp) % dense == 0
            if fits and (world // ep) % expert == 0 and tp in (1, 2, 3):
                found.append(layouts_of(config, world))
    return found


def layouts_of(config: MeshConfig, world: int) -> list[Layout]:
    return [Layout(config, world_size=world, rank=r, device_type="cpu") for r in range(world)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_ranks_lose_or_repeat_an_element_in_some_layout(placement: Placement) -> None:
    cases = worlds()
    assert len(cases) > 100
    for layouts in cases:
        first = layouts[0]
        stored, primary = (torch.zeros(placement.global_shape, dtype=torch.int64) for _ in range(2))
        for layout in layouts:
            part = placement.on(layout)
            assert part.name == placement.name
            assert part.global_shape == placement.global_shape
            for block in part.blocks:
                stored[block.global_slices] += 1
                primary[block.global_slices] += part.is_primary
        if placement.kind == "expert":
            copies = first.expert_replicate
        else:
            copies = first.dense_replicate * (first.tp if placement.tp_dim is None else 1)
        assert (stored == copies).all(), (first, placement)
        assert (primary == 1).all(), (first, placement)


def test_rows_follow_torch_chunk() -> None:
    placement = Placement(name="w", global_shape=(10, 2))
    parts = [placement.on(layout) for layout in layouts_of(MeshConfig(), 4)]
    chunks = torch.arange(20).view(10, 2).chunk(4)
    assert [part.local_shape for part in parts] == [tuple(chunk.shape) for chunk in chunks]
    few = Placement(name="w", global_shape=(2, 2))
    assert [few.on(layout).local_shape[0] for layout in layouts_of(MeshConfig(), 4)] == [1, 1, 0, 0]


def test_gate_and_up_of_a_tensor_rank_are_its_share_of_both() -> None:
    placement = Placement(name="w", global_shape=(12, 2), tp_dim=0, halves=2)
    part = placement.on(layouts_of(MeshConfig(tp=2), 2)[1])
    rows = [
        (block.local_offset[0], block.global_offset[0], block.shape[0]) for block in part.blocks
    ]
    assert rows == [(0, 3, 3), (3, 9, 3)]


@pytest.mark.parametrize(
    ("placement", "config", "axis"),
    [
        (Placement(name="experts", global_shape=(3, 2, 2), kind="expert"), MeshConfig(ep=2), "ep"),
        (Placement(name="w", global_shape=(3, 2), tp_dim=0), MeshConfig(tp=2), "tp"),
        (Placement(name="w", global_shape=(6, 2), tp_dim=0, halves=2), MeshConfig(tp=2), "tp"),
        (Placement(name="w", global_shape=(2, 3), tp_dim=1), MeshConfig(tp=2), "tp"),
    ],
)
def test_shape_that_does_not_divide_is_refused_by_axis(
    placement: Placement, config: MeshConfig, axis: str
) -> None:
    with pytest.raises(ValueError, match=rf"cannot be split over mesh\.{axis}"):
        placement.on(layouts_of(config, 2)[0])


def test_parts_of_a_large_world_need_no_process_group() -> None:
    placement = Placement(name="experts", global_shape=(384, 2, 3), kind="expert")
    layouts = layouts_of(MeshConfig(ep=8, expert_shard=16), 256)
    sizes = [math.prod(placement.on(layout).local_shape) for layout in layouts]
    assert sizes == [3 * 2 * 3] * 256
