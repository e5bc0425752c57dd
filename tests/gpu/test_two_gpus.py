"""What two ranks do over NCCL: sharded Muon, and the end of a job of which one rank fails.

Whole training runs on two GPUs are compared by scripts/bench/two_gpu_training.py.
"""

from __future__ import annotations

import pytest
import torch
from muon_cases import (
    STEPS,
    Case,
    Outcome,
    differences,
    expert_groups,
    plain_layout,
    run_case,
    shards_on,
    tensors_of,
    train,
)

from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.muon_reference import MuonReference
from megacomposer.runtime.config import RuntimeConfig
from runner import RankFailure, run_distributed

pytestmark = pytest.mark.multi_gpu
CASES = {
    "fsdp": Case(MeshConfig(), device="cuda"),
    "fsdp, one buffer": Case(MeshConfig(), settings={"muon_buffers": 1}, device="cuda"),
    "fsdp, fp32": Case(MeshConfig(), settings={"muon_wire_dtype": "fp32"}, device="cuda"),
    "fsdp, bf16": Case(MeshConfig(), settings={"muon_wire_dtype": "bf16"}, device="cuda"),
    "fsdp, standard": Case(MeshConfig(), settings={"muon_ns_form": "standard"}, device="cuda"),
    "replicas": Case(MeshConfig(dense_shard=1, expert_shard=1), device="cuda"),
    "dense replicas": Case(MeshConfig(dense_shard=1), device="cuda"),
    "expert replicas": Case(MeshConfig(expert_shard=1), device="cuda"),
    "ep": Case(MeshConfig(ep=2), device="cuda"),
    "ep, experts that do not divide": Case(MeshConfig(ep=2), num_experts=6, device="cuda"),
    "tp": Case(MeshConfig(tp=2), device="cuda"),
    "tp, ep": Case(MeshConfig(tp=2, ep=2), device="cuda"),
    "cp, ep": Case(MeshConfig(cp=2, ep=2), device="cuda"),
}
RUNTIME = RuntimeConfig(device="cuda", collective_timeout_s=60.0)


def sharded() -> dict[str, Outcome]:
    from megacomposer.runtime.process import start_process

    with start_process(RUNTIME):
        groups = expert_groups()
        return {name: run_case(case, groups) for name, case in CASES.items()}


def unsharded() -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and moments of the reference of each case, whole, on one GPU."""
    from megacomposer.runtime.process import start_process

    found = {}
    with start_process(RUNTIME):
        for name, case in CASES.items():
            shards = shards_on(plain_layout(MeshConfig()), case.num_experts, case.device)
            optimizer = MuonReference(shards, case.config)
            train(optimizer, shards, case.num_experts, range(STEPS))
            tensors = tensors_of(optimizer, shards)
            found[name] = {key: tensor.cpu() for key, (_, tensor) in tensors.items()}
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    return run_distributed(sharded, 2, init_process_group=False)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, torch.Tensor]]:
    return run_distributed(unsharded, 1, init_process_group=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_sharding_changes_a_bit_over_nccl(
    outcomes: list[dict[str, Outcome]], references: dict[str, dict[str, torch.Tensor]], name: str
) -> None:
    for found in outcomes:
        assert differences(found[name], references[name]) == []


def fail_alone() -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    from megacomposer.runtime.process import start_process

    with start_process(RUNTIME) as process:
        sum_of_ones = torch.ones(1, device=process.device)
        torch.distributed.all_reduce(sum_of_ones)
        assert sum_of_ones.item() == 2.0
        if process.rank == 1:
            raise RuntimeError("out of luck")
        torch.distributed.all_reduce(sum_of_ones)
        sum_of_ones.item()


def test_rank_that_fails_alone_hangs_in_the_teardown() -> None:
    with pytest.raises(RankFailure, match="rank 1 raised:(.|\n)*out of luck"):
        run_distributed(fail_alone, 2, init_process_group=False, timeout_s=50.0)
