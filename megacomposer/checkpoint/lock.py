"""One trainer per run directory."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from .agreement import Ranks

LOCK_NAME = ".lock"


class RunLock:
    """Context manager: holds `<run_dir>/checkpoints/.lock` for as long as this run writes there.

    Collective: every rank enters, rank 0 takes the lock, and all ranks raise ValueError when
    another process has it. It is an flock, so the kernel releases it however the process ends,
    SIGKILL included; the file itself stays. A process forked without exec inherits the lock.
    """

    def __init__(self, run_dir: Path, *, group: dist.ProcessGroup | None = None) -> None:
        self.path = Path(run_dir) / "checkpoints" / LOCK_NAME
        self._ranks = Ranks(group=group)
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        self._ranks.first(self._acquire)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise ValueError(
                f"{self.path.parent.parent} is in use by another trainer ({holder}, which holds "
                f"{self.path}). Wait for it to end, stop it, or choose another run directory"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
