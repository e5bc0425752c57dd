"""The main job from one command, on the machine's own standard library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAMP = Path(sys.prefix) / "megacomposer.stamp"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not STAMP.exists(), reason="needs the environment of scripts/setup_env.sh")
def test_quickstart_beats_the_byte_bigram_on_heldout_files(tmp_path) -> None:
    result = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["event"] == "quickstart"
    assert 5.0 < summary["heldout_loss_start"] < 6.0
    assert summary["heldout_loss"] < summary["heldout_bigram"]
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["tokens_per_s"] > 0
    run_dir = Path(summary["run_dir"])
    assert (run_dir / "report" / "loss.png").exists()
    assert "--- completion ---" in result.stdout
    steps = [
        line["step"]
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if "train/loss" in line
    ]
    assert steps == sorted(set(steps)), "a step is there twice: the resume repeated it"
    assert steps[-1] == summary["steps"]
    log = (run_dir / "logs" / "0.log").read_text()
    assert "start: fresh weights" in log
    assert "start: from" in log
