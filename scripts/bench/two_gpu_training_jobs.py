"""Starts the processes of two_gpu_training_runs.py and outlives their failures. No torch here."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).parent / "two_gpu_training_runs.py"
_GRACE_S = 5.0
"""How long a rank may go on, and say more, after the other one failed."""
_TAIL_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jobs:
    """Where and for how long named runs are performed."""

    folder: Path
    """Of rows, logs and run directories."""
    device: str
    """`cuda` or `cpu`."""
    options: Sequence[str]
    """More arguments of the script, names aside."""
    deadline_s: float
    """By `time.monotonic`: nothing starts or goes on after it."""

    def rows(self) -> dict[str, dict[str, Any]]:
        """What has been run so far, by name."""
        lines = [line for p in self.folder.glob("*.jsonl") for line in p.read_text().splitlines()]
        return {row["run"]: row for row in map(json.loads, lines)}

    def perform(self, names: Sequence[str], devices: str) -> None:
        """The named runs, with a rank for each of the devices, such as `0,1`; with a run that fails
        the processes end, and new ones go on with the next."""
        left = list(names)
        while left and time.monotonic() < self.deadline_s:
            log = self.folder / f"{left[0]}.log"
            self._run(left, devices, log)
            done = self.rows()
            left = [name for name in left if name not in done]
            if left:
                tail = "\n".join(log.read_text().splitlines()[-_TAIL_LINES:])
                print(f"{left.pop(0)} failed or ran out of time:\n{tail}", flush=True)

    def _run(self, names: list[str], devices: str, log: Path) -> None:
        ranks = len(devices.split(","))
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": devices if self.device == "cuda" else "",
            "OMP_NUM_THREADS": "1",
        }
        port = _free_port()
        # One rank alone needs no address; two such jobs at a time might take the same.
        places = [_place(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{}]
        command = [sys.executable, str(_SCRIPT), "--device", self.device, *self.options]
        command += ["--json", str(log.with_suffix(".jsonl")), "--folder", str(self.folder), *names]
        with log.open("w") as output:
            processes = [
                subprocess.Popen(
                    command,
                    env=environment | place,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for place in places
            ]
            self._wait(processes)

    def _wait(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Until all have ended, by themselves or because one failed or it is too late."""
        end_s = self.deadline_s
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                end_s = min(end_s, time.monotonic() + _GRACE_S)
            if time.monotonic() > end_s:
                for process in processes:
                    process.kill()
            time.sleep(0.05)


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
