"""The gVisor backend on real sandboxes: isolation, limits, and forks that keep memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megacomposer.env.backend import gvisor
from megacomposer.env.backend.gvisor import GvisorBackend
from megacomposer.env.backend.gvisor_sandbox import GvisorSandbox
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.sandbox import (
    EGRESS_PORT,
    Limits,
    Mount,
    SandboxClosedError,
    SandboxFileError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Status,
)

WHY_NOT = asyncio.run(gvisor.probe())
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

COUNTER = """
import pathlib, time
count = 0
while True:
    count += 1
    pathlib.Path("/tmp/count.new").write_text(str(count))
    pathlib.Path("/tmp/count.new").rename("/tmp/count")
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LayerStore:
    return LayerStore(tmp_path_factory.mktemp("store"))


@pytest.fixture
def run(
    store: LayerStore,
) -> Callable[[Callable[[GvisorBackend], Coroutine[Any, Any, None]]], None]:
    """Runs a test with a backend, and checks that nothing is left of it."""

    def run_test(test: Callable[[GvisorBackend], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            backend = GvisorBackend(store)
            try:
                await test(backend)
            finally:
                await backend.close()

        asyncio.run(main())
        assert own_directories() == []
        assert list(store.root.glob("memory/.*")) == []
        assert list(Path("/sys/fs/cgroup").glob(f"*/megacomposer-{os.getpid()}-*")) == []

    return run_test


def own_directories() -> list[str]:
    root = Path(tempfile.gettempdir()) / f"megacomposer-gvisor-{os.geteuid()}"
    return [n for n in os.listdir(root) if n.startswith(f"{os.getpid()}-")] if root.exists() else []


@asynccontextmanager
async def sandbox(backend: GvisorBackend, **spec: Any) -> AsyncIterator[GvisorSandbox]:
    async with await backend.start(SandboxSpec(**spec)) as started:
        yield started


async def count(box: GvisorSandbox) -> int:
    return int(await box.read_file("/tmp/count"))


def test_fork_that_forgets_interpreter_state(run: Any) -> None:
    async def test(backend: GvisorBackend) -> None:
        if not backend.forks_memory:
            pytest.skip("this runsc cannot restore for this user")
        async with sandbox(backend) as parent:
            await parent.write_file("counter.py", COUNTER.encode())
            start = "python3 counter.py >/dev/null 2>&1 & while [ ! -e /tmp/count ]; do :; done"
            assert (await parent.exec(["sh", "-c", start])).ok
            before = await count(parent)
            children = [await parent.fork() for _ in range(3)]
            for box in (parent, *children):
                first = await count(box)
                await asyncio.sleep(0.2)
                assert before <= first < await count(box), "the counter went on in every fork"
            await children[0].write_file("only-here", b"x")
            with pytest.raises(SandboxFileError, match="No such file"):
                await children[1].read_file("only-here")

    run(test)


def test_command_that_runs_during_a_snapshot_loses_output(run: Any) -> None:
    async def test(backend: GvisorBackend) -> None:
        async with sandbox(backend) as box:
            script = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done; exit 3"
            running = asyncio.create_task(box.exec(["sh", "-c", script]))
            await asyncio.sleep(0.3)
            child = await box.fork()
            result = await running
            assert (result.stdout, result.exit_code) == (b"1\n2\n3\n4\n5\n6\n7\n8\n", 3)
            assert (await child.exec(["echo", "alive"])).stdout == b"alive\n"

    run(test)


def test_snapshot_that_another_machine_or_backend_cannot_use(run: Any, tmp_path: Path) -> None:
    async def test(backend: GvisorBackend) -> None:
        (tmp_path / "repo").mkdir()
        (tmp_path / "repo/a.txt").write_text("base")
        base = await backend.import_tree(str(tmp_path / "repo"))
        async with sandbox(backend, base=base) as box:
            script = (
                "rm a.txt; echo new >b.txt; ln b.txt c.txt; ln -s /usr d; chmod 0 b.txt; sleep 60 &"
            )
            assert (await box.exec(["sh", "-c", script])).ok
            snapshot = await box.snapshot()
        files = dataclasses.replace(snapshot, memory=None)
        listing = ["sh", "-c", "cat b.txt c.txt; ls; readlink d; ps ax | grep -c '[s]leep'"]
        async with sandbox(backend, base=files) as box:
            assert (await box.exec(listing)).stdout == b"new\nnew\nb.txt\nc.txt\nd\n/usr\n0\n"
        assert snapshot.memory is not None
        elsewhere = GvisorBackend(LayerStore(tmp_path / "elsewhere"))
        for number, digest in enumerate((*snapshot.layers, snapshot.memory)):
            await backend.export_layer(digest, str(tmp_path / f"{number}.tar"))
            assert await elsewhere.import_layer(str(tmp_path / f"{number}.tar")) == digest
        async with sandbox(elsewhere, base=snapshot) as box:
            assert (await box.exec(["sh", "-c", "ps ax | grep -c '[s]leep'"])).stdout == b"1\n"
        await elsewhere.close()

    run(test)


def test_restore_to_an_unknown_or_damaged_image_kills_the_sandbox(run: Any) -> None:
    async def test(backend: GvisorBackend) -> None:
        async with sandbox(backend) as box:
            await box.write_file("a", b"1")
            snapshot = await box.snapshot()
            await box.write_file("a", b"2")
            with pytest.raises(SnapshotError, match="import it first"):
                await box.restore(Snapshot(layers=(), memory="0" * 64))
            assert await box.read_file("a") == b"2"
            await box.restore(snapshot)
            assert await box.read_file("a") == b"1"
            await box.restore(Snapshot(layers=()))
            assert (await box.exec(["ls", "-A"])).stdout == b""
        assert snapshot.memory is not None
        image = next((backend.store.root / "memory" / snapshot.memory).glob("*.img"))
        image.write_bytes(image.read_bytes()[:-1] + b"?")
        backend.images._verified.clear()
        with pytest.raises(SnapshotError, match="damaged"):
            await backend.start(SandboxSpec(base=snapshot))

    run(test)


def test_sandbox_that_sees_or_changes_the_host(run: Any, tmp_path: Path) -> None:
    async def test(backend: GvisorBackend) -> None:
        canary = tmp_path / "canary"
        canary.write_text("seen")
        tmp_path.chmod(0o755)
        mount = Mount(source=str(tmp_path), target="/opt/data")
        async with sandbox(backend, mounts=(mount,)) as box:
            assert await box.read_file("/opt/data/canary") == b"seen"
            for script in (
                "echo x >/opt/data/canary",
                "echo x >/usr/bin/env",
                f"cat {Path(__file__).resolve()}",
                "cat /etc/shadow",
                "cat /proc/1/environ | grep -q PATH",
                "mount -t tmpfs tmpfs /mnt",
            ):
                assert not (await box.exec(["sh", "-c", script])).ok, script
            assert canary.read_text() == "seen"
            environment = (await box.exec(["env"])).stdout.decode()
            assert set(os.environ) & {line.split("=")[0] for line in environment.splitlines()} <= {
                "PATH", "HOME", "USER", "LANG", "TMPDIR", "PWD", "_", "SHLVL"
            }  # fmt: skip

    run(test)


def test_network_that_is_more_than_the_egress_socket(run: Any, tmp_path: Path) -> None:
    async def test(backend: GvisorBackend) -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"from the proxy")
            writer.close()

        path = str(tmp_path / "egress.sock")
        proxy = await asyncio.start_unix_server(greet, path)
        os.chmod(path, 0o666)
        host = socket.create_server(("127.0.0.1", 0))
        connect = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 3);"
            "print(s.recv(99).decode(), end='')"
        )
        async with sandbox(backend, egress_socket=path) as box:
            reached = await box.exec(["python3", "-c", connect, str(EGRESS_PORT)])
            assert reached.stdout == b"from the proxy"
            other = await box.exec(["python3", "-c", connect, str(host.getsockname()[1])])
            assert b"refused" in other.stderr
            fork = await box.fork()
            again = await fork.exec(["python3", "-c", connect, str(EGRESS_PORT)])
            assert again.stdout == b"from the proxy"
        proxy.close()
        host.close()

    run(test)


def test_command_that_breaks_a_limit_and_goes_on(run: Any) -> None:
    async def test(backend: GvisorBackend) -> None:
        limits = Limits(memory_bytes=256 << 20, processes=40, output_bytes=100_000)
        async with sandbox(backend, limits=limits) as box:
            sleeper = "trap '' TERM; (setsid sleep 300 &) ; echo begun; sleep 300"
            result = await box.exec(["sh", "-c", sleeper], timeout_s=2.0)
            assert (result.status, result.stdout) == (Status.TIMEOUT, b"begun\n")
            result = await box.exec(["yes"])
            assert (result.status, len(result.stdout)) == (Status.OUTPUT_LIMIT, 100_000)
            survivors = await box.exec(["sh", "-c", "ps axo stat,args | grep '[s]leep'"])
            assert survivors.stdout == b""
            other, third = await box.fork(), await box.fork()
            bomb = "import subprocess as s; [s.Popen(['sleep', '99']) for _ in range(100)]"
            result = await box.exec(["python3", "-c", bomb])
            assert b"Resource temporarily unavailable" in result.stderr
            hog = "x = []\nwhile True: x.append(bytearray(1 << 20))"
            result = await other.exec(["python3", "-c", hog])
            # Newer releases of runsc refuse the memory instead, and Python gives up by itself.
            assert result.status is Status.MEMORY_LIMIT or result.exit_code == 1
            fill = "f = open('/tmp/big', 'wb')\nwhile True: f.write(bytes(1 << 20))"
            result = await third.exec(["python3", "-c", fill], timeout_s=60.0)
            assert (result.status, result.exit_code) == (Status.MEMORY_LIMIT, 137)
            with pytest.raises(SandboxClosedError, match="memory limit"):
                await third.exec(["true"])

    run(test)


def test_tools_of_coreutils_that_fail_under_gvisor(run: Any) -> None:
    async def test(backend: GvisorBackend) -> None:
        async with sandbox(backend) as box:
            await box.write_file("a", b"x")
            for command in (
                ["ls", "-la", "."],
                ["stat", "a"],
                ["cp", "-a", "a", "b"],
                ["git", "init"],
            ):
                result = await box.exec(command)
                assert result.ok, (command, result.stderr)

    run(test)


def test_killed_host_process_leaves_its_sandboxes_behind(store: LayerStore) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from megacomposer.env.backend.gvisor import GvisorBackend\n"
        "from megacomposer.env.backend.layers import LayerStore\n"
        "from megacomposer.env.sandbox import SandboxSpec\n"
        "async def main():\n"
        "    backend = GvisorBackend(LayerStore(Path(sys.argv[1])))\n"
        "    box = await backend.start(SandboxSpec())\n"
        "    await box.exec(['sh', '-c', 'sleep 300 >/dev/null 2>&1 &'])\n"
        "    print(box.id, flush=True)\n"
        "    await asyncio.sleep(300)\n"
        "asyncio.run(main())\n"
    )
    host = subprocess.Popen(
        [sys.executable, "-c", program, str(store.root)], stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    name = host.stdout.readline().strip()
    assert name.startswith("gvisor-")
    assert processes_of(name)
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    deadline_s = time.monotonic() + 30
    while processes_of(name) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert processes_of(name) == []

    async def next_start() -> None:
        backend = GvisorBackend(store)
        async with await backend.start(SandboxSpec()):
            pass
        await backend.close()

    asyncio.run(next_start())
    root = Path(tempfile.gettempdir()) / f"megacomposer-gvisor-{os.geteuid()}"
    assert [entry for entry in os.listdir(root) if entry.endswith(name)] == []


def processes_of(name: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in text:
            found.append(text)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_unprivileged_user_cannot_use_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, json, sys\n"
        "from pathlib import Path\n"
        "from megacomposer.env.backend.gvisor import GvisorBackend, probe\n"
        "from megacomposer.env.backend.layers import LayerStore\n"
        "from megacomposer.env.sandbox import SandboxSpec\n"
        "async def main():\n"
        "    backend = GvisorBackend(LayerStore(Path(sys.argv[1])))\n"
        "    async with await backend.start(SandboxSpec()) as box:\n"
        "        await box.write_file('a', b'1')\n"
        "        fork = await box.fork()\n"
        "        text = (await fork.read_file('a')).decode()\n"
        "        stats = await fork.stats()\n"
        "        print(json.dumps([text, backend.forks_memory, dict(stats.enforced)]))\n"
        "    await backend.close()\n"
        "asyncio.run(main())\n"
    )
    home = Path(tempfile.mkdtemp(prefix="gvisor-user-"))
    try:
        shutil.copytree(
            Path(gvisor.__file__).parents[2] / "env", home / "megacomposer/env",
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
        for room in ("config", "observe"):
            shutil.copytree(Path(gvisor.__file__).parents[2] / room, home / "megacomposer" / room)
        shutil.copy(Path(gvisor.__file__).parents[2] / "__init__.py", home / "megacomposer")
        shutil.chown(home, 12345, 12345)
        command = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups"]
        result = subprocess.run(
            [*command, "/usr/bin/python3", "-B", "-c", program, str(home / "store")],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(home), "TMPDIR": str(home)},
            cwd=home,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        text, forks_memory, enforced = json.loads(result.stdout)
        assert text == "1"
        assert enforced["memory_bytes"] == "watch"
        assert forks_memory in (True, False)
    finally:
        shutil.rmtree(home)
