"""The bubblewrap backend with real sandboxes, as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from sandbox_leftovers import descendants, groups, inventory, scratch_files, wait_until_gone
from unprivileged import BOTH, run_as, why_not

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend import bubblewrap
from megacomposer.env.backend.bubblewrap import BubblewrapBackend, BubblewrapSandbox
from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    Limits,
    Mount,
    SandboxClosedError,
    SandboxError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Status,
)

MIB = 1 << 20
Use = Callable[[BubblewrapBackend, AuditLog], Awaitable[None]]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Not below pytest's own, which every session closes to other users when it begins."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory).resolve()


@pytest.fixture(params=BOTH)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Use], None]:
    """Runs a coroutine with a backend, as root and as a user, and sees that nothing stays."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    if reason := asyncio.run(bubblewrap.probe()):
        pytest.skip(reason)

    async def with_backend(use: Use) -> None:
        log = AuditLog()
        backend = await open_backend("bubblewrap", store=tmp_path / "store", record=log.record)
        assert isinstance(backend, BubblewrapBackend)
        try:
            await use(backend, log)
        finally:
            await backend.close()

    def whole(use: Use) -> None:
        asyncio.run(bubblewrap.probe())  # what it opens for good is open before
        before = inventory()
        asyncio.run(with_backend(use))
        assert inventory() == before
        assert not scratch_files(tmp_path / "store")
        assert not list((tmp_path / "store" / "hosts").glob("*"))

    return lambda use: run_as(request.param, lambda: whole(use), directory=tmp_path)


async def shell(sandbox: BubblewrapSandbox, script: str, **options: float) -> str:
    result = await sandbox.exec(["sh", "-c", script], **options)
    return (result.stdout + result.stderr).decode(errors="replace")


def test_host_stays_out_of_reach(
    play: Callable[[Use], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-in-environment")
    (tmp_path / "canary-file").write_text("canary")
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        async with await backend.start(SandboxSpec()) as sandbox:
            seen = await shell(
                sandbox,
                f"cat {tmp_path}/canary-file /etc/shadow; ls -a /root /tmp /home /run /sys; env;"
                "cat /proc/*/environ /proc/*/cmdline /proc/self/mountinfo | tr '\\0' '\\n';"
                "echo x > /usr/x; echo x > /etc/x; echo x > /x; echo x > /dev/x; echo 1 > "
                "/proc/sys/kernel/hostname; id -u; uname -n; ls /sys/class/net",
            )
            assert "canary" not in seen.replace(f"{tmp_path}/canary-file", "")
            assert str(backend.store.root) not in seen
            assert "\n1000\nsandbox\n" in seen
            assert seen.count("Read-only file system") >= 4
            status = await shell(sandbox, "cat /proc/self/status")
            for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"):
                assert line in status
            assert "NoNewPrivs:\t1" in status
            assert "Seccomp:\t2" in status
            probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
            assert "ConnectionRefused" in await shell(sandbox, f'python3 -c "{probe}"')
            for what in ("unshare -U true", "mount -t tmpfs x /tmp", "mknod x b 8 0"):
                assert (await sandbox.exec(["sh", "-c", what])).exit_code != 0
            vsock = "import socket; socket.socket(40, 1)"
            assert "PermissionError" in await shell(sandbox, f'python3 -c "{vsock}"')

    with server:
        play(use)


def test_files_survive_snapshot_fork_and_another_machine(
    play: Callable[[Use], None], tmp_path: Path
) -> None:
    source = tmp_path / "repository"
    (source / "kept").mkdir(parents=True)
    (source / "dropped").mkdir()
    for name in ("kept/a", "dropped/b", "c"):
        (source / name).write_text(name)

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        base = await backend.import_tree(str(source))
        async with await backend.start(SandboxSpec(base=base)) as parent:
            assert await parent.snapshot() == base
            await shell(
                parent,
                "rm c; rm -r dropped; mkdir dropped; echo n > dropped/new; ln -s /etc/shadow link;"
                "ln kept/a hard; printf x > program; chmod 755 program; mkfifo pipe;"
                "mkdir closed; echo s > closed/secret; chmod 000 closed; echo h > ~/h;"
                "echo t > /tmp/t",
            )
            snapshot = await parent.snapshot()
            assert snapshot.layers[0] == base.layers[0]
            assert len(snapshot.layers) == 2
            assert await parent.snapshot() == snapshot
            file = tmp_path / "store" / f"{snapshot.layers[1]}.tar"
            await backend.export_layer(snapshot.layers[1], str(file))
            check = (
                "ls -A . dropped kept; cat dropped/new hard ~/h /tmp/t; readlink link;"
                "stat -c %h kept/a; stat -c %a program closed; chmod 700 closed; cat closed/secret"
            )
            async with await parent.fork() as child:
                await child.write_file("only-in-child", b"1")
                await shell(parent, "echo 1 > only-in-parent; rm -r kept")
                seen = await shell(child, check)
                assert "only-in-child" in seen
                assert "only-in-parent" not in seen
                assert not (await parent.exec(["ls", "only-in-child"])).ok
            other = BubblewrapBackend(type(backend.store)(tmp_path / "store" / "other"))
            for digest in snapshot.layers:
                carried = tmp_path / "store" / f"{digest}.tar"
                await backend.export_layer(digest, str(carried))
                assert await other.import_layer(str(carried)) == digest
            async with await other.start(SandboxSpec(base=snapshot)) as elsewhere:
                there = await shell(elsewhere, check)
            assert there == seen.replace("only-in-child\n", "")
            assert " ".join(there.split()) == (
                ".: closed dropped hard kept link program dropped: new kept: a "
                "n kept/ah t /etc/shadow 2 755 0 s"
            )
            await other.close()
        kinds = [event["kind"] for event in log.events]
        assert kinds.count("sandbox_started") == kinds.count("sandbox_closed") == 2
        assert "snapshot" in kinds

    play(use)


def test_chain_of_forks_is_squashed_before_the_kernel_refuses_it(
    play: Callable[[Use], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacomposer.env.backend.layers.SQUASH_LAYERS", 5)

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        sandbox = await backend.start(SandboxSpec())
        longest = 0
        for index in range(8):
            await shell(
                sandbox, f"echo {index} > f{index}; echo {index} > same; rm -f f{index - 2}"
            )
            child = await sandbox.fork()
            await sandbox.close()
            sandbox = child
            longest = max(longest, len(sandbox.spec.base.layers))
        assert longest == 4
        assert (await shell(sandbox, "cat * | tr -d '\\n'; ls")) == "677f6\nf7\nsame\n"
        await sandbox.close()

    play(use)


def test_bytecode_of_an_older_source_is_not_run_after_a_restore(
    play: Callable[[Use], None],
) -> None:
    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        run = ["python3", "-c", "import module; print(module.VALUE)"]
        async with await backend.start(SandboxSpec()) as sandbox:
            for value in ("1", "2"):
                await sandbox.write_file("module.py", f"VALUE = {value}".encode())
                await sandbox.restore(await sandbox.snapshot())
                # Compiled from the restored file, whose time is that of the layer.
                assert (await sandbox.exec(run)).stdout.decode().strip() == value
                await sandbox.restore(await sandbox.snapshot())
            assert (await sandbox.exec(run)).stdout == b"2\n"

    play(use)


def test_restore_goes_back_and_ends_what_runs(play: Callable[[Use], None]) -> None:
    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        others = descendants(os.getpid())
        async with await backend.start(SandboxSpec()) as sandbox:
            await sandbox.write_file("state", b"1")
            first = await sandbox.snapshot()
            await shell(sandbox, "echo 2 > state; setsid sleep 1000 >/dev/null 2>&1 &")
            running = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
            await asyncio.sleep(0.2)
            every = descendants(os.getpid())
            inside = {pid: start for pid, start in every.items() if pid not in others}
            assert inside
            with pytest.raises(SnapshotError):
                await sandbox.restore(Snapshot(layers=("0" * 64,)))
            assert await sandbox.read_file("state") == b"2\n"
            await sandbox.restore(first)
            with pytest.raises(SandboxClosedError):
                await running
            wait_until_gone(inside)
            assert await sandbox.read_file("state") == b"1"
            assert "sleep" not in await shell(sandbox, "cat /proc/[0-9]*/comm")

    play(use)


def test_quotas_stop_a_task_and_not_the_host(play: Callable[[Use], None]) -> None:
    limits = Limits(memory_bytes=256 * MIB, processes=40, disk_bytes=16 * MIB, inodes=500, cpus=0.5)

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        async with await backend.start(SandboxSpec(limits=limits)) as sandbox:
            fill = "head -c 40000000 /dev/zero > big; wc -c < big; rm big; head -c 40000000 "
            seen = await shell(sandbox, fill + "/dev/zero > /dev/shm/big; rm -f /dev/shm/big")
            assert seen.count("No space left") == 2
            assert 12 * MIB < int(seen.split()[0]) <= 16 * MIB
            many = "for i in $(seq 2000); do true > n$i || break; done; ls | wc -l; rm -f n*"
            seen = await shell(sandbox, many)
            assert "No space left" in seen
            assert 400 < int(seen.split()[0]) < 520
            stats = await sandbox.stats()
            assert stats.disk_bytes is not None
            assert stats.disk_bytes < MIB
            assert stats.processes is not None
            sparse = await sandbox.exec(["truncate", "-s", "1G", "sparse"])
            assert not sparse.ok
            bomb = "sh -c 'for i in $(seq 100); do sleep 100 & done'; sleep 100"
            seen = await shell(sandbox, bomb, timeout_s=1.0)
            assert "Cannot fork" in seen or "Resource temporarily" in seen
            eater = "x = []\nwhile True: x.append(bytearray(1 << 20))"
            result = await sandbox.exec(["python3", "-c", eater])
            if stats.enforced["memory_bytes"] == "cgroup":
                assert result.status is Status.MEMORY_LIMIT
                assert result.exit_code == 137
                assert {"field": "memory_bytes"}.items() <= log.events[-1].items()
            else:
                assert b"MemoryError" in result.stderr
            assert (await sandbox.exec(["true"])).ok
        started = next(event for event in log.events if event["kind"] == "sandbox_started")
        assert started["enforced"] == stats.enforced
        if stats.enforced["memory_bytes"] == "rlimit":
            assert "each process" in started["notes"]

    play(use)


def test_quota_that_nothing_enforces_is_refused_when_asked_for(tmp_path: Path) -> None:
    if reason := why_not("user") or asyncio.run(bubblewrap.probe()):
        pytest.skip(reason)

    async def refuse() -> None:
        backend = await open_backend("bubblewrap", store=tmp_path / "s", strict_limits=True)
        assert isinstance(backend, BubblewrapBackend)
        if "none" not in backend.enforced.values():
            pytest.skip("this user has control groups")
        with pytest.raises(BackendUnavailableError, match="strict_limits=False"):
            await backend.start(SandboxSpec())

    run_as("user", lambda: asyncio.run(refuse()), directory=tmp_path)


def test_sparse_files_do_not_grow_in_a_snapshot(play: Callable[[Use], None]) -> None:
    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        spec = SandboxSpec(limits=Limits(disk_bytes=16 * MIB))
        async with await backend.start(spec) as sandbox:
            await shell(sandbox, "for i in 1 2 3; do truncate -s 10M s$i; done")
            with pytest.raises(SnapshotError, match="larger than the quota"):
                await sandbox.snapshot()
            assert (await sandbox.exec(["rm", "s1", "s2", "s3"])).ok

    play(use)


def test_mounts_are_read_only_and_socket_is_reached(
    play: Callable[[Use], None], tmp_path: Path
) -> None:
    source = tmp_path / "dependency"
    source.mkdir()
    (source / "file").write_text("from the host")
    place = tmp_path / "proxy.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    place.chmod(0o666)
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"answer to " + connection.recv(100))

    thread = threading.Thread(target=answer, daemon=True)

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        spec = SandboxSpec(
            mounts=(Mount(source=str(source), target="/opt/dependency"),),
            egress_socket=str(place),
            env={"GREETING": "hello"},
        )
        async with await backend.start(spec) as sandbox:
            seen = await shell(
                sandbox, "cat /opt/dependency/file; echo x > /opt/dependency/file; echo $GREETING"
            )
            assert seen.startswith("from the host")
            assert "Read-only file system" in seen
            assert "hello" in seen
            connect = (
                "import socket; s = socket.create_connection(('127.0.0.1', 3128));"
                "s.sendall(b'request'); print(s.recv(100).decode())"
            )
            assert "answer to request" in await shell(sandbox, f'python3 -c "{connect}"')
            thread.join(10)  # its connection is closed then
            bad = Mount(source=str(source), target="/workspace")
            with pytest.raises(ValueError, match="the sandbox's own"):
                await backend.start(dataclasses.replace(spec, mounts=(bad,)))
            bad = Mount(source=str(tmp_path / "missing"), target="/opt/x")
            with pytest.raises(ValueError, match="not on this machine"):
                await backend.start(dataclasses.replace(spec, mounts=(bad,)))

    thread.start()
    with listener:
        play(use)


def test_rootfs_replaces_the_system(play: Callable[[Use], None], tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/marker").write_text("of the rootfs")
    (rootfs / "usr").symlink_to("opt/usr")
    (rootfs / "opt").mkdir()

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        async with await backend.start(SandboxSpec(rootfs=str(rootfs))) as sandbox:
            assert await sandbox.read_file("/etc/marker") == b"of the rootfs"
            await sandbox.write_file("/workspace/x", b"1")
            assert await sandbox.read_file("x") == b"1"

    play(use)


def test_failed_start_says_why_and_leaves_nothing(
    play: Callable[[Use], None], tmp_path: Path
) -> None:
    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        target = "/usr/no-such-directory"  # /usr is read-only: bwrap cannot make it
        spec = SandboxSpec(mounts=(Mount(source=str(tmp_path), target=target),))
        with pytest.raises(SandboxError, match="no-such-directory"):
            await backend.start(spec)
        with pytest.raises(SnapshotError):
            await backend.start(SandboxSpec(base=Snapshot(layers=("f" * 64,))))
        with pytest.raises(SnapshotError, match="memory image"):
            await backend.start(SandboxSpec(base=Snapshot(layers=(), memory="f" * 64)))
        assert not log.events
        for delay_s in (0.0, 0.002, 0.004, 0.008, 0.016, 0.032):
            starting = asyncio.create_task(backend.start(SandboxSpec()))
            await asyncio.sleep(delay_s)
            starting.cancel()
            (result,) = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(result, BubblewrapSandbox):  # It was faster.
                await result.close()
            else:
                assert isinstance(result, asyncio.CancelledError)

    play(use)


def test_everything_ends_with_a_killed_host_process(
    play: Callable[[Use], None], tmp_path: Path
) -> None:
    async def host(ready: int) -> None:
        backend = await open_backend("bubblewrap", store=tmp_path / "store")
        sandboxes = [await backend.start(SandboxSpec()) for _ in range(3)]
        for sandbox in sandboxes:
            await sandbox.exec(
                ["sh", "-c", "trap '' TERM HUP; setsid sleep 1000 >/dev/null 2>&1 &"]
            )
        os.write(ready, own_identity().encode())
        await asyncio.gather(*(sandbox.exec(["sleep", "1000"]) for sandbox in sandboxes))

    async def use(backend: BubblewrapBackend, log: AuditLog) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            asyncio._set_running_loop(None)
            threading.Thread(target=lambda: asyncio.run(host(writing))).start()
            signal.pause()
        identity = os.read(reading, 100).decode()
        os.close(reading)
        os.close(writing)
        inside = descendants(pid)
        assert len(inside) >= 3 * 4
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until_gone(inside)
        has_groups = bool(groups(identity))
        assert has_groups == (backend.enforced["processes"] == "cgroup")
        events = AuditLog()
        again = BubblewrapBackend(backend.store, record=events.record)
        assert not groups(identity)
        if has_groups:
            assert identity in [event["process"] for event in events.events]
        await again.close()

    play(use)
