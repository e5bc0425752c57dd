"""Control groups, version 1, version 2, or both at once: quotas of memory, processes and CPU.

Each sandbox has one group, below one that is named after the host process, so that the groups of a
host process that died can be told (see `reaper`). Where version 2 is mounted without the
controllers ("hybrid"), it is still what freezes and kills, because it does so at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.sandbox import Limits, SandboxError

PREFIX = "megacomposer-"
"""Of the group of a host process; its identity follows."""
CONTROLLERS = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
_REMOVAL_TIMEOUT_S = 20.0
_FREEZE_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRoots:
    """Where this process may make groups."""

    version1: Mapping[str, Path]
    """Controller (also "freezer") -> directory."""
    version2: Path | None
    version2_controls: bool
    """Whether `version2` limits memory, processes and CPU, or only freezes and kills."""

    @property
    def controllers(self) -> tuple[str, ...]:
        """Those of CONTROLLERS that can be used."""
        if self.version2_controls:
            return CONTROLLERS
        return tuple(name for name in CONTROLLERS if name in self.version1)

    @property
    def directories(self) -> tuple[Path, ...]:
        """All roots; one is enough of a directory that several controllers share."""
        found = [self.version2] if self.version2 else []
        return tuple(dict.fromkeys([*found, *self.version1.values()]))


def find_roots() -> GroupRoots:
    """What this process may use; empty where it may make no groups at all."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    version1: dict[str, Path] = {}
    version2: Path | None = None
    controls = False
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_unescaped(text) for text in before.split()[3:5])
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup":
            for name in {*CONTROLLERS, "freezer"} & set(options.split(",")):
                directory = _below(point, root, own.get(name, "/"))
                if directory and _may_make_groups(directory):
                    version1.setdefault(name, directory)
        elif kind == "cgroup2" and version2 is None:
            directory = _below(point, root, own.get("", "/"))
            if directory:
                version2, controls = _find_version2(directory, Path(point))
    if controls:
        version1 = {}
    elif version2 is not None:
        version1.pop("freezer", None)
    return GroupRoots(version1=version1, version2=version2, version2_controls=controls)


def _below(point: str, root: str, path: str) -> Path | None:
    """The directory of group `path` in a mount at `point` that shows the groups below `root`."""
    relative = os.path.relpath(path, root)
    return None if relative.startswith("..") else Path(os.path.normpath(Path(point) / relative))


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _may_make_groups(directory: Path) -> bool:
    return os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK)


def _find_version2(own: Path, point: Path) -> tuple[Path | None, bool]:
    """The nearest group that may have children with the controllers, else one to kill with.

    Only a group without processes of its own can, other than the very first; so it is often the
    parent of ours, which systemd's `Delegate=yes` makes writable.
    """
    for directory in (own, *own.parents):
        if not _may_make_groups(directory):
            break
        with contextlib.suppress(OSError):  # EBUSY: it has processes. Its parent may do.
            _enable(directory)
            return directory, True
        if directory == point:
            break
    return (own, False) if _may_make_groups(own) else (None, False)


def _enable(directory: Path) -> None:
    file = directory / "cgroup.subtree_control"
    missing = set(CONTROLLERS) - set(file.read_text().split())
    if missing:
        file.write_text(" ".join(f"+{name}" for name in sorted(missing)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """None: no controller tells."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    processes: int | None
    cpu_s: float | None


class ControlGroup:
    """The group of one sandbox. Methods block for a few milliseconds, `remove` for longer."""

    def __init__(self, roots: GroupRoots, name: str) -> None:
        """Makes nothing yet."""
        self._roots = roots
        host = PREFIX + own_identity()
        self.directories = tuple(root / host / name for root in roots.directories)
        """Every one of them must be entered."""
        self._version2 = roots.version2 / host / name if roots.version2 else None
        self._of = {name_: root / host / name for name_, root in roots.version1.items()}

    def create(self, limits: Limits) -> None:
        """Make the group with its limits. SandboxError where the kernel refuses."""
        try:
            for directory in self.directories:
                directory.parent.mkdir(exist_ok=True)
                if self._roots.version2_controls:
                    _enable(directory.parent)
                directory.mkdir()
            self._set_limits(limits)
        except OSError as error:
            self.remove()
            raise SandboxError(f"cannot make a control group: {error}") from error

    def _set_limits(self, limits: Limits) -> None:
        quota_us = max(1000, round(limits.cpus * CPU_PERIOD_US))
        if self._roots.version2_controls:
            assert self._version2 is not None
            _write(self._version2 / "memory.max", limits.memory_bytes)
            if (self._version2 / "memory.swap.max").exists():
                _write(self._version2 / "memory.swap.max", 0)
            _write(self._version2 / "pids.max", limits.processes)
            _write(self._version2 / "cpu.max", f"{quota_us} {CPU_PERIOD_US}")
            return
        if memory := self._of.get("memory"):
            _write(memory / "memory.limit_in_bytes", limits.memory_bytes)
            if (memory / "memory.memsw.limit_in_bytes").exists():
                _write(memory / "memory.memsw.limit_in_bytes", limits.memory_bytes)
        if pids := self._of.get("pids"):
            _write(pids / "pids.max", limits.processes)
        if cpu := self._of.get("cpu"):
            _write(cpu / "cpu.cfs_period_us", CPU_PERIOD_US)
            _write(cpu / "cpu.cfs_quota_us", quota_us)

    def memory_kills(self) -> int | None:
        """How many processes the kernel killed at the memory limit."""
        if self._roots.version2_controls:
            assert self._version2 is not None
            return _read_keyed(self._version2 / "memory.events").get("oom_kill")
        memory = self._of.get("memory")
        return _read_keyed(memory / "memory.oom_control").get("oom_kill") if memory else None

    def usage(self) -> Usage:
        if self._roots.version2_controls:
            group = self._version2
            assert group is not None
            return Usage(
                memory_bytes=_read_number(group / "memory.current"),
                memory_peak_bytes=_read_number(group / "memory.peak"),
                processes=_read_number(group / "pids.current"),
                cpu_s=_read_keyed(group / "cpu.stat").get("usage_usec", 0) / 1e6,
            )
        memory, pids = self._of.get("memory"), self._of.get("pids")
        cpu = self._version2 / "cpu.stat" if self._version2 else None
        return Usage(
            memory_bytes=_read_number(memory / "memory.usage_in_bytes") if memory else None,
            memory_peak_bytes=_read_number(memory / "memory.max_usage_in_bytes")
            if memory
            else None,
            processes=_read_number(pids / "pids.current") if pids else None,
            cpu_s=_read_keyed(cpu).get("usage_usec", 0) / 1e6 if cpu and cpu.exists() else None,
        )

    @property
    def can_freeze(self) -> bool:
        return self._version2 is not None or "freezer" in self._of

    def freeze(self) -> None:
        """Stop every process, and wait until all have. SandboxError after some seconds."""
        if self._version2 is not None:
            _write(self._version2 / "cgroup.freeze", 1)
            file, done = self._version2 / "cgroup.events", "frozen 1"
        else:
            _write(self._of["freezer"] / "freezer.state", "FROZEN")
            file, done = self._of["freezer"] / "freezer.state", "FROZEN"
        deadline_s = time.monotonic() + _FREEZE_TIMEOUT_S
        while done not in file.read_text().splitlines():
            if time.monotonic() > deadline_s:
                self.thaw()
                raise SandboxError(f"the processes do not stop in {_FREEZE_TIMEOUT_S:.0f} s")
            time.sleep(0.0005)

    def thaw(self) -> None:
        """Let all go on."""
        if self._version2 is not None:
            _write(self._version2 / "cgroup.freeze", 0)
        else:
            _write(self._of["freezer"] / "freezer.state", "THAWED")

    def remove(self) -> None:
        """Kill what is left inside, and remove the group. SandboxError where it does not end."""
        deadline_s = time.monotonic() + _REMOVAL_TIMEOUT_S
        left = list(self.directories)
        while left := [directory for directory in left if not remove_group(directory)]:
            if time.monotonic() > deadline_s:
                raise SandboxError(f"control group {left[0]} cannot be emptied")
            for directory in left:
                kill_group(directory)
            time.sleep(0.002)


def remove_group(directory: Path) -> bool:
    """Whether it is gone now; False while it has processes."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True


def kill_group(directory: Path) -> None:
    """SIGKILL to all of one group; they may need a moment to go."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if (directory / "cgroup.kill").exists():
            _write(directory / "cgroup.kill", 1)
            return
        state = directory / "freezer.state"
        if state.exists():  # A frozen process dies only when it may run.
            _write(state, "THAWED")
        for pid in (directory / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _write(file: Path, value: object) -> None:
    # Never created: a group that is gone must be an error.
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _read_number(file: Path) -> int | None:
    # memory.peak is younger than the rest.
    return int(file.read_text()) if file.exists() else None


def _read_keyed(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value in pairs}
