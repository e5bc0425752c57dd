"""Whole runs with the sharded Muon equal those with the reference, and take over from each other.

Real gradients on two ranks with EP=2, so that experts stay and everything else travels.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from parallel_model import close_groups, start_cpu_process

from launch_train import checkpoint_digests
from megacomposer.checkpoint.config import CheckpointConfig
from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.config import OptimConfig
from runner import run_distributed
from small_run import small_config, write_corpus

if TYPE_CHECKING:
    from megacomposer.runtime.process import Process
    from megacomposer.train.config import RunConfig

STEPS = 60
SWITCH = 50
LR = 4e-3
MUONS = ("muon", "muon_reference")
OTHERS = {
    "adamw": OptimConfig(name="adamw"),
    "whole": OptimConfig(name="muon", muon_o_proj="whole"),
}
"""Runs that load step SWITCH of a run with Muon."""


def config_of(
    folder: Path, run: str, optim: OptimConfig, *, source: str | None = None
) -> RunConfig:
    """The whole run in `folder / run`, from step SWITCH of the run `source` if given."""
    load_from = folder / source / "checkpoints" / f"step_{SWITCH:08d}" if source else None
    base = small_config(str(folder / "train"), str(folder / run))
    return dataclasses.replace(
        base,
        optim=optim,
        mesh=MeshConfig(ep=2),
        train=dataclasses.replace(base.train, num_steps=STEPS, micro_batch_size=4),
        checkpoint=CheckpointConfig(load_from=load_from),
    )


def train(process: Process, config: RunConfig) -> list[tuple[float, ...]]:
    """Losses and gradient norm of each step; a checkpoint of step SWITCH and one of the end."""
    from megacomposer.runtime.process import seed_everything
    from megacomposer.train.state import build_state
    from megacomposer.train.step import TrainStep

    seed_everything(config.runtime.seed)
    state = build_state(config, process)
    with state.loader as loader:
        state.restore()
        step = TrainStep(
            state.model,
            state.layout,
            state.shards,
            state.optimizer,
            clip_grad_norm=config.optim.clip_grad_norm,
            device=process.device,
        )
        values = []
        while state.step < STEPS:
            result = step(loader.next_step(), lr=config.optim.lr)
            state.step += 1
            state.trained_tokens += result.num_tokens
            assert result.mtp_loss is not None
            values.append((result.loss, result.mtp_loss, result.grad_norm))
            if state.step in (SWITCH, STEPS):
                state.save()
    close_groups()
    return values


def restored(process: Process, config: RunConfig) -> dict[str, Any]:
    """How a checkpoint of step SWITCH is answered, and the matrices of the output projections."""
    from megacomposer.train.state import build_state

    state = build_state(config, process)
    error = None
    with state.loader:
        try:
            state.restore()
        except ValueError as refusal:
            error = str(refusal)
    projections = [s.matrices for s in state.shards if s.name.endswith("linear_proj.weight")]
    close_groups()
    return {"step": state.step, "error": error, "matrices": {len(m) for m in projections}}


def all_runs(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with start_cpu_process() as process:
        for name in MUONS:
            found[name] = train(process, config_of(folder, name, OptimConfig(name=name, lr=LR)))
        for before, after in (MUONS, MUONS[::-1]):
            config = config_of(folder, f"to {after}", OptimConfig(name=after, lr=LR), source=before)
            found[f"to {after}"] = train(process, config)
        for run, optim in OTHERS.items():
            found[run] = restored(process, config_of(folder, run, optim, source="muon"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon_run")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    first, second = run_distributed(all_runs, 2, folder, init_process_group=False, timeout_s=400.0)
    assert first == second
    return first


@pytest.mark.timeout(420)
def test_sharded_muon_trains_another_model_than_the_reference(
    runs: dict[str, Any], folder: Path
) -> None:
    losses = [loss for loss, *_ in runs["muon"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 2, "or the comparison proves little"
    assert runs["muon"] == runs["muon_reference"]
    # Parameters, moments, router biases, random states, data position: every file's bits.
    for step in (SWITCH, STEPS):
        digests = [checkpoint_digests(folder / name, step) for name in MUONS]
        assert digests[0] == digests[1], step


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", MUONS)
def test_run_does_not_go_on_under_the_other_muon(
    runs: dict[str, Any], folder: Path, name: str
) -> None:
    assert runs[f"to {name}"] == runs["muon"][SWITCH:]
    digests = checkpoint_digests(folder / f"to {name}", STEPS)
    assert digests == checkpoint_digests(folder / "muon", STEPS)


@pytest.mark.timeout(420)
def test_checkpoint_of_other_moments_is_loaded_or_refused_without_a_reason(
    runs: dict[str, Any],
) -> None:
    error = runs["adamw"]["error"]
    assert "optimizer is 'muon' in the checkpoint and 'adamw' here" in error
    assert runs["adamw"]["step"] == 0


@pytest.mark.timeout(420)
def test_output_projections_that_are_split_otherwise_refuse_a_checkpoint(
    runs: dict[str, Any],
) -> None:
    heads = small_config("unused").model.num_attention_heads
    assert runs["adamw"]["matrices"] == {heads}
    assert runs["whole"] == {"step": SWITCH, "error": None, "matrices": {1}}
