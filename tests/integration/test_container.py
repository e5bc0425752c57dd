"""The container backend on podman or docker, with an image made of the host's busybox."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacomposer.env.backend import container
from megacomposer.env.backend.container import DockerBackend, find_program
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    Limits,
    SandboxError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Status,
)

WHY_NOT = asyncio.run(container.probe())
BUSYBOX = Path("/bin/busybox")
APPLETS = "cat dd find id ls mkdir rm sh sleep tar touch wget yes"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[str]]:
    """An engine with its own storage and the image `busybox:test`; skips with the reason."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    if not BUSYBOX.exists():
        pytest.skip("needs /bin/busybox: apt-get install busybox-static")
    program = asyncio.run(find_program())
    root = tmp_path_factory.mktemp("engine")
    found: list[str] = []
    if program == "podman":
        found = [
            f"--root={root}/root",
            f"--runroot={root}/run",
            "--storage-driver=vfs",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
            *(["--runtime=runc"] if shutil.which("runc") else []),
        ]
    (root / "image/bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "image/bin/busybox")
    for applet in APPLETS.split():
        (root / "image/bin" / applet).symlink_to("busybox")
    subprocess.run(["tar", "-C", root / "image", "-cf", root / "image.tar", "."], check=True)
    load = [program, *found, "import", str(root / "image.tar"), "busybox:test"]
    subprocess.run(load, check=True, capture_output=True)
    try:
        yield found
    finally:
        subprocess.run([program, *found, "rmi", "--force", "busybox:test"], capture_output=True)


def containers(options: Sequence[str]) -> str:
    command = [asyncio.run(find_program()), *options, "ps", "--all", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_container_that_reaches_out_or_stays(options: Sequence[str], tmp_path: Path) -> None:
    async def test() -> None:
        backend = DockerBackend(LayerStore(tmp_path), image="busybox:test", options=options)
        limits = Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, processes=40)
        async with await backend.start(SandboxSpec(limits=limits)) as box:
            who = await box.exec(["id", "-u"])
            assert who.stdout == b"1000\n"
            for script in (
                "touch /etc/x",
                "touch /x",
                "wget -T 2 http://127.0.0.1",
                "cat /etc/shadow",
            ):
                assert not (await box.exec(["sh", "-c", script])).ok, script
            status = (await box.exec(["cat", "/proc/self/status"])).stdout
            assert b"NoNewPrivs:\t1" in status
            assert b"CapBnd:\t0000000000000000" in status
            full = await box.exec(["dd", "if=/dev/zero", "of=big", "bs=1M", "count=20"])
            assert b"No space left" in full.stderr
            daemon = "(sleep 300 &); echo begun; sleep 300"
            late = await box.exec(["sh", "-c", daemon], timeout_s=1.0)
            assert (late.status, late.stdout) == (Status.TIMEOUT, b"begun\n")
            assert (await box.stats()).enforced["memory_bytes"] == "cgroup"
        await backend.close()

    asyncio.run(test())
    assert containers(options) == ""


def test_fork_or_snapshot_that_is_not_the_state(options: Sequence[str], tmp_path: Path) -> None:
    async def test() -> None:
        backend = DockerBackend(LayerStore(tmp_path / "s"), image="busybox:test", options=options)
        (tmp_path / "repo").mkdir()
        (tmp_path / "repo/a.txt").write_text("base")
        base = await backend.import_tree(str(tmp_path / "repo"))
        async with await backend.start(SandboxSpec(base=base)) as box:
            await box.write_file("b.txt", b"new")
            child = await box.fork()
            await box.write_file("b.txt", b"newer")
            assert [await child.read_file(name) for name in ("a.txt", "b.txt")] == [b"base", b"new"]
            await box.restore(base)
            assert (await box.exec(["ls", "-A"])).stdout == b"a.txt\n"
            with pytest.raises(SnapshotError, match="files only"):
                await box.restore(Snapshot(layers=(), memory="0" * 64))
        await backend.close()

    asyncio.run(test())
    assert containers(options) == ""


def test_start_that_fails_without_a_reason(options: Sequence[str], tmp_path: Path) -> None:
    async def test() -> None:
        backend = DockerBackend(LayerStore(tmp_path), image="localhost/none:1", options=options)
        with pytest.raises(SandboxError, match="run failed: .*none"):
            await backend.start(SandboxSpec())
        with pytest.raises(BackendUnavailableError, match="rootfs"):
            await backend.start(SandboxSpec(rootfs="/"))

    asyncio.run(test())


def test_probe_that_finds_an_engine_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert "install podman" in asyncio.run(container.probe())
