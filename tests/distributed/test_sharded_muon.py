"""The sharded Muon against the unsharded reference, bit for bit, on gloo ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from muon_cases import (
    CONFIG,
    STEPS,
    Case,
    Outcome,
    SlowLink,
    differences,
    expert_groups,
    plain_layout,
    run_case,
    shards_on,
    tensors_of,
    train,
    values,
)
from parameter_shards import placed_shard, row_matrices, set_gradient

from megacomposer.checkpoint.native import load_checkpoint, save_checkpoint
from megacomposer.checkpoint.planner import Tensors
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.placement import Placement
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim.muon import ShardedMuon, Trace
from megacomposer.optim.muon_reference import MuonReference
from runner import run_distributed

CASES = {
    2: {
        "fsdp 2": Case(MeshConfig()),
        "fsdp 2, one buffer": Case(MeshConfig(), settings={"muon_buffers": 1}),
        "fsdp 2, two buffers": Case(MeshConfig(), settings={"muon_buffers": 2}),
        "fsdp 2, fp32": Case(MeshConfig(), settings={"muon_wire_dtype": "fp32"}),
        "fsdp 2, standard": Case(MeshConfig(), settings={"muon_ns_form": "standard"}),
        "all replicated": Case(MeshConfig(dense_shard=1, expert_shard=1)),
        "ep 2": Case(MeshConfig(ep=2)),
        "tp 2": Case(MeshConfig(tp=2)),
        "tp 2, ep 2": Case(MeshConfig(tp=2, ep=2)),
    },
    4: {
        "fsdp 4": Case(MeshConfig()),
        "fsdp 4, bf16": Case(MeshConfig(), settings={"muon_wire_dtype": "bf16"}),
        "fsdp 4, cautious": Case(MeshConfig(), settings={"muon_cautious_decay": True}),
        "fsdp 4, experts that do not divide": Case(MeshConfig(), num_experts=5),
        "fsdp 4, without nesterov": Case(MeshConfig(), settings={"muon_nesterov": False}),
        "fsdp 4, one bucket": Case(MeshConfig(), settings={"muon_bucket_mib": 1.0}),
        "dense 2 x 2, experts 4": Case(MeshConfig(dense_shard=2)),
        "dense 4, experts 2 x 2": Case(MeshConfig(expert_shard=2)),
        "dense 2 x 2, experts replicated": Case(MeshConfig(dense_shard=2, expert_shard=1)),
        "ep 4": Case(MeshConfig(ep=4)),
        "ep 2, experts replicated": Case(MeshConfig(ep=2, expert_shard=1)),
        "ep 2, experts that do not divide": Case(MeshConfig(ep=2), num_experts=6),
        "cp 2, ep 4": Case(MeshConfig(cp=2, ep=4)),
        "tp 2, fsdp 2": Case(MeshConfig(tp=2)),
        "tp 2, dense replicated, ep 2": Case(MeshConfig(tp=2, ep=2, dense_shard=1)),
        "tp 4": Case(MeshConfig(tp=4)),
    },
}
Jobs = dict[int, list[dict[str, Any]]]
"""World size -> what each rank found."""
NAMES = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As on the ranks: the order of a sum may depend on the thread count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(case: Case) -> dict[str, torch.Tensor]:
    """Parameters and moments of the unsharded reference, whole."""
    shards = shards_on(plain_layout(MeshConfig()), case.num_experts)
    optimizer = MuonReference(shards, case.config)
    train(optimizer, shards, case.num_experts, range(STEPS))
    return {name: tensor for name, (_, tensor) in tensors_of(optimizer, shards).items()}


def everything(cases: dict[str, Case], traffic: dict[str, Traffic], root: Path) -> dict[str, Any]:
    """All that two or four ranks are asked: starting them takes longer."""
    groups = expert_groups()
    found: dict[str, Any] = {name: run_case(case, groups) for name, case in cases.items()}
    found["traffic"] = {name: count_traffic(case, groups) for name, case in traffic.items()}
    if torch.distributed.get_world_size() == 2:
        found["slow link"] = trace_slow_link(groups)
        found["no matrices"] = step_without_matrices(groups)
        found["refusals"] = load_spoiled(root, groups)
    else:
        found["faults"] = fail_in_turn(groups)
        found["resumed"] = resume_elsewhere(root, groups)
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return {
        world_size: run_distributed(
            everything, world_size, cases, traffic_of(world_size), tmp_path_factory.mktemp("root")
        )
        for world_size, cases in CASES.items()
    }


@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_sharding_changes_a_bit(jobs: Jobs, world_size: int, name: str) -> None:
    case = CASES[world_size][name]
    expected = reference(case)
    for parameter, start in values(case.num_experts, 0).items():
        assert not torch.equal(expected[parameter], start)
    for found in jobs[world_size]:
        assert differences(found[name], expected) == []


WHOLE = (Matrix(offset=(0, 0), shape=(4, 8)),)
HEADS = row_matrices((4, 8), 2)
EXPERTS = row_matrices((4, 3, 8), 3)
DENSE = Placement(name="weight", global_shape=(4, 8))
ROW = Placement(name="weight", global_shape=(4, 8), tp_dim=1)
STACK = Placement(name="weight", global_shape=(4, 3, 8), kind="expert")
ODD = Placement(name="weight", global_shape=(4, 6))


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One parameter on one mesh, and what each rank should see in a step."""

    placement: Placement
    matrices: tuple[Matrix, ...]
    mesh: MeshConfig
    collectives: int
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    reduced_bytes: int = 0
    wire: str = "fp16"


TRAFFIC = {
    # rank 1 sends its 2 x 8 half to rank 0 and gets it back; one largest entry is agreed upon
    "fsdp": (2, Traffic(DENSE, WHOLE, MeshConfig(), 3, (32, 32), (32, 32), 4)),
    "fsdp, fp32": (2, Traffic(DENSE, WHOLE, MeshConfig(), 3, (64, 64), (64, 64), 4, "fp32")),
    "tp row": (2, Traffic(ROW, WHOLE, MeshConfig(tp=2), 3, (32, 32), (32, 32), 4)),
    # 2 x 6 elements are padded to 16
    "padded": (
        2,
        Traffic(ODD, row_matrices((4, 6), 4), MeshConfig(), 3, (32, 32), (32, 32), 4),
    ),
    # each rank has one head
    "fsdp, whole heads": (2, Traffic(DENSE, HEADS, MeshConfig(), 0, (0, 0), (0, 0))),
    # both ranks have both heads: each orthogonalises one and sends it
    "replicas": (2, Traffic(DENSE, HEADS, MeshConfig(dense_shard=1), 1, (32, 32), (32, 32))),
    # ranks 0, 1 are one replica: 1 feeds 0, which sends halves to 1, 2 and 3
    "hsdp": (
        4,
        Traffic(DENSE, WHOLE, MeshConfig(dense_shard=2), 3, (96, 32, 0, 0), (32, 32, 32, 32), 4),
    ),
    # TP ranks 0 and 1 hold the same half: 2 alone feeds 0
    "tp replicas x fsdp": (
        4,
        Traffic(DENSE, WHOLE, MeshConfig(tp=2), 3, (96, 0, 32, 0), (32, 32, 32, 32), 4),
    ),
    "expert parallel": (4, Traffic(STACK, EXPERTS, MeshConfig(ep=4), 0, (0,) * 4, (0,) * 4)),
    "expert shards": (4, Traffic(STACK, EXPERTS, MeshConfig(), 0, (0,) * 4, (0,) * 4)),
    # two ranks have the same two experts; each orthogonalises one of them
    "expert replicas": (
        4,
        Traffic(STACK, EXPERTS, MeshConfig(ep=2, expert_shard=1), 1, (48,) * 4, (48,) * 4),
    ),
}


def traffic_of(world_size: int) -> dict[str, Traffic]:
    return {name: case for name, (size, case) in TRAFFIC.items() if size == world_size}


def count_traffic(case: Traffic, groups: dict[int, Any]) -> dict[str, float]:
    layout = plain_layout(case.mesh, groups)
    full = torch.randn(case.placement.global_shape, generator=torch.Generator().manual_seed(0))
    shard = placed_shard(case.placement, full, layout, case.matrices)
    optimizer = ShardedMuon([shard], dataclasses.replace(CONFIG, muon_wire_dtype=case.wire), layout)
    for _ in range(2):  # the counts are of one step
        set_gradient(shard, full)
        optimizer.step(lr=0.1)
    return optimizer.metrics()


@pytest.mark.parametrize(("world_size", "name"), [(n, name) for name, (n, _) in TRAFFIC.items()])
def test_more_is_sent_than_the_plan_needs(jobs: Jobs, world_size: int, name: str) -> None:
    case = traffic_of(world_size)[name]
    for rank, found in enumerate(jobs[world_size]):
        expected = {
            "optim/muon_collectives": case.collectives,
            "optim/muon_sent_bytes": case.sent_bytes[rank],
            "optim/muon_received_bytes": case.received_bytes[rank],
            "optim/muon_reduced_bytes": case.reduced_bytes,
        }
        assert {key: found["traffic"][name][key] for key in expected} == expected


DELAYED = Case(MeshConfig(ep=2), num_experts=4, settings={"muon_bucket_mib": 2e-4})


def trace_slow_link(groups: dict[int, Any]) -> tuple[Outcome, list[tuple[str, int]]]:
    trace: Trace = []
    outcome = run_case(DELAYED, groups, link=SlowLink(0.05), trace=trace)
    events = [(event, number) for event, number, _ in trace]
    return outcome, events[-len(events) // STEPS :]


def test_rank_waits_for_an_exchange_while_there_is_work(jobs: Jobs) -> None:
    expected = reference(DELAYED)
    exchanges = []
    for outcome, events in (found["slow link"] for found in jobs[2]):
        assert differences(outcome, expected) == []
        buckets = sum(event == "compute" for event, _ in events)
        at = {entry: i for i, entry in enumerate(events)}
        assert buckets >= 4
        for bucket in range(buckets):
            during_gather = events[at["gather starts", bucket] : at["gather ends", bucket]]
            during_scatter = events[at["scatter starts", bucket] : at["scatter ends", bucket]]
            if bucket == 0:
                assert ("adamw", 0) in during_gather
                assert any(event == "local" for event, _ in during_gather)
            else:
                assert ("compute", bucket - 1) in during_gather
            if bucket < buckets - 1:
                assert ("compute", bucket + 1) in during_scatter
            else:
                assert any(event == "local" for event, _ in during_scatter)
        exchanges.append([entry for entry in events if entry[0].endswith("starts")])
    assert exchanges[0] == exchanges[1]


def fail_in_turn(groups: dict[int, Any]) -> dict[str, Any]:
    """What each wrong use raises, and whether a step that raised changed anything."""
    rank = torch.distributed.get_rank()
    layout = plain_layout(MeshConfig(), groups)
    shards = shards_on(layout, 8)
    config = dataclasses.replace(CONFIG, muon_bucket_mib=1.0 if rank == 2 else 2e-4)
    with pytest.raises(ValueError, match="another Muon plan") as other_plan:
        ShardedMuon(shards, config, layout)
    cut_by_hand = [dataclasses.replace(shard, placement=None) for shard in shards]
    with pytest.raises(ValueError, match="query has no placement"):
        ShardedMuon(cut_by_hand, CONFIG, layout)
    optimizer = ShardedMuon(shards, CONFIG, layout)
    train(optimizer, shards, 8, range(1))
    before = {name: t.clone() for name, (_, t) in tensors_of(optimizer, shards).items()}
    for shard in shards:
        if shard.name != "norm":
            set_gradient(shard, torch.ones(shard.layout.global_shape))
    with pytest.raises(ValueError, match="no gradient: norm;"):
        optimizer.step(lr=0.1)
    after = tensors_of(optimizer, shards)
    return {
        "other plan": str(other_plan.value),
        "changed": [name for name in before if not torch.equal(before[name], after[name][1])],
        "step": optimizer.state_scalars(),
    }


def test_faults_hang_or_change_something(jobs: Jobs) -> None:
    for outcome in (found["faults"] for found in jobs[4]):
        assert "ranks [2] made another Muon plan" in outcome["other plan"]
        assert outcome["changed"] == []
        assert outcome["step"] == {"step": 1}


def step_without_matrices(groups: dict[int, Any]) -> tuple[dict[str, float], bool]:
    layout = plain_layout(MeshConfig(), groups)
    shards = [shard for shard in shards_on(layout, 8) if not shard.matrices]
    assert [shard.name for shard in shards] == ["embedding", "norm"]
    before = [shard.local.clone() for shard in shards]
    optimizer = ShardedMuon(shards, CONFIG, layout)
    train(optimizer, shards, 8, range(1))
    moved = [not torch.equal(a, shard.local) for a, shard in zip(before, shards, strict=True)]
    return optimizer.metrics(), all(moved)


def test_model_without_matrices_communicates_or_stands_still(jobs: Jobs) -> None:
    for metrics, moved in (found["no matrices"] for found in jobs[2]):
        assert moved
        assert metrics["optim/muon_collectives"] == 0
        assert metrics["optim/muon_predicted_imbalance"] == 1.0


def build(
    mesh: MeshConfig, groups: dict[int, Any]
) -> tuple[ShardedMuon, list[ParameterShard], Tensors]:
    layout = plain_layout(mesh, groups)
    shards = shards_on(layout, 8)
    optimizer = ShardedMuon(shards, CONFIG, layout)
    return optimizer, shards, tensors_of(optimizer, shards)


def resume_elsewhere(root: Path, groups: dict[int, Any]) -> list[Outcome]:
    """Three steps on one layout, a checkpoint, and the rest on each of two others."""
    first, shards, tensors = build(MeshConfig(tp=2, ep=2), groups)
    train(first, shards, 8, range(3))
    save(root, tensors, first.state_scalars())
    outcomes = []
    for mesh in (MeshConfig(), MeshConfig(dense_shard=2, expert_shard=1, ep=4)):
        second, shards, tensors = build(mesh, groups)
        loaded = load_checkpoint(root, tensors, expect={})
        second.load_state_scalars(loaded.host_state["scalars"])
        train(second, shards, 8, range(3, STEPS))
        outcomes.append(Outcome(tensors, {}))
    return outcomes


def save(root: Path, tensors: Tensors, scalars: dict[str, int | float]) -> None:
    rng_state = {"none": torch.zeros(1)}
    save_checkpoint(root, 3, tensors, {"scalars": scalars}, rng_state, keep_last=1)


def test_state_depends_on_the_layout_it_was_saved_on(jobs: Jobs) -> None:
    expected = reference(Case(MeshConfig()))
    for found in jobs[4]:
        assert [differences(outcome, expected) for outcome in found["resumed"]] == [[], []]


def load_spoiled(root: Path, groups: dict[int, Any]) -> list[str]:
    """What loading says of a checkpoint with a moment missing, and with one in half precision."""
    _, _, tensors = build(MeshConfig(), groups)
    key = "optim/query/momentum"
    layout, momentum = tensors[key]
    spoiled = {
        "missing": {name: entry for name, entry in tensors.items() if name != key},
        "half": tensors | {key: (layout, momentum.bfloat16())},
    }
    messages = []
    for name, saved in spoiled.items():
        save(root / name, saved, {"step": 0})
        momentum.fill_(7.0)
        with pytest.raises(ValueError, match=key) as refusal:
            load_checkpoint(root / name, tensors, expect={})
        assert bool((momentum == 7.0).all())
        messages.append(str(refusal.value))
    return messages


def test_missing_or_rounded_moment_is_loaded(jobs: Jobs) -> None:
    for missing, half in (found["refusals"] for found in jobs[2]):
        assert "optim/query/momentum" in missing
        assert "bfloat16" in half
