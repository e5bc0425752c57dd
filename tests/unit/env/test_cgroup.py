"""Control groups of this machine, and the leftovers of processes that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend.cgroup import (
    PREFIX,
    ControlGroup,
    GroupRoots,
    find_roots,
    remove_group,
)
from megacomposer.env.backend.process_identity import is_dead, own_identity
from megacomposer.env.backend.reaper import HostState, reap
from megacomposer.env.sandbox import Limits

NO_GROUPS = GroupRoots(version1={}, version2=None, version2_controls=False)


@pytest.fixture
def group() -> ControlGroup:
    roots = find_roots()
    if not roots.controllers:
        pytest.skip("this process may make no control groups")
    return ControlGroup(roots, f"test-{os.getpid()}-{time.monotonic_ns()}")


def remove(group: ControlGroup) -> None:
    group.remove()
    for directory in group.directories:
        remove_group(directory.parent)


def member(group: ControlGroup, *command: str) -> subprocess.Popen[bytes]:
    """A process that enters the group before it becomes `command`."""
    enter = "".join(f"echo $$ > '{path}/cgroup.procs'; " for path in group.directories)
    return subprocess.Popen(["sh", "-c", f'{enter} exec "$@"', "sh", *command])


def test_group_counts_stops_and_kills(group: ControlGroup) -> None:
    group.create(Limits(memory_bytes=64 << 20, processes=10))
    try:
        stubborn = "trap '' TERM; setsid sleep 1000 & echo; while :; do sleep 0.01; done"
        process = member(group, "sh", "-c", stubborn)
        deadline_s = time.monotonic() + 30
        while (group.usage().processes or 0) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert group.memory_kills() == 0
        if group.can_freeze:
            group.freeze()
            # A frozen process is killed all the same.
        group.remove()
        assert process.wait(30) == -signal.SIGKILL
        assert not any(path.exists() for path in group.directories)
        group.remove()  # A second time does nothing.
    finally:
        remove(group)


def test_memory_over_the_limit_is_killed_and_counted(group: ControlGroup) -> None:
    group.create(Limits(memory_bytes=64 << 20))
    try:
        process = member(group, sys.executable, "-I", "-c", "x = b'x' * (200 << 20)")
        assert process.wait(60) == -signal.SIGKILL
        assert group.memory_kills() == 1
    finally:
        remove(group)


def test_refused_limit_leaves_no_group(group: ControlGroup) -> None:
    with pytest.raises(RuntimeError, match="control group"):
        group.create(Limits(processes=-5))
    assert not any(path.exists() for path in group.directories)
    remove(group)


def test_version_two_files_get_the_values_that_the_kernel_documents(tmp_path: Path) -> None:
    roots = GroupRoots(version1={}, version2=tmp_path, version2_controls=True)
    group = ControlGroup(roots, "sandbox")
    assert roots.controllers == ("memory", "pids", "cpu")
    directory = group.directories[0]
    directory.mkdir(parents=True)
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (directory / name).write_text("")
    group._set_limits(Limits(memory_bytes=1 << 20, processes=7, cpus=1.5))
    written = {path.name: path.read_text() for path in directory.iterdir()}
    assert written == {
        "memory.max": "1048576",
        "memory.swap.max": "0",
        "pids.max": "7",
        "cpu.max": "150000 100000",
    }
    (directory / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 3\n")
    assert group.memory_kills() == 3


def test_identity_of_a_process_ends_with_it() -> None:
    assert not is_dead(own_identity())
    script = "import megacomposer.env.backend.process_identity as p; print(p.own_identity())"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    dead = child.stdout.strip()
    assert is_dead(dead)
    # One of another machine may well be alive, and anything else is not ours to judge.
    assert not is_dead(dead[:-8] + "00000000")
    assert not is_dead("lost+found")


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    pid, ticks, machine = own_identity().split("-")
    dead = f"{pid}-{int(ticks) + 1}-{machine}"
    for identity in (dead, own_identity()):
        (tmp_path / "layers" / f".{identity}.abc").mkdir(parents=True)
        (tmp_path / "layers" / f".{identity}.abc" / "layer").write_text("half")
        (tmp_path / "unpacked" / f".{identity}.abc" / "workspace").mkdir(parents=True)
    (tmp_path / "layers" / "kept.tar").write_text("")
    log = AuditLog()
    reap(tmp_path, NO_GROUPS, log.record)
    reap(tmp_path, NO_GROUPS, log.record)
    (event,) = log.events
    assert event["kind"] == "sandbox_reaped"
    assert event["process"] == dead
    left = sorted(path.name for path in tmp_path.glob("*/*"))
    assert left == [f".{own_identity()}.abc", f".{own_identity()}.abc", "kept.tar"]


def test_groups_are_found_by_the_note_where_a_later_process_cannot_see_them(
    tmp_path: Path, group: ControlGroup
) -> None:
    roots = find_roots()
    pid, ticks, machine = own_identity().split("-")
    dead = f"{pid}-{int(ticks) + 1}-{machine}"
    left = [root / f"{PREFIX}{dead}" / "sandbox" for root in roots.directories]
    for path in left:
        path.mkdir(parents=True)
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / dead).write_text("".join(f"{path.parent}\n" for path in left))
    log = AuditLog()
    reap(tmp_path, NO_GROUPS, log.record)
    assert not any(path.parent.exists() for path in left)
    assert not (tmp_path / "hosts" / dead).exists()
    assert log.events[0]["removed"] == [str(path.parent) for path in left]


def test_note_goes_with_the_last_group(tmp_path: Path, group: ControlGroup) -> None:
    roots = find_roots()
    state = HostState(tmp_path, roots, AuditLog().record)
    state.note_groups()
    group.create(Limits())
    state.close()
    assert (tmp_path / "hosts" / own_identity()).exists()
    group.remove()
    state.close()
    assert not (tmp_path / "hosts" / own_identity()).exists()
