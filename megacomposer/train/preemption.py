"""SIGUSR1 means: finish the step, save, leave. Any rank's signal stops all of them together."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import torch

PREEMPTED_MARKER = "preempted"
"""File in the run directory that tells the batch script to requeue the job."""


class PreemptionFlag:
    """Set by SIGUSR1 on this rank; `agreed` is the decision of all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._received = False
        self._device = device
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def agreed(self) -> bool:
        """True when any rank got the signal. Collective: call it once a step on every rank."""
        flag = torch.tensor(float(self._received), device=self._device)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())


def mark_preempted(run_dir: Path) -> None:
    """Leave the marker that the batch script requeues on."""
    (run_dir / PREEMPTED_MARKER).write_text("checkpoint saved after SIGUSR1\n")
