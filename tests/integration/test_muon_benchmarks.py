"""The benchmark of an optimizer step, and the prediction that is calibrated on it, run on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output_of(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench" / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_measured_step_is_not_what_the_prediction_reads(tmp_path) -> None:
    measured = tmp_path / "step.json"
    model = ("--device", "cpu", "--preset", "tiny", "--layers", "1")
    output_of("muon_step.py", *model, "--optimizers", "ours", "adamw", "--json", str(measured))
    record = json.loads(measured.read_text())
    assert set(record["steps"]) == {"ours", "adamw"}
    passes = record["passes"]
    assert {"update_momentum", "pack", "apply_update", "adamw of the others"} <= set(passes)
    assert all(entry["ms"] > 0 for entry in passes.values())
    line = output_of("muon_scale.py", "--calibration", str(measured), "--check")
    assert f"measured {record['step_ms']:.2f} ms" in line
