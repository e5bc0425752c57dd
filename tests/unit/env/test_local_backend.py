"""The `local` backend, and with it what all sandboxes with an agent share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend import agent_sandbox
from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    Limits,
    Mount,
    PatchRejectedError,
    Sandbox,
    SandboxBackend,
    SandboxClosedError,
    SandboxFileError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Status,
)

Test = Callable[[Sandbox], Awaitable[None]]


@pytest.fixture
def log() -> AuditLog:
    return AuditLog()


@pytest.fixture
def run_in_sandbox(tmp_path: Path, log: AuditLog, monkeypatch: pytest.MonkeyPatch):
    """Runs a test in a sandbox of some spec, and sees that nothing is left."""
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))

    def run(test: Test, spec: SandboxSpec | None = None, workspace: Path | None = None) -> None:
        async def start() -> None:
            backend = await open_local(tmp_path / "store", log)
            base = await backend.import_tree(str(workspace)) if workspace else Snapshot(layers=())
            async with await backend.start(spec or SandboxSpec(base=base)) as sandbox:
                await test(sandbox)
            await backend.close()

        asyncio.run(start())
        assert list(places.iterdir()) == []
        assert not [i for i in os.listdir("/proc") if i.isdigit() and is_below(int(i), places)]

    return run


async def open_local(store: Path, log: AuditLog) -> SandboxBackend:
    return await open_backend("local", store=store, record=log.record, allow_unsafe=True)


def is_below(pid: int, directory: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(directory)
    except OSError:  # gone, or not ours
        return False


def kinds(log: AuditLog) -> list[str]:
    return [event["kind"] for event in log.events]


def test_commands_find_their_places_and_nothing_of_our_environment(
    run_in_sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "canary")

    async def test(sandbox: Sandbox) -> None:
        script = 'env; test "$PWD" = "$(dirname "$HOME")/workspace"; touch "$TMPDIR/x"'
        result = await sandbox.exec(["sh", "-c", script], env={"EXTRA": "a=b\nc"})
        assert result.ok
        assert b"canary" not in result.stdout
        assert b"EXTRA=a=b\nc\n" in result.stdout
        assert await sandbox.read_file("/tmp/x") == b""

    run_in_sandbox(test)


def test_paths_are_from_the_workspace_and_translated(run_in_sandbox) -> None:
    async def test(sandbox: Sandbox) -> None:
        await sandbox.write_file("a/file", b"1")
        await sandbox.write_file("/home/agent/file", b"2")
        assert await sandbox.read_file("/workspace/a/file") == b"1"
        assert (await sandbox.exec(["cat", "file"], cwd="a")).stdout == b"1"
        assert (await sandbox.exec(["sh", "-c", "cat ~/file"])).stdout == b"2"
        with pytest.raises(SandboxFileError):
            await sandbox.read_file("nul\0")

    run_in_sandbox(test)


@pytest.mark.parametrize(
    ("argv", "env"), [([], {}), (["a\0b"], {}), (["a"], {"x=y": "z"}), (["a"], {"": "z"})]
)
def test_malformed_commands_are_refused_by_name(run_in_sandbox, argv, env) -> None:
    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(ValueError, match="argv|env"):
            await sandbox.exec(argv, env=env)

    run_in_sandbox(test)


def test_limits_end_commands_and_are_recorded(run_in_sandbox, log: AuditLog) -> None:
    async def test(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sleep", "100"], timeout_s=0.2)).status is Status.TIMEOUT
        assert (await sandbox.exec(["yes"])).status is Status.OUTPUT_LIMIT
        enforced = (await sandbox.stats()).enforced
        assert (enforced["output_bytes"], enforced["memory_bytes"]) == ("agent", "none")

    run_in_sandbox(test, SandboxSpec(limits=Limits(output_bytes=1000)))
    fields = [event["field"] for event in log.events if event["kind"] == "limit"]
    assert fields == ["timeout_s", "output_bytes"]


def test_the_life_of_a_sandbox_ends_by_itself(run_in_sandbox, log: AuditLog) -> None:
    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxClosedError, match="closed|life"):
            await sandbox.exec(["sleep", "100"])
        with pytest.raises(SandboxClosedError, match="its life of 0.3 s is over"):
            await sandbox.read_file("x")

    run_in_sandbox(test, SandboxSpec(limits=Limits(wall_s=0.3)))
    assert kinds(log) == ["sandbox_started", "limit", "sandbox_closed"]


def test_a_closed_sandbox_says_so_and_closes_twice(run_in_sandbox, log: AuditLog) -> None:
    async def test(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        await asyncio.sleep(0.1)
        await asyncio.gather(sandbox.close(), sandbox.close())
        with pytest.raises(SandboxClosedError):
            await task
        for call in (
            sandbox.exec(["true"]),
            sandbox.read_file("x"),
            sandbox.write_file("x", b""),
            sandbox.patch(b"x"),
            sandbox.snapshot(),
            sandbox.fork(),
            sandbox.restore(Snapshot(layers=())),
            sandbox.stats(),
        ):
            with pytest.raises(SandboxClosedError):
                await call

    run_in_sandbox(test)
    assert kinds(log) == ["sandbox_started", "sandbox_closed"]


def test_snapshots_forks_and_restores_are_the_same_files(run_in_sandbox) -> None:
    async def test(sandbox: Sandbox) -> None:
        await sandbox.write_file("file", b"first", mode=0o755)
        await sandbox.exec(["ln", "-s", "file", "link"])
        first = await sandbox.snapshot()
        assert await sandbox.snapshot() == first
        await sandbox.write_file("file", b"second")
        await sandbox.exec(["sh", "-c", "rm link; (setsid sleep 100 &)"])
        async with await sandbox.fork() as child:
            await child.write_file("only-in-child", b"x")
            assert await child.read_file("file") == b"second"
            with pytest.raises(SandboxFileError):
                await sandbox.read_file("only-in-child")
        await sandbox.restore(first)
        assert (await sandbox.stats()).processes == 0
        assert await sandbox.read_file("link") == b"first"
        assert (await sandbox.exec(["test", "-x", "file"])).ok
        with pytest.raises(SnapshotError):
            await sandbox.restore(Snapshot(layers=("0" * 64,)))
        assert await sandbox.read_file("file") == b"first"

    run_in_sandbox(test)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Files that are hard to patch."""
    top = tmp_path / "repository"
    top.mkdir()
    (top / "text.txt").write_text("one\ntwo\nthree\n")
    (top / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (top / "no-newline").write_text("end")
    (top / "binary").write_bytes(bytes(range(256)))
    (top / "na\u00efve \u2713.py").write_text("x = 1\n")
    (top / "run").write_text("#!/bin/sh\n")
    (top / "old-name").write_text("".join(f"{i}\n" for i in range(50)))
    (top / "link").symlink_to("text.txt")
    (top / "gone").write_text("gone\n")
    return top


def changed(top: Path) -> bytes:
    """Changes every file; the diff."""

    def git(*words: str) -> bytes:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(top), *words]
        return subprocess.run(command, check=True, capture_output=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    (top / "text.txt").write_text("one\n2\nthree\n")
    (top / "crlf.txt").write_bytes(b"one\r\n2\r\n")
    (top / "no-newline").write_text("END")
    (top / "binary").write_bytes(bytes(range(255, -1, -1)))
    (top / "na\u00efve \u2713.py").write_text("x = 2\n")
    (top / "run").chmod(0o755)
    (top / "old-name").rename(top / "new-name")
    (top / "link").unlink()
    (top / "link").symlink_to("binary")
    (top / "gone").unlink()
    (top / "new").mkdir()
    (top / "new" / "file").write_text("new\n")
    git("add", "-A", "-N")
    return git("diff", "--binary", "HEAD")


@pytest.mark.parametrize("is_repository", [False, True])
def test_a_patch_of_every_kind_of_change_applies(
    run_in_sandbox, repository: Path, tmp_path: Path, is_repository: bool
) -> None:
    base = tmp_path / "base"
    subprocess.run(["cp", "-a", repository, base], check=True)
    diff = changed(repository)

    async def test(sandbox: Sandbox) -> None:
        if is_repository:
            assert (await sandbox.exec(["git", "init", "-q"])).ok
        await sandbox.patch(diff)
        for file in repository.rglob("*"):
            name = str(file.relative_to(repository))
            if file.is_file() and not name.startswith(".git"):
                assert await sandbox.read_file(name) == file.read_bytes(), name
        assert (await sandbox.exec(["readlink", "link"])).stdout == b"binary\n"
        assert (await sandbox.exec(["test", "-x", "run"])).ok
        assert not (await sandbox.exec(["test", "-e", "gone", "-o", "-e", "old-name"])).ok
        with pytest.raises(PatchRejectedError):
            await sandbox.patch(diff)

    run_in_sandbox(test, workspace=base)


_HUNK = "@@ -0,0 +1 @@\n+x\n"


@pytest.mark.parametrize(
    "diff",
    [
        f"--- /dev/null\n+++ b/../escaped\n{_HUNK}",
        f"--- /dev/null\n+++ b//etc/escaped\n{_HUNK}",
        f"--- /dev/null\n+++ b/.git/hooks/post-checkout\n{_HUNK}",
        f"--- /dev/null\n+++ b/outside/escaped\n{_HUNK}",
        "diff --git a/text.txt b/../text.txt\nrename from text.txt\nrename to ../text.txt\n",
        "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+..\n"
        f"diff --git a/l/escaped b/l/escaped\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/l/escaped\n{_HUNK}",
    ],
)
def test_a_patch_that_leaves_the_workspace_is_refused_and_recorded(
    run_in_sandbox, repository: Path, log: AuditLog, diff: str
) -> None:
    async def test(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", 'ln -s "$TMPDIR" outside'])
        before = await sandbox.snapshot()
        with pytest.raises(PatchRejectedError):
            await sandbox.patch(diff.encode())
        assert await sandbox.snapshot() == before

    run_in_sandbox(test, workspace=repository)
    assert "refused" in kinds(log)


def test_a_patch_that_fails_in_part_changes_nothing(run_in_sandbox, repository: Path) -> None:
    diff = (
        "--- a/text.txt\n+++ b/text.txt\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
        "--- a/no-newline\n+++ b/no-newline\n@@ -1 +1 @@\n-other\n+END\n"
    )

    async def test(sandbox: Sandbox) -> None:
        with pytest.raises(PatchRejectedError, match="no-newline"):
            await sandbox.patch(diff.encode())
        assert await sandbox.read_file("text.txt") == b"one\ntwo\nthree\n"
        with pytest.raises(PatchRejectedError):
            await sandbox.patch(b"this is no diff")
        await sandbox.patch(b"")

    run_in_sandbox(test, workspace=repository)


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(rootfs="/"),
        SandboxSpec(egress_socket="/x"),
        SandboxSpec(mounts=(Mount(source="/usr", target="/opt/x"),)),
    ],
)
def test_local_refuses_what_it_cannot_do(tmp_path: Path, log: AuditLog, spec: SandboxSpec) -> None:
    async def run() -> None:
        backend = await open_local(tmp_path, log)
        with pytest.raises(BackendUnavailableError, match="use another backend"):
            await backend.start(spec)

    asyncio.run(run())


def test_a_missing_agent_program_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "_AGENT", tmp_path / "none")
    with pytest.raises(BackendUnavailableError, match="pip install"):
        agent_sandbox.agent_program()
