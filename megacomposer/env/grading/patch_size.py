"""How large a patch is, and which tests it touches, before it is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megacomposer.env.backend import tree_program
from megacomposer.env.grading.evidence import PatchEvidence
from megacomposer.env.sandbox import Sandbox, SandboxFileError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchSize:
    """The evidence, and the paths behind it."""

    evidence: PatchEvidence
    paths: tuple[str, ...]


async def patch_evidence(sandbox: Sandbox, patch: bytes, protected: Sequence[str]) -> PatchSize:
    """Counted by git inside the sandbox. All zero for a patch that git cannot read."""
    if not patch:
        return PatchSize(evidence=PatchEvidence(), paths=())
    command = ["git", "apply", "--numstat", "-z", "-"]
    try:
        result = await sandbox.exec(command, stdin=patch)
    except SandboxFileError:
        return PatchSize(evidence=PatchEvidence(), paths=())
    if not result.ok:
        return PatchSize(evidence=PatchEvidence(), paths=())
    rows = _rows(result.stdout)
    paths = tuple(dict.fromkeys(path for _, _, path in rows))
    evidence = PatchEvidence(
        files=len(paths),
        lines_added=sum(int(added) for added, _, _ in rows if added != "-"),
        lines_removed=sum(int(removed) for _, removed, _ in rows if removed != "-"),
        binary_files=sum(added == "-" for added, _, _ in rows),
        tests_touched=tuple(path for path in paths if tree_program.matches(path, protected)),
    )
    return PatchSize(evidence=evidence, paths=paths)


def _rows(output: bytes) -> list[tuple[str, str, str]]:
    """`added TAB removed TAB path NUL`; a rename has an empty path, then the two names."""
    fields = output.decode("utf-8", "surrogateescape").split("\0")
    rows = []
    while fields and fields[0]:
        added, removed, path = fields.pop(0).split("\t", 2)
        if not path:
            fields.pop(0)
            path = fields.pop(0)
        rows.append((added, removed, path))
    return rows
