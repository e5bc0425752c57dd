"""The sharded Muon on the real models, on every kind of layout, against the reference on one rank.

Gradients are made up, since real ones differ between layouts by rounding.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from muon_cases import Outcome, differences, tensors_of
from parallel_model import GQA, MLA, Job, start_cpu_process, start_job

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.sharding import scatter_from_global
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.optimizer import build_optimizer
from runner import run_distributed

if TYPE_CHECKING:
    from megacomposer.runtime.process import Process

STEPS = 5
MODELS = {"mla": MLA, "gqa": GQA}
CASES = {
    "mla, tp2 ep2": MeshConfig(tp=2, ep=2),
    "mla, ep4": MeshConfig(ep=4),
    "mla, dense 2 x 2, experts 4": MeshConfig(dense_shard=2),
    "mla, ep2, experts replicated": MeshConfig(ep=2, expert_shard=1),
    "mla, tp2 cp2 ep4, dense replicated": MeshConfig(tp=2, cp=2, ep=4, dense_shard=1),
    "gqa, cp2 ep2": MeshConfig(cp=2, ep=2),
    "gqa, tp2, experts 2 x 2": MeshConfig(tp=2, expert_shard=2),
}


def model_of(case: str) -> str:
    return case.partition(",")[0]


def train(process: Process, model: str, mesh: MeshConfig, optimizer_name: str) -> dict[str, Any]:
    with start_job(process, MODELS[model], mesh) as job:
        config = OptimConfig(name=optimizer_name, muon_bucket_mib=2e-3)
        optimizer = build_optimizer(config, job.shards, job.layout)
        for step in range(STEPS):
            set_gradients(job, step)
            optimizer.step(lr=1e-2)
            optimizer.zero_grad()
        tensors = tensors_of(optimizer, job.shards)
        metrics = optimizer.metrics()
        return {"outcome": Outcome({k: (w, t.clone()) for k, (w, t) in tensors.items()}, metrics)}


def set_gradients(job: Job, step: int) -> None:
    for shard in job.shards:
        generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()) + step)
        full = torch.randn(shard.layout.global_shape, generator=generator)
        shard.parameter.grad = torch.zeros_like(shard.parameter)
        assert shard.local_grad is not None
        scatter_from_global(shard.layout, full, shard.local_grad)


def sharded() -> dict[str, Any]:
    with start_cpu_process() as process:
        return {case: train(process, model_of(case), CASES[case], "muon") for case in CASES}


def unsharded() -> dict[str, Any]:
    with start_cpu_process() as process:
        return {
            (model, name): train(process, model, MeshConfig(), name)
            for model in MODELS
            for name in ("muon_reference", "muon")
        }


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_distributed(unsharded, 1, init_process_group=False, timeout_s=300.0)[0]


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_distributed(sharded, 4, init_process_group=False, timeout_s=600.0)


def expected_of(one: dict[str, Any], model: str) -> dict[str, torch.Tensor]:
    tensors = one[model, "muon_reference"]["outcome"].tensors
    return {name: tensor for name, (_, tensor) in tensors.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_layout_changes_a_bit_of_the_model(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    expected = expected_of(one, model_of(case))
    assert sum(name.endswith("/momentum") for name in expected) >= 8
    for rank in four:
        assert differences(rank[case]["outcome"], expected) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_alone_differs_from_the_reference_or_communicates(
    one: dict[str, Any], model: str
) -> None:
    outcome = one[model, "muon"]["outcome"]
    assert differences(outcome, expected_of(one, model)) == []
    assert outcome.metrics["optim/muon_collectives"] == 0
