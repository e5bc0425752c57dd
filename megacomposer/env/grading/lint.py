"""What ruff says about files of a workspace."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megacomposer.env.grading.python_runtime import PythonRuntime
from megacomposer.env.sandbox import Sandbox, SandboxFileError, Status

RULES = "E4,E7,E9,F"
"""Likely mistakes, and no taste."""
_TIMEOUT_S = 120.0


async def ruff_findings(
    sandbox: Sandbox, runtime: PythonRuntime, paths: Sequence[str]
) -> tuple[str, ...] | None:
    """`path: code message` of each finding in the Python files among `paths` that exist, sorted.

    By RULES, whatever the repository configures; None: the runtime has no ruff,
    or it did not come to an end.
    """
    if runtime.site is None:
        return None
    files = [path for path in paths if path.endswith((".py", ".pyi"))]
    command = [f"{runtime.site}/bin/ruff", "check", "--isolated", "--no-cache", "--quiet"]
    command += [f"--select={RULES}", "--output-format=json", "--exit-zero", "--", *files]
    if not files:
        command = [f"{runtime.site}/bin/ruff", "--version"]
    try:
        result = await sandbox.exec(command, env=runtime.env, timeout_s=_TIMEOUT_S)
    except SandboxFileError:
        return None
    if not files:
        return () if result.ok else None
    if result.status is not Status.EXITED:
        return None
    try:
        found = json.loads(result.stdout)
    except ValueError:
        return None
    # A file that is missing is E902: it was deleted, or is not there yet.
    return tuple(
        sorted(
            f"{_relative(item['filename'])}: {item['code'] or 'syntax'} {item['message']}"
            for item in found
            if item["code"] != "E902"
        )
    )


def _relative(path: str) -> str:
    return path.removeprefix("/workspace/")
