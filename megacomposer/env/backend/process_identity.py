"""Names of host processes that a later process cannot take: `<pid>-<start time>-<machine>`."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from pathlib import Path

PATTERN = re.compile(r"(\d+)-(\d+)-([0-9a-f]{8})")
_MACHINE_ID = Path("/etc/machine-id")


def own_identity() -> str:
    """This process."""
    return f"{os.getpid()}-{_start_ticks(os.getpid())}-{_machine()}"


def is_dead(identity: str) -> bool:
    """Whether the process of this name is known to have ended.

    False for one of another machine or pid namespace, which cannot be known here.
    """
    match = PATTERN.fullmatch(identity)
    if match is None or match[3] != _machine():
        return False
    return _start_ticks(int(match[1])) != int(match[2])


def _start_ticks(pid: int) -> int | None:
    """Start time since boot in clock ticks; None if there is no such process, or it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything, closing parentheses included.
    state, *fields = status[status.rindex(b")") + 2 :].split()
    return None if state in (b"Z", b"X") else int(fields[18])


@functools.cache
def _machine() -> str:
    """The same for processes that see each other's pids, also after the machine has restarted."""
    machine = _MACHINE_ID.read_text() if _MACHINE_ID.exists() else socket.gethostname()
    name = f"{machine} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(name.encode()).hexdigest()[:8]
