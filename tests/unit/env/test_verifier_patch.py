"""The answer of an agent as a patch: nothing of it may be lost between two sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from grading import grading_backend, write_tree

from megacomposer.env.audit import AuditLog
from megacomposer.env.grading.verifier import workspace_patch
from megacomposer.env.grading.workspace_diff import read_manifest
from megacomposer.env.sandbox import PatchRejectedError, Sandbox, SandboxSpec

BASE = {
    "crlf.txt": b"one\r\ntwo\r\n",
    "no_newline.txt": b"one\ntwo",
    "na\u00efve.py": "# \u00e9\n",
    'with "quotes"\tand tab.txt': b"x\n",
    "binary.bin": bytes(range(256)),
    "moved/from.py": "def moved():\n" + "    x = 1\n" * 20,
    "script.sh": b"#!/bin/sh\n",
    "gone.txt": b"gone\n",
    ".gitattributes": b"*.txt text eol=lf\n*.lock -diff\n*.bin filter=lfs\n",
    ".gitignore": b"build/\n*.log\n",
}
EDITS = r"""
printf 'one\r\nTWO\r\nthree' > crlf.txt
printf 'one\ntwo\nthree' > no_newline.txt
printf '# \303\250\n' > 'naïve.py'
printf 'y\n' > 'with "quotes"	and tab.txt'
printf '\000\001\r\n\377' > binary.bin
mkdir sub && mv moved/from.py sub/to.py
chmod +x script.sh
rm gone.txt
ln -s /etc/passwd link
ln -s ../nowhere sub/dangling
mkdir build && echo kept > build/out.txt && echo kept > trace.log
printf 'a\nb' > "new
line.txt"
git init -q inner && echo inside > inner/file.txt
mkdir -p __pycache__ .pytest_cache && echo x > __pycache__/a.pyc && echo x > .pytest_cache/b
"""


@pytest.fixture
def audit() -> AuditLog:
    return AuditLog()


async def edited(sandbox: Sandbox, script: str) -> None:
    result = await sandbox.exec(["sh", "-ec", script])
    assert result.ok, result.stderr


def test_the_patch_carries_every_kind_of_change(tmp_path: Path, audit: AuditLog) -> None:
    async def scenario() -> None:
        async with grading_backend(tmp_path / "store", audit) as backend:
            base = await backend.import_tree(str(write_tree(tmp_path / "tree", BASE)))
            async with (
                await backend.start(SandboxSpec(base=base)) as worked,
                await backend.start(SandboxSpec(base=base)) as fresh,
            ):
                await edited(worked, EDITS)
                patch = await workspace_patch(worked)
                assert b"rename from moved/from.py" in patch
                assert b"GIT binary patch" in patch
                await fresh.patch(patch)
                wanted = {
                    path: entry
                    for path, entry in (await read_manifest(worked)).items()
                    if not path.startswith(("__pycache__", ".pytest_cache"))
                }
                assert wanted["link"][0] == "120000"
                assert wanted["script.sh"][0] == "100755"
                assert wanted["inner/file.txt"][0] == "100644"
                assert {"trace.log", "build/out.txt", "new\nline.txt"} <= set(wanted)
                assert await read_manifest(fresh) == wanted

    asyncio.run(scenario())


def test_the_patch_is_the_same_whatever_the_agent_did_with_git(
    tmp_path: Path, audit: AuditLog
) -> None:
    script = """
    git init -q . && git config user.email a@b && git config user.name a
    git config core.fileMode false && git config core.autocrlf true
    git add -A && git commit -qm base
    echo staged > staged.txt && git add staged.txt
    echo committed > committed.txt && git add committed.txt && git commit -qm work
    echo untracked > untracked.txt
    echo '*' > .git/info/exclude
    git update-index --assume-unchanged plain.txt && echo changed > plain.txt
    """

    async def scenario() -> bytes:
        async with grading_backend(tmp_path / "store", audit) as backend:
            tree = write_tree(tmp_path / "tree", {"plain.txt": "plain\n"})
            base = await backend.import_tree(str(tree))
            async with await backend.start(SandboxSpec(base=base)) as sandbox:
                assert await workspace_patch(sandbox) == b"", "no change is no patch"
                await edited(sandbox, script)
                return await workspace_patch(sandbox)

    patch = asyncio.run(scenario())
    for name in (b"staged.txt", b"committed.txt", b"untracked.txt", b"plain.txt"):
        assert b"diff --git a/" + name in patch
    assert b".git/" not in patch


def test_a_directory_that_became_a_file_or_a_link_round_trips(
    tmp_path: Path, audit: AuditLog
) -> None:
    files = {"a/x.txt": "x\n", "b/y.txt": "y\n", "c": "c\n"}
    script = "rm -r a b c; echo a > a; ln -s a b; mkdir c; echo z > c/z.txt"

    async def scenario() -> None:
        async with grading_backend(tmp_path / "store", audit) as backend:
            base = await backend.import_tree(str(write_tree(tmp_path / "tree", files)))
            async with (
                await backend.start(SandboxSpec(base=base)) as worked,
                await backend.start(SandboxSpec(base=base)) as fresh,
            ):
                await edited(worked, script)
                await fresh.patch(await workspace_patch(worked))
                assert await read_manifest(fresh) == await read_manifest(worked)

    asyncio.run(scenario())


def test_a_patch_of_another_state_changes_nothing(tmp_path: Path, audit: AuditLog) -> None:
    async def scenario() -> None:
        async with grading_backend(tmp_path / "store", audit) as backend:
            one = await backend.import_tree(
                str(write_tree(tmp_path / "one", {"a.txt": "1\n", "b.txt": "1\n"}))
            )
            two = await backend.import_tree(
                str(write_tree(tmp_path / "two", {"a.txt": "1\n", "b.txt": "other\n"}))
            )
            async with (
                await backend.start(SandboxSpec(base=one)) as worked,
                await backend.start(SandboxSpec(base=two)) as fresh,
            ):
                await edited(worked, "echo 2 > a.txt; echo 2 > b.txt")
                patch = await workspace_patch(worked)
                before = await read_manifest(fresh)
                with pytest.raises(PatchRejectedError):
                    await fresh.patch(patch)
                assert await read_manifest(fresh) == before

    asyncio.run(scenario())
