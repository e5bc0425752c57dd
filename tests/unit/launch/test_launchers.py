"""The launch scripts, with the real torchrun on CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_TORCHRUN_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "JOB_ID", "ENTRY")


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in _TORCHRUN_VARIABLES}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
    )


def test_local_launcher_starts_the_script_by_path_and_keeps_arguments_with_spaces_whole() -> None:
    result = shell("bash scripts/launch/local.sh --dry-run 2 tiny --data.path 'a b'")
    assert result.stdout == (
        "torchrun --standalone --nproc-per-node 2 scripts/train.py tiny --data.path a\\ b\n"
    )


@pytest.mark.parametrize("arguments", ["", "two tiny", "2", "0 tiny"])
def test_local_launcher_shows_its_usage_instead_of_starting_nonsense(arguments: str) -> None:
    result = shell(f"bash scripts/launch/local.sh {arguments}")
    assert result.returncode == 2
    assert "local.sh [--dry-run] NPROC RECIPE" in result.stderr


def test_multinode_launcher_makes_exactly_node_0_the_rendezvous_host() -> None:
    command = "NNODES=2 MASTER_ADDR=n0 bash scripts/launch/multinode.sh --dry-run tiny"
    first, second = shell(f"NODE_RANK=0 {command}").stdout, shell(f"NODE_RANK=1 {command}").stdout
    assert "is_host=1" in first
    assert first.replace("is_host=1", "is_host=0") == second
    assert "--rdzv-backend c10d --rdzv-endpoint n0:29500" in first


def test_multinode_launcher_names_the_variables_that_are_missing() -> None:
    result = shell("bash scripts/launch/multinode.sh tiny", NNODES="2", NODE_RANK="0")
    assert result.returncode == 2
    assert "MASTER_ADDR" in result.stderr


def test_environment_of_the_site_does_not_override_what_the_user_set() -> None:
    command = '. scripts/launch/env.sh && echo "$NCCL_DEBUG $OMP_NUM_THREADS $PYTHONSAFEPATH"'
    assert shell(command, NCCL_DEBUG="INFO", OMP_NUM_THREADS="4").stdout == "INFO 4 1\n"


def test_usr1_to_the_launcher_saves_on_every_rank_even_when_sent_twice(launch) -> None:
    process = launch.start("bash", "scripts/launch/local.sh", "2", "tiny", mode="train")
    for rank in (0, 1):
        launch.wait_for(f"ready.{rank}")
    process.send_signal(signal.SIGUSR1)
    launch.wait_for("checkpoint.0")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (launch.folder / "checkpoint.1").exists()


def test_usr1_before_the_trainer_has_its_handler_does_not_kill_the_run(launch) -> None:
    process = launch.start("bash", "scripts/launch/local.sh", "1", "tiny", mode="starting")
    launch.wait_for("ready.0")
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)  # the launcher has passed it on; without a handler nothing shows that
    (launch.folder / "finish").touch()
    output, _ = process.communicate()
    assert process.returncode == 0, output


def test_terminating_the_launcher_leaves_no_training_process(launch) -> None:
    process = launch.start("bash", "scripts/launch/local.sh", "1", "tiny", mode="train")
    worker = int(launch.wait_for("ready.0").split()[0])
    process.terminate()
    process.communicate()
    assert process.returncode != 0
    assert not Path(f"/proc/{worker}").exists()


def test_failure_of_a_rank_is_the_exit_code_of_the_launcher(launch) -> None:
    process = launch.start("bash", "scripts/launch/local.sh", "1", "tiny", mode="fail")
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "exitcode  : 3" in output


def test_two_nodes_form_one_job(launch, free_port: int) -> None:
    nodes = [
        launch.start(
            *("bash", "scripts/launch/multinode.sh", "tiny"),
            mode="finish",
            NNODES="2",
            NODE_RANK=rank,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port),
            NPROC_PER_NODE="1",
        )
        for rank in ("1", "0")
    ]
    for node in nodes:
        output, _ = node.communicate()
        assert node.returncode == 0, output
    assert [launch.wait_for(f"ready.{rank}").split()[1] for rank in (0, 1)] == ["2", "2"]
