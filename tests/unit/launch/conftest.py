"""A stand-in for the trainer, which the real launchers start under the real torchrun."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Keeps the trainer's side of the contract: on SIGUSR1 save, leave the marker, exit with 0.
_TRAINER = """
import os, pathlib, signal, sys, time
mode, folder = os.environ["TRAINER_MODE"], pathlib.Path(os.environ["TRAINER_DIR"])
rank = os.environ["RANK"]
signals = []
if mode != "starting":
    signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
(folder / f"ready.{rank}").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']}")
if mode == "fail":
    sys.exit(3)
while mode in ("train", "starting") and not signals and not (folder / "finish").exists():
    time.sleep(0.02)
if signals:
    (folder / f"checkpoint.{rank}").touch()
    time.sleep(0.5)  # saving outlasts a second signal
    if rank == "0":
        (folder / "preempted").touch()
"""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Starts launchers whose training processes are the stand-in above."""

    folder: Path
    """Where the stand-in keeps its files: ready.RANK, checkpoint.RANK, preempted."""
    processes: list[subprocess.Popen[str]]

    def start(self, *command: str, mode: str = "train", **variables: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "ENTRY": str(self.folder / "trainer.py"),
            "TRAINER_MODE": mode,
            "TRAINER_DIR": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **variables,
        }
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def wait_for(self, name: str) -> str:
        """Until the stand-in has written file `name`; its text."""
        deadline = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert all(p.poll() is None for p in self.processes), self.processes[-1].stdout.read()
            assert time.monotonic() < deadline, f"no {name} after 60 s"
            time.sleep(0.02)
        return (self.folder / name).read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    (tmp_path / "trainer.py").write_text(_TRAINER)
    launch = Launch(tmp_path, [])
    yield launch
    (tmp_path / "finish").touch()  # lets workers go that a failed test left waiting
    for process in launch.processes:
        process.terminate()
        process.wait(timeout=40)
        process.stdout.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
