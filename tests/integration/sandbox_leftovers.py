"""What sandboxes could leave on the host: processes, mounts, control groups, files, descriptors."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megacomposer.env.backend.cgroup import PREFIX, find_roots
from megacomposer.env.backend.process_identity import own_identity


def descendants(pid: int) -> dict[int, bytes]:
    """Processes below `pid`, with what tells them from later ones of the same number."""
    parents: dict[int, int] = {}
    starts: dict[int, bytes] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path("/proc", name, "stat").read_bytes().rsplit(b") ", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(name)], starts[int(name)] = int(fields[1]), fields[19]
    found: dict[int, bytes] = {}
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - set(found)
        found |= {child: starts[child] for child in frontier}
    return found


def wait_until_gone(processes: dict[int, bytes], timeout_s: float = 30.0) -> None:
    """AssertionError names those that still run."""
    deadline_s = time.monotonic() + timeout_s
    while left := {pid: start for pid, start in processes.items() if _runs(pid, start)}:
        assert time.monotonic() < deadline_s, f"still running: {sorted(left)}"
        time.sleep(0.02)


def _runs(pid: int, start: bytes) -> bool:
    try:
        fields = Path("/proc", str(pid), "stat").read_bytes().rsplit(b") ", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[19] == start and fields[0] not in (b"Z", b"X")


def groups(identity: str | None = None) -> list[Path]:
    """Control groups of a host process (default: this one)."""
    name = PREFIX + (identity or own_identity())
    return [path for root in find_roots().directories for path in (root / name).glob("**/")]


def inventory() -> dict[str, object]:
    """What must be the same before and after, whatever else runs on the machine."""
    return {
        "children": sorted(descendants(os.getpid())),
        "mounts": Path("/proc/self/mountinfo").read_text().count("\n"),
        "groups": groups(),
        # Not that of the listing itself, which is closed again.
        "descriptors": sorted(
            int(name)
            for name in os.listdir("/proc/self/fd")
            if Path("/proc/self/fd", name).is_symlink()
        ),
    }


def scratch_files(store: Path) -> list[Path]:
    """Half-made files in a layer store."""
    return [path for path in store.glob("**/.*") if path.name != "."]
