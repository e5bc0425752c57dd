"""What an agent made of its workspace, as a `git diff --binary` against the sandbox's base.

No repository of the workspace is asked: the files themselves are compared with those of the base,
so what is untracked, ignored, staged, committed or in a repository below counts alike.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacomposer.env.backend import tree_program
from megacomposer.env.grading.python_runtime import interpreter
from megacomposer.env.sandbox import TEMPORARY, Sandbox, SandboxError

CACHES = ("__pycache__", "*.pyc", ".pytest_cache", ".mypy_cache", ".ruff_cache")
"""Leftovers of running tools, at any depth; no part of an answer."""
MAX_ARCHIVE_BYTES = 512 << 20
_MAX_REPLY_BYTES = 256 << 20
_PROGRAM = Path(tree_program.__file__).read_text(encoding="utf-8")

Manifest = Mapping[str, tuple[str, str]]
"""Path -> git's mode and blob id."""


async def workspace_patch(sandbox: Sandbox) -> bytes:
    """The answer of the agent that worked in `sandbox`; b"" where nothing changed.

    Renames are found, binaries and modes are kept, `.git` and CACHES are left out. The diff is
    made in a second sandbox that has only the base: no program or setting of the agent has a part
    in it. Raises SandboxError.
    """
    after = await read_manifest(sandbox)
    clean = await sandbox.fork()
    async with clean:
        await clean.restore(sandbox.spec.base)
        before = await read_manifest(clean)
        changed = [
            path
            for path in sorted({*before, *after})
            if before.get(path) != after.get(path) and not is_cache(path)
        ]
        if not changed:
            return b""
        archive = await pack_files(sandbox, paths=[path for path in changed if path in after])
        name = await write_archive(clean, archive)
        await run_tree(clean, "diff", paths=changed, archive=name)
        return await clean.read_file(f"{TEMPORARY}/{name}.diff", max_bytes=MAX_ARCHIVE_BYTES)


def is_cache(path: str) -> bool:
    return any(tree_program.matches(part, CACHES) for part in path.split("/"))


async def read_manifest(sandbox: Sandbox, patterns: Sequence[str] | None = None) -> Manifest:
    """All files and links of the workspace, or those that match one of the shell patterns."""
    found = await run_tree(sandbox, "manifest", patterns=patterns)
    return {path: (mode, blob) for path, (mode, blob) in found.items()}


async def pack_files(
    sandbox: Sandbox, *, paths: Sequence[str] | None = None, patterns: Sequence[str] = ()
) -> bytes:
    """A tar of these files, or of those that match."""
    name = f".tree-{uuid.uuid4().hex}.tar"
    await run_tree(sandbox, "pack", paths=paths, patterns=patterns, archive=name)
    data = await sandbox.read_file(f"{TEMPORARY}/{name}", max_bytes=MAX_ARCHIVE_BYTES)
    await sandbox.exec(["rm", "-f", "--", name], cwd=str(TEMPORARY))
    return data


async def replace_files(sandbox: Sandbox, archive: bytes, patterns: Sequence[str]) -> None:
    """Remove every file that matches, and unpack what `pack_files` made elsewhere."""
    name = await write_archive(sandbox, archive)
    await run_tree(sandbox, "replace", patterns=patterns, archive=name)
    await sandbox.exec(["rm", "-f", "--", name], cwd=str(TEMPORARY))


async def write_archive(sandbox: Sandbox, data: bytes) -> str:
    name = f".tree-{uuid.uuid4().hex}.tar"
    await sandbox.write_file(f"{TEMPORARY}/{name}", data)
    return name


async def run_tree(sandbox: Sandbox, command: str, **request: Any) -> Any:
    """Run `tree_program` inside. Raises SandboxError where it fails."""
    python, env = interpreter(sandbox.spec)
    result = await sandbox.exec(
        [python, "-I", "-S", "-c", _PROGRAM],
        env=env,
        stdin=json.dumps({"command": command, "root": ".", **request}).encode("ascii"),
        timeout_s=300.0,
    )
    if not result.ok:
        words = result.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(
            f"sandbox {sandbox.id}: {command} of the workspace ended with {result.status} "
            f"{result.exit_code}: {words}"
        )
    try:
        reader = zlib.decompressobj()
        return json.loads(reader.decompress(result.stdout, _MAX_REPLY_BYTES))
    except (zlib.error, ValueError) as error:
        raise SandboxError(f"sandbox {sandbox.id}: {command} gave no reply: {error}") from error
