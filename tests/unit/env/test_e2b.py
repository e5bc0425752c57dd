"""The E2B backend against a service that speaks its protocol and runs real sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from e2b_server import KEY, E2bServer, service_store

from megacomposer.env.backend.e2b import E2bBackend
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backends import open_backend, probe_backends
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    Limits,
    Mount,
    PatchRejectedError,
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Status,
)

REASONS = asyncio.run(probe_backends())
BACKEND = next((name for name in ("bubblewrap", "gvisor") if not REASONS[name]), "")
pytestmark = pytest.mark.skipif(not BACKEND, reason=str(REASONS))

Test = Callable[[E2bBackend, E2bServer], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    def run_test(test: Test) -> None:
        async def main() -> None:
            machines = await open_backend(BACKEND, store=service_store(tmp_path))
            server = E2bServer(machines)
            async with server.serve():
                monkeypatch.setenv("E2B_API_URL", server.url)
                monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
                monkeypatch.setenv("E2B_API_KEY", KEY)
                backend = E2bBackend(LayerStore(tmp_path / "client"), user="agent")
                try:
                    await test(backend, server)
                finally:
                    await backend.close()
                assert not server.machines, "every machine was deleted"
            await machines.close()

        asyncio.run(main())

    return run_test


def test_command_that_ends_otherwise_than_it_says(run: Any) -> None:
    async def test(backend: E2bBackend, _: E2bServer) -> None:
        async with await backend.start(SandboxSpec(limits=Limits(output_bytes=50_000))) as box:
            seen: list[tuple[str, bytes]] = []
            result = await box.exec(
                ["sh", "-c", "cat; echo err >&2; pwd; echo $A; exit 3"],
                stdin=b"in\n",
                env={"A": "b c"},
                on_output=lambda stream, data: seen.append((stream, data)),
            )
            assert (result.status, result.exit_code) == (Status.EXITED, 3)
            assert (result.stdout, result.stderr) == (b"in\n/workspace\nb c\n", b"err\n")
            assert b"".join(data for stream, data in seen if stream == "stdout") == result.stdout
            result = await box.exec(["sh", "-c", "kill -9 $$"])
            assert (result.status, result.exit_code) == (Status.SIGNALED, 137)
            result = await box.exec(["yes"])
            assert (result.status, len(result.stdout)) == (Status.OUTPUT_LIMIT, 50_000)
            daemon = "(setsid sleep 300 &); echo begun; sleep 300"
            result = await box.exec(["sh", "-c", daemon], timeout_s=1.0)
            assert (result.status, result.stdout) == (Status.TIMEOUT, b"begun\n")
            count = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 300'"
            assert (await box.exec(["sh", "-c", count])).stdout == b"0\n"
            for argv, cwd in ((["no-such-program"], None), (["true"], "/no-such-place")):
                with pytest.raises(SandboxFileError, match="does not exist"):
                    await box.exec(argv, cwd=cwd)

    run(test)


def test_files_that_are_lost_on_the_way(run: Any) -> None:
    async def test(backend: E2bBackend, _: E2bServer) -> None:
        async with await backend.start(SandboxSpec()) as box:
            data = bytes(range(256)) * 500
            await box.write_file("deep/er/a.bin", data, mode=0o755)
            assert await box.read_file("/workspace/deep/er/a.bin") == data
            await box.write_file("deep/er/a.bin", b"2")
            mode = (await box.exec(["stat", "-c", "%a", "deep/er/a.bin"])).stdout
            assert (await box.read_file("deep/er/a.bin"), mode) == (b"2", b"755\n")
            for path, code in (("missing", "ENOENT"), ("deep", "EINVAL")):
                with pytest.raises(SandboxFileError) as caught:
                    await box.read_file(path)
                assert caught.value.code == code
            with pytest.raises(SandboxFileError, match="longer than"):
                await box.read_file("deep/er/a.bin", max_bytes=0)
            with pytest.raises(SandboxFileError, match="is a directory"):
                await box.write_file("deep", b"")
            assert (await box.exec(["ls", "-A"])).stdout == b"deep\n"
            diff = b"--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+hello\n"
            await box.patch(diff)
            assert await box.read_file("new.txt") == b"hello\n"
            with pytest.raises(PatchRejectedError, match="already exists"):
                await box.patch(diff)

    run(test)


def test_fork_or_snapshot_that_is_not_the_state(run: Any, tmp_path: Path) -> None:
    async def test(backend: E2bBackend, server: E2bServer) -> None:
        (tmp_path / "repo").mkdir()
        (tmp_path / "repo/a.txt").write_text("base")
        base = await backend.import_tree(str(tmp_path / "repo"))
        async with await backend.start(SandboxSpec(base=base)) as box:
            assert await box.read_file("a.txt") == b"base"
            await box.write_file("a.txt", b"1")
            child = await box.fork()
            snapshot = await box.snapshot()
            await box.write_file("a.txt", b"2")
            assert await child.read_file("a.txt") == b"1"
            await box.restore(snapshot)
            assert await box.read_file("a.txt") == b"1"
            assert snapshot.memory is not None
            files = dataclasses.replace(snapshot, memory=None)
            async with await backend.start(SandboxSpec(base=files)) as other:
                assert await other.read_file("a.txt") == b"1"
            # Also a machine that the service has paused by itself goes on.
            next(iter(server.machines.values())).paused = True
            for machine in server.machines.values():
                machine.paused = True
            await box.fork()
            for machine in server.machines.values():
                machine.paused = True
            assert (await box.exec(["cat", "a.txt"])).stdout == b"1"
            assert any(request.endswith("/connect") for request in server.requests)

    run(test)


def test_broken_service_that_looks_like_a_result(run: Any) -> None:
    async def test(backend: E2bBackend, server: E2bServer) -> None:
        server.faults.busy = 2
        async with await backend.start(SandboxSpec()) as box:
            assert server.requests.count("POST /sandboxes") == 3, "429 is waited for"
            server.faults.drop_stream = True
            with pytest.raises(SandboxError, match="broke"):
                await box.exec(["sh", "-c", "echo a; exit 0"])
            server.faults.drop_stream = False
            for end, message in (("nothing", "without its exit code"), ("error", "node lost")):
                server.faults.end_stream = end
                with pytest.raises(SandboxError, match=message):
                    await box.exec(["true"])
            server.faults.end_stream = ""
            server.faults.busy = 99
            with pytest.raises(SandboxError, match="429"):
                await box.fork()
            server.faults.busy = 0
            for machine in list(server.machines.values()):
                await machine.sandbox.close()
            server.machines.clear()
            with pytest.raises(SandboxClosedError, match="not found"):
                await box.exec(["true"])
        with pytest.raises(SandboxClosedError, match="closed"):
            await box.exec(["true"])

    run(test)


def test_start_that_ignores_what_it_cannot_do(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(backend: E2bBackend, server: E2bServer) -> None:
        refused = (
            (SandboxSpec(egress_socket="/x"), BackendUnavailableError),
            (SandboxSpec(rootfs="/"), BackendUnavailableError),
            (SandboxSpec(mounts=(Mount(source="/a", target="/a"),)), BackendUnavailableError),
            (SandboxSpec(base=Snapshot(layers=(), memory="0" * 64)), SnapshotError),
            (SandboxSpec(base=Snapshot(layers=(), memory="e2b:gone")), SnapshotError),
            (SandboxSpec(limits=Limits(memory_bytes=1 << 20)), SandboxError),
        )
        for spec, error in refused:
            with pytest.raises(error):
                await backend.start(spec)
        monkeypatch.setenv("E2B_API_KEY", "wrong")
        stranger = E2bBackend(backend.store)
        with pytest.raises(SandboxError, match=r"invalid API key.*E2B_API_KEY"):
            await stranger.start(SandboxSpec())
        await stranger.close()
        monkeypatch.delenv("E2B_API_KEY")
        assert "E2B_API_KEY" in (await probe_backends())["e2b"]

    run(test)
