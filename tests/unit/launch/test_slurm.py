"""The batch script as submit.py renders it, run with stand-ins for SLURM's own commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megacomposer.recipes.pretrain import RECIPES

ROOT = Path(__file__).resolve().parents[3]
_RECIPE = next(iter(RECIPES))
_JOB_ID = str(os.getpid())  # the job's port follows from it

_COMMANDS = {
    # Like the real one: runs the task, and passes SIGUSR1 on to the task but not to its children.
    "srun": """
        echo "$@" >>"$CLUSTER_LOG/srun"
        while [[ "$1" == --* ]]; do shift; done
        "$@" &
        task=$!
        again=1
        trap 'again=1; kill -USR1 $task' USR1
        while ((again)); do again=0; wait $task; status=$?; done
        exit $status
    """,
    "scontrol": """
        if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >>"$CLUSTER_LOG/scontrol"; fi
    """,
    "sbatch": """
        echo "$@" >>"$CLUSTER_LOG/sbatch"
    """,
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose commands are on PATH and which gets a log named after each command called."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, body in _COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    (folder / "log").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER_LOG", str(folder / "log"))
    return folder / "log"


def submit(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/slurm/submit.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def job(launch, cluster: Path):
    """Starts the submitted batch script as SLURM would, with the trainer in a given mode."""

    def start(mode: str) -> subprocess.Popen[str]:
        options = ("--gpus-per-node", "0", "--time", "10")
        result = submit(*options, _RECIPE, "--run_dir", str(launch.folder))
        assert result.returncode == 0, result.stderr
        script = (cluster / "sbatch").read_text().strip()
        assert script == str(launch.folder / "pretrain.sbatch")
        return launch.start(
            *("bash", script),
            mode=mode,
            SLURM_JOB_ID=_JOB_ID,
            SLURM_JOB_NODELIST="localhost",
            SLURM_JOB_NUM_NODES="1",
            SLURM_NODEID="0",
        )

    return start


def test_usr1_saves_and_requeues_once(job, launch, cluster: Path) -> None:
    process = job("train")
    launch.wait_for("ready.0")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (launch.folder / "checkpoint.0").exists()
    assert (cluster / "scontrol").read_text() == f"requeue {_JOB_ID}\n"
    assert not (launch.folder / "preempted").exists()


def test_finished_job_is_not_requeued_even_by_a_marker_that_an_earlier_run_left(
    job, launch, cluster: Path
) -> None:
    (launch.folder / "preempted").touch()
    process = job("finish")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (launch.folder / "ready.0").exists()
    assert not (cluster / "scontrol").exists()


def test_failed_job_fails_and_is_not_requeued(job, cluster: Path) -> None:
    process = job("fail")
    process.communicate()
    assert process.returncode == 1
    assert not (cluster / "scontrol").exists()


def test_dry_run_prints_a_script_that_bash_accepts_and_writes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run"
    result = submit(
        *("--nodes", "4", "--gpus-per-node", "8", "--time", "24:00:00", "--partition", "batch"),
        *("--account", "me", "--directive", "qos=high", "--container-image", "img.sqsh"),
        *("--dry-run", _RECIPE, "--run_dir", str(run_dir)),
    )
    assert result.returncode == 0, result.stderr
    assert not run_dir.exists()
    lines = result.stdout.splitlines()
    for directive in (
        "nodes=4",
        "gpus-per-node=8",
        "time=24:00:00",
        "partition=batch",
        "account=me",
        "qos=high",
        "signal=B:USR1@300",
        "requeue",
    ):
        assert f"#SBATCH --{directive}" in lines
    assert "export NPROC_PER_NODE=8" in lines
    assert "--container-image=img.sqsh" in result.stdout
    assert f"multinode.sh {_RECIPE} --run_dir '{run_dir}'" in result.stdout
    assert "@@" not in result.stdout
    # SLURM stops reading directives at the first line that is neither a comment nor blank.
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    check = subprocess.run(["bash", "-n"], input=result.stdout, text=True, capture_output=True)
    assert check.returncode == 0, check.stderr


def test_wrong_override_is_refused_before_the_job_waits_in_a_queue(cluster: Path) -> None:
    result = submit("--time", "10", _RECIPE, "--no_such.field", "1")
    assert result.returncode == 2
    assert "no_such" in result.stderr
    assert not (cluster / "sbatch").exists()
