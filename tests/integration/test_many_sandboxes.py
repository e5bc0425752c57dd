"""A thousand sandboxes leave nothing: no process, mount, control group, file or descriptor."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_leftovers import descendants, groups, inventory, scratch_files, wait_until_gone
from unprivileged import BOTH, run_as, why_not

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend import bubblewrap
from megacomposer.env.backend.cgroup import PREFIX
from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import Limits, Sandbox, SandboxBackend, SandboxSpec, Snapshot

CONCURRENCY = 8
SPEC = SandboxSpec(limits=Limits(memory_bytes=256 << 20, disk_bytes=64 << 20, inodes=2000))
# A daemon that no signal but SIGKILL ends, and a file.
LITTER = "trap '' TERM HUP; setsid sh -c 'while :; do sleep 9; done' >/dev/null 2>&1 & echo x > x"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Not below pytest's own, which every session closes to other users when it begins."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory).resolve()


def skip_unless_possible(user: str) -> None:
    if reason := why_not(user) or asyncio.run(bubblewrap.probe()):
        pytest.skip(reason)


async def use_once(backend: SandboxBackend, base: Snapshot, index: int) -> Sandbox:
    spec = SandboxSpec(base=base, limits=SPEC.limits)
    sandbox = await backend.start(spec)
    result = await sandbox.exec(["sh", "-c", f"cat given; echo {index}; {LITTER}"])
    assert result.stdout == f"given\n{index}\n".encode()
    return sandbox


async def use_many(backend: SandboxBackend, base: Snapshot, count: int) -> None:
    async def work() -> None:
        for index in iter(lambda: next(numbers, None), None):
            sandbox = await use_once(backend, base, index)
            if index % 50 == 0:
                async with await sandbox.fork() as child:
                    assert await child.read_file("x") == b"x\n"
            await sandbox.close()

    numbers = iter(range(count))
    async with asyncio.TaskGroup() as workers:
        for _ in range(CONCURRENCY):
            workers.create_task(work())


def given(tmp_path: Path) -> str:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "given").write_text("given\n")
    return str(tmp_path / "tree")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "count"), [("root", 1000), ("user", 200 if os.geteuid() == 0 else 1000)]
)
def test_nothing_is_left_of_a_thousand(user: str, count: int, tmp_path: Path) -> None:
    skip_unless_possible(user)
    tree = given(tmp_path)

    async def run() -> AuditLog:
        log = AuditLog()
        backend = await open_backend("bubblewrap", store=tmp_path / "store", record=log.record)
        base = await backend.import_tree(tree)
        await use_many(backend, base, CONCURRENCY)  # whatever is opened for good is open now
        before = inventory()
        await use_many(backend, base, count)
        after = inventory()
        # Only the groups' own parent stays, until the backend is closed.
        assert {**after, "groups": 0} == {**before, "groups": 0}
        assert all(path.name.startswith(PREFIX) for path in groups())
        await backend.close()
        return log

    def whole() -> None:
        others = descendants(os.getpid())
        log = asyncio.run(run())
        assert not groups()
        assert descendants(os.getpid()) == others
        assert not scratch_files(tmp_path / "store")
        kinds = [event["kind"] for event in log.events]
        assert kinds.count("sandbox_started") == kinds.count("sandbox_closed") >= count

    run_as(user, whole, directory=tmp_path)


@pytest.mark.parametrize("user", BOTH)
def test_nothing_is_left_when_the_host_is_killed_among_many(user: str, tmp_path: Path) -> None:
    skip_unless_possible(user)
    tree = given(tmp_path)

    async def host(ready: int) -> None:
        backend = await open_backend("bubblewrap", store=tmp_path / "store")
        base = await backend.import_tree(tree)
        kept = [await use_once(backend, base, index) for index in range(CONCURRENCY)]
        os.write(ready, own_identity().encode())
        # Killed while sandboxes start and end.
        await use_many(backend, base, 100_000)
        del kept

    async def open_again(identity: str) -> None:
        log = AuditLog()
        had_groups = bool(groups(identity))
        backend = await open_backend("bubblewrap", store=tmp_path / "store", record=log.record)
        assert not groups(identity)
        assert not scratch_files(tmp_path / "store")
        assert not (tmp_path / "store" / "hosts" / identity).exists()
        if had_groups:
            assert ("sandbox_reaped", identity) in [
                (event["kind"], event.get("process")) for event in log.events
            ]
        base = await backend.import_tree(tree)
        await use_many(backend, base, CONCURRENCY)
        await backend.close()

    def whole() -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            # The main thread does nothing: what starts the sandboxes must not be what they hang on.
            threading.Thread(target=lambda: asyncio.run(host(writing))).start()
            signal.pause()
        identity = os.read(reading, 100).decode()
        threading.Event().wait(0.5)
        inside = descendants(pid)
        assert len(inside) >= 2 * CONCURRENCY
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
        wait_until_gone(inside)
        asyncio.run(open_again(identity))
        assert not groups()

    run_as(user, whole, directory=tmp_path)
