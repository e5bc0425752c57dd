"""Training on two GPUs compared with one, on two CPU processes; and the script around it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from small_run import write_corpus

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_otherwise_than_one(tmp_path) -> None:
    corpus, results = write_corpus(tmp_path), tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCH / "two_gpu_training.py"), "--device", "cpu"]
    command += ["--data", str(corpus), "--json", str(results), "--steps", "4"]
    command += ["--seq-length", "32", "--layouts", "ep2", "--mixes", "fp32-muon"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["run"]: row for row in map(json.loads, results.read_text().splitlines())}
    assert {name.removeprefix("fp32-muon-"): row["ranks"] for name, row in rows.items()} == {
        "whole-alone": 1,
        "whole-ep2": 2,
        "again-ep2": 2,
        "reference-ep2": 2,
        "resumed-ep2-ep2": 2,
        "resumed-alone-ep2": 2,
        "resumed-ep2-alone": 1,
    }
    assert rows["fp32-muon-resumed-ep2-alone"]["steps"] == [3, 4]
    assert {row["verdict"] for row in rows.values()} == {"ok"}


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "two_gpu_training_cases", BENCH / "two_gpu_training_cases.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row_of(loss: list[float], digest: str = "a") -> dict[str, Any]:
    steps = [*range(1, len(loss) + 1)]
    values = {"loss": loss, "mtp_loss": [6.0, 5.0, 4.0], "grad_norm": [1.0, 1.0, 1.0]}
    return {"steps": steps, **values, "digest": [digest]}


@pytest.mark.parametrize(
    ("kind", "loss", "digest", "verdict"),
    [
        ("whole", [5.0, 4.00003, 3.0], "b", "ok"),
        ("whole", [5.0, 4.1, 3.0], "a", "differs"),
        ("whole", [5.0, float("nan"), 3.0], "a", "differs"),
        ("again", [5.0, 4.0, 3.0], "a", "ok"),
        ("again", [5.0, 4.0, 3.0], "b", "differs"),
        ("again", [5.0, 4.0000001, 3.0], "a", "differs"),
    ],
)
def test_run_that_differs_is_taken_for_equal(
    cases: ModuleType, kind: str, loss: list[float], digest: str, verdict: str
) -> None:
    run = cases.Run(layout="ep2", dtype="fp32", optimizer="adamw", kind=kind)
    found = {run.expected.name: row_of([5.0, 4.0, 3.0])}
    assert cases.judge(run, found)["verdict"] == "not run"
    found[run.name] = row_of(loss, digest)
    assert cases.judge(run, found)["verdict"] == verdict


def test_part_that_fails_ends_the_others_or_is_forgotten(tmp_path) -> None:
    """A python3 that finds two GPUs and nothing else."""
    stand_in = tmp_path / "python3"
    stand_in.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "asked: $*"\nexit 7\n')
    stand_in.chmod(0o755)
    ended = subprocess.run(
        ["bash", str(BENCH / "two_gpus.sh"), str(tmp_path / "out")],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    failed = [line for line in ended.stdout.splitlines() if line.startswith("failed: ")]
    for part in ("train", "links", "muon", "dispatch"):
        assert any(line.startswith(f"failed: {part}: exit status 7") for line in failed)
        assert "asked: " in (tmp_path / "out" / f"{part}.txt").read_text()
