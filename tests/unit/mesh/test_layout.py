"""Rank arithmetic of the two meshes, without a process group."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout

MAX_WORLD = 6
"""Every layout of every world up to here, possible or not, and one larger world below."""


def layouts_of(config: MeshConfig, world_size: int) -> list[Layout]:
    """The layout as each rank sees it."""
    return [
        Layout(config, world_size=world_size, rank=rank, device_type="cpu")
        for rank in range(world_size)
    ]


def small_configs() -> Iterator[tuple[int, MeshConfig]]:
    for world in range(1, MAX_WORLD + 1):
        sizes, shards = range(1, world + 2), range(world + 2)
        for tp, cp, ep, dense, expert in itertools.product(sizes, sizes, sizes, shards, shards):
            yield world, MeshConfig(tp=tp, cp=cp, ep=ep, dense_shard=dense, expert_shard=expert)


def is_possible(config: MeshConfig, world: int) -> bool:
    if world % (config.tp * config.cp) or world % config.ep:
        return False
    dense = config.dense_shard or world // config.tp
    expert = config.expert_shard or world // config.ep
    return (world // config.tp) % dense == 0 and (world // config.ep) % expert == 0


def grouped(layouts: list[Layout], key: Callable[[Layout], object]) -> list[list[int]]:
    groups = defaultdict(list)
    for layout in layouts:
        groups[key(layout)].append(layout.rank)
    return list(groups.values())


def test_every_layout_is_either_consistent_or_refused() -> None:
    possible = 0
    for world, config in small_configs():
        if is_possible(config, world):
            check_ranks(layouts_of(config, world))
            possible += 1
        else:
            with pytest.raises(ValueError, match="impossible layout"):
                Layout(config, world_size=world, rank=0, device_type="cpu")
    assert possible > 300
    # Both meshes replicated, CP and TP inside, EP across them.
    check_ranks(
        layouts_of(MeshConfig(tp=2, cp=3, ep=6, dense_shard=6, expert_shard=2), world_size=24)
    )


def check_ranks(layouts: list[Layout]) -> None:
    """Each group is what the layout's docstring says, and the groups of a kind split the ranks."""
    first = layouts[0]
    for layout in layouts:
        assert layout.rank == (
            (layout.dp_rank * first.cp + layout.cp_rank) * first.tp + layout.tp_rank
        )
        dense = layout.dense_replicate_rank * first.dense_shard + layout.dense_shard_rank
        assert layout.rank == dense * first.tp + layout.tp_rank
        expert = layout.expert_replicate_rank * first.expert_shard + layout.expert_shard_rank
        assert layout.rank == expert * first.ep + layout.ep_rank
        assert 0 <= layout.dense_shard_rank < first.dense_shard
        assert 0 <= layout.dense_replicate_rank < first.dense_replicate
        assert 0 <= layout.expert_shard_rank < first.expert_shard
        assert 0 <= layout.expert_replicate_rank < first.expert_replicate

    tp, ep = first.tp, first.ep
    check_group(layouts, first.dense_shard, tp, lambda x: (x.tp_rank, x.dense_replicate_rank))
    check_group(
        layouts,
        first.dense_replicate,
        tp * first.dense_shard,
        lambda x: (x.tp_rank, x.dense_shard_rank),
    )
    check_group(layouts, first.expert_shard, ep, lambda x: (x.ep_rank, x.expert_replicate_rank))
    check_group(
        layouts,
        first.expert_replicate,
        ep * first.expert_shard,
        lambda x: (x.ep_rank, x.expert_shard_rank),
    )
    check_group(layouts, tp, 1, lambda x: (x.dp_rank, x.cp_rank))
    check_group(layouts, first.cp, tp, lambda x: (x.dp_rank, x.tp_rank))
    check_group(layouts, ep, 1, lambda x: (x.expert_replicate_rank, x.expert_shard_rank))


def check_group(
    layouts: list[Layout], size: int, stride: int, key: Callable[[Layout], object]
) -> None:
    """Ranks with one key form groups of `size` that step by `stride` and cover all ranks."""
    groups = grouped(layouts, key)
    assert len(groups) * size == len(layouts)
    for ranks in groups:
        assert ranks == [ranks[0] + i * stride for i in range(size)]


def test_context_parallel_ranks_shard_dense_weights_too() -> None:
    layouts = layouts_of(MeshConfig(cp=2), world_size=4)
    assert [layout.dense_shard_rank for layout in layouts] == [0, 1, 2, 3]
    assert layouts[0].dense_shard == 4


def test_context_and_expert_parallelism_share_eight_ranks() -> None:
    layouts = layouts_of(MeshConfig(cp=2, ep=8), world_size=8)
    assert [layout.ep_rank for layout in layouts] == list(range(8))
    assert [layout.dp for layout in layouts] == [4] * 8
    assert str(layouts[0]) == (
        "world 8 = dp 4 x cp 2 x tp 1; ep 8; dense weights shard 8 x replicate 1;"
        " experts shard 1 x replicate 1"
    )


@pytest.mark.parametrize(
    ("config", "world", "numbers"),
    [
        (MeshConfig(tp=3), 8, ["tp 3 x cp 1", "world of 8", "3 does not divide 8"]),
        (MeshConfig(tp=2, cp=3), 8, ["tp 2 x cp 3", "world of 8", "6 does not divide 8"]),
        (MeshConfig(tp=16), 8, ["tp 16", "world of 8"]),
        (MeshConfig(ep=3), 8, ["ep 3", "world of 8", "3 does not divide 8"]),
        (
            MeshConfig(tp=2, dense_shard=3),
            8,
            ["dense_shard 3", "the 4 = world 8 / tp 2", "3 does not divide 4"],
        ),
        (
            MeshConfig(ep=4, expert_shard=8),
            8,
            ["expert_shard 8", "the 2 = world 8 / ep 4", "8 does not divide 2"],
        ),
    ],
)
def test_refusal_names_the_numbers(config: MeshConfig, world: int, numbers: list[str]) -> None:
    with pytest.raises(ValueError, match="impossible layout") as refusal:
        Layout(config, world_size=world, rank=0, device_type="cpu")
    for number in numbers:
        assert number in str(refusal.value)


@pytest.mark.parametrize("name", ["tp", "cp", "ep"])
def test_parallel_size_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"mesh\.{name} is 0; it must be >= 1"):
        MeshConfig(**{name: 0})


@pytest.mark.parametrize("name", ["dense_shard", "expert_shard"])
def test_negative_shard_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"mesh\.{name} is -1; give a size >= 1, or 0"):
        MeshConfig(**{name: -1})


def test_description_for_a_checkpoint_holds_the_sizes_that_were_chosen() -> None:
    layout = Layout(MeshConfig(tp=2, ep=4), world_size=8, rank=5, device_type="cpu")
    assert layout.describe() == {
        "world_size": 8,
        "tp": 2,
        "cp": 1,
        "ep": 4,
        "dense_shard": 4,
        "expert_shard": 2,
    }
