"""Removal of what host processes leave behind when they are killed.

Processes and mounts of a sandbox end with the host process by themselves. What may stay are control
groups, and half-made files in the layer store; both carry the identity of their process. Each
process that has groups also notes them in `hosts/<identity>` of the store, since a later process
may live in another group, far from them.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from megacomposer.env.audit import Record
from megacomposer.env.backend.cgroup import PREFIX, GroupRoots, kill_group, remove_group
from megacomposer.env.backend.layers import remove_tree
from megacomposer.env.backend.process_identity import is_dead, own_identity

_GROUP_TIMEOUT_S = 10.0


class HostState:
    """What this host process has made, as a later one can find it."""

    def __init__(self, store: Path, groups: GroupRoots, record: Record) -> None:
        """Removes the leftovers of dead processes first."""
        reap(store, groups, record)
        self._own_groups = tuple(root / (PREFIX + own_identity()) for root in groups.directories)
        self._note = store / "hosts" / own_identity()
        self._noted = False

    def note_groups(self) -> None:
        """To be called before the first group is made."""
        if not self._noted:
            self._note.parent.mkdir(exist_ok=True)
            beside = self._note.with_name(f".{self._note.name}.{id(self)}")
            beside.write_text("".join(f"{group}\n" for group in self._own_groups))
            beside.rename(self._note)
            self._noted = True

    def close(self) -> None:
        """Forget the groups, unless another backend of this process still has sandboxes."""
        if all(not group.exists() or remove_group(group) for group in self._own_groups):
            self._note.unlink(missing_ok=True)
            self._noted = False


def reap(store: Path, groups: GroupRoots, record: Record) -> None:
    """Remove control groups and files of dead processes; one event for each process.

    Safe beside other processes that do the same.
    """
    found: dict[str, list[Path]] = {}
    for root in groups.directories:
        # The dead process may have lived in a group beside ours, as services and jobs do.
        for group in (*root.glob(f"{PREFIX}*"), *root.parent.glob(f"*/{PREFIX}*")):
            if os.access(group.parent, os.W_OK):
                found.setdefault(group.name.removeprefix(PREFIX), []).append(group)
    for note in (store / "hosts").glob("*"):
        if is_dead(note.name):
            with contextlib.suppress(FileNotFoundError):
                paths = [Path(line) for line in note.read_text().splitlines()]
                found.setdefault(note.name, []).extend(paths)
    for parent in (store, *store.glob("layers"), *store.glob("unpacked*"), store / "hosts"):
        for scratch in parent.glob(".*-*.*"):
            found.setdefault(scratch.name.split(".")[1], []).append(scratch)
    for identity, paths in found.items():
        if is_dead(identity):
            gone = [path for path in dict.fromkeys(paths) if _remove(path)]
            (store / "hosts" / identity).unlink(missing_ok=True)
            if gone:
                record("sandbox_reaped", process=identity, removed=[str(path) for path in gone])


def _remove(path: Path) -> bool:
    """Whether there was something; a group that does not empty is left for the next time."""
    if not os.path.lexists(path):
        return False
    if not path.name.startswith(PREFIX):
        with contextlib.suppress(FileNotFoundError):  # Another reaper was faster.
            if path.is_dir():
                remove_tree(path)
            else:
                path.unlink()
        return True
    deadline_s = time.monotonic() + _GROUP_TIMEOUT_S
    while not remove_group(path) and time.monotonic() < deadline_s:
        for child in path.glob("*/cgroup.procs"):
            if not remove_group(child.parent):
                kill_group(child.parent)
        time.sleep(0.002)
    return True
