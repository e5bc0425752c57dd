"""A run that stops, is killed, or changes its layout goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from launch_train import (
    checkpoint_digests,
    kill_group,
    start_train,
    train,
    wait_for,
    write_config,
)
from small_run import write_corpus

STEPS = 6
EVERY_STEP = ("--checkpoint.save_interval_steps", "1", "--checkpoint.keep_last", "0")
SIX_STEPS = ("--train.num_steps", str(STEPS), "--train.micro_batch_size", "2", *EVERY_STEP)


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        (line["step"], line["train/loss"], line["optim/grad_norm"])
        for line in lines
        if "train/loss" in line
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[Path, Path]:
    """A configuration, and the run directory of six steps in one go with Muon and EP=2."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    config = write_config(folder, write_corpus(folder))
    code, output = train(config, folder / "run", *SIX_STEPS, *MUON_EP2)
    assert code == 0, output
    return config, folder / "run"


def test_muon_trains_without_reporting_what_it_sent(uninterrupted) -> None:
    _, whole = uninterrupted
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "train/loss" in line]
    assert steps
    for step in steps:
        assert step["optim/muon_collectives"] > 0
        assert step["optim/muon_sent_bytes"] == steps[0]["optim/muon_sent_bytes"] > 0
        assert step["optim/muon_predicted_imbalance"] >= 1.0


MUON_EP2 = ("--optim.name", "muon", "--mesh.ep", "2")


@pytest.mark.timeout(400)
def test_a_stopped_run_continues_bit_for_bit(uninterrupted, tmp_path) -> None:
    config, whole = uninterrupted
    for stop in ("3", "0"):
        code, output = train(
            config, tmp_path, *SIX_STEPS, *MUON_EP2, "--train.stop_after_steps", stop
        )
        assert code == 0, output
    assert losses(tmp_path) == losses(whole)
    assert len(losses(whole)) == STEPS
    # Parameters, moments, router biases, random states and data position: every file's bits.
    assert checkpoint_digests(tmp_path, STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.timeout(400)
def test_a_run_killed_while_saving_continues_bit_for_bit(uninterrupted, tmp_path) -> None:
    config, whole = uninterrupted
    chance = random.Random(0)
    for step in (2, 4):
        process = start_train(config, tmp_path, *SIX_STEPS, *MUON_EP2)
        partial = tmp_path / "checkpoints" / f"step_{step:08d}.incomplete"
        done = tmp_path / "checkpoints" / f"step_{step:08d}"
        while not (partial.exists() or done.exists()):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        kill_group(process)
    code, output = train(config, tmp_path, *SIX_STEPS, *MUON_EP2)
    assert code == 0, output
    assert losses(tmp_path) == losses(whole)
    assert checkpoint_digests(tmp_path, STEPS) == checkpoint_digests(whole, STEPS)


@pytest.mark.timeout(400)
def test_a_run_continues_under_another_layout(uninterrupted, tmp_path) -> None:
    config, whole = uninterrupted
    layouts = (
        ("--mesh.ep", "2", "--train.stop_after_steps", "2"),
        ("--mesh.tp", "2", "--mesh.ep", "1", "--train.stop_after_steps", "4"),
        ("--mesh.ep", "1", "--mesh.cp", "2"),
    )
    for layout in layouts:
        code, output = train(config, tmp_path, *SIX_STEPS, "--optim.name", "muon", *layout)
        assert code == 0, output
    for (step, loss, norm), (_, expected, expected_norm) in zip(
        losses(tmp_path), losses(whole), strict=True
    ):
        assert loss == pytest.approx(expected, rel=1e-5), step
        assert norm == pytest.approx(expected_norm, rel=1e-4), step


@pytest.mark.timeout(400)
def test_sigusr1_saves_marks_and_exits_cleanly(uninterrupted, tmp_path) -> None:
    config, _ = uninterrupted
    long = ("--train.num_steps", "5000", "--checkpoint.save_interval_steps", "0")
    process = start_train(config, tmp_path, *long, ranks=1)
    wait_for(tmp_path / "metrics.jsonl", process)
    (rank,) = _children(process.pid)
    os.kill(rank, signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert (tmp_path / "preempted").exists()
    latest = (tmp_path / "checkpoints" / "latest").read_text().strip()
    last_step = losses(tmp_path)[-1][0]
    assert latest == f"step_{last_step:08d}"


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
