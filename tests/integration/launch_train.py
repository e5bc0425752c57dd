"""Run scripts/train.py under torchrun, as a user does, on a small corpus and model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from small_run import small_config

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, corpus: Path) -> Path:
    """The small run's configuration as a file for `--config`."""
    path = folder / "config.json"
    small_config(str(corpus), str(folder / "run")).save(path)
    return path


def start_train(
    config: Path, run_dir: Path, *overrides: str, ranks: int = 2
) -> subprocess.Popen[str]:
    """torchrun with `ranks` gloo processes in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(ROOT / "scripts" / "train.py")]
    command += ["--config", str(config), "--run_dir", str(run_dir), *overrides]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def train(config: Path, run_dir: Path, *overrides: str, ranks: int = 2) -> tuple[int, str]:
    """Run to the end; exit code and output."""
    process = start_train(config, run_dir, *overrides, ranks=ranks)
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        kill_group(process)
        raise
    return process.returncode, output


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL torchrun and its ranks, as a power cut would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(path: Path, process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    """Until `path` exists; fails when the process ends first."""
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"{path} did not appear in {timeout_s} s"
        time.sleep(0.005)


def checkpoint_digests(run_dir: Path, step: int) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, as its manifest (verified on load) has them."""
    path = run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json"
    return {name: entry["sha256"] for name, entry in json.loads(path.read_text())["files"].items()}
