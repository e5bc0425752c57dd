"""SWE-bench records as tasks.

    for record in read_records(Path("verified.jsonl")):
        task = await task_from_record(record, Path("mirrors"), backend, mounts=mounts)

The repository comes from a clone or mirror on this machine; nothing is fetched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megacomposer.env.grading.evidence import score
from megacomposer.env.grading.patch_size import patch_evidence
from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.sandbox import (
    Limits,
    Mount,
    PatchRejectedError,
    SandboxBackend,
    SandboxSpec,
)
from megacomposer.env.task import Task, TestPlan

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


class SweBenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row, under the data set's own names. The lists are JSON text in its original form."""

    instance_id: str
    repo: str
    """owner/name."""
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    FAIL_TO_PASS: str | tuple[str, ...]
    PASS_TO_PASS: str | tuple[str, ...] = ()
    version: str = ""
    created_at: str = ""


def read_records(path: Path) -> list[SweBenchRecord]:
    """A JSON list, or JSON Lines. ValueError names the row and the field that is wrong."""
    text = path.read_text(encoding="utf-8")
    rows: list[str | object]
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    records = []
    for number, row in enumerate(rows):
        try:
            records.append(msgspec.convert(row, SweBenchRecord))
        except msgspec.ValidationError as error:
            raise ValueError(f"{path}: row {number}: {error}") from error
    return records


async def task_from_record(
    record: SweBenchRecord,
    mirrors: Path,
    backend: SandboxBackend,
    *,
    mounts: Sequence[Mount] = (),
    limits: Limits | None = None,
    plan: TestPlan | None = None,
    verifier: Verifier | None = None,
) -> Task:
    """The task of one record.

    `mirrors` holds clones as OWNER/NAME, OWNER__NAME or NAME, with or without ".git"; `mounts` are
    the packages that the tests need. `plan` gives the runner, its command and so on, where the ids
    are not pytest's. With `verifier` the task must score 1 by its own patch and 0 by none.

    Raises ValueError saying what the record or the mirror lacks, and SandboxError.
    """
    fail_to_pass = _names(record, "FAIL_TO_PASS")
    pass_to_pass = _names(record, "PASS_TO_PASS")
    plan = plan or TestPlan()
    if plan.runner == "pytest":
        for name in (*fail_to_pass, *pass_to_pass):
            if ".py::" not in name:
                raise ValueError(
                    f"{record.instance_id}: {name!r} is no id of pytest: pass `plan` with the "
                    'runner "junit" and its command'
                )
    repository = find_mirror(mirrors, record.repo)
    with tempfile.TemporaryDirectory() as tree:
        await _check_out(repository, record, tree)
        base = await backend.import_tree(tree)
    async with await backend.start(SandboxSpec(base=base, limits=limits or Limits())) as sandbox:
        size = await patch_evidence(sandbox, record.test_patch.encode(), ())
        try:
            await sandbox.patch(record.test_patch.encode())
        except PatchRejectedError as error:
            raise ValueError(f"{record.instance_id}: test_patch: {error}") from error
        pristine = await sandbox.snapshot()
    task = Task(
        id=record.instance_id,
        instruction=record.problem_statement,
        base=base,
        pristine=pristine,
        tests=dataclasses.replace(
            plan,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            protected_paths=(*plan.protected_paths, *map(glob.escape, size.paths)),
        ),
        mounts=tuple(mounts),
        limits=limits or Limits(),
        gold_patch=record.patch,
        origin={
            "kind": "swe_bench",
            "repository": record.repo,
            "commit": record.base_commit,
            "version": record.version,
            "created_at": record.created_at,
        },
    )
    if verifier is not None:
        await check_task(task, verifier)
    return task


async def check_task(task: Task, verifier: Verifier) -> None:
    """Raises ValueError unless the task's own patch scores 1 and an empty one scores 0."""
    gold = await verifier.verify(task, task.gold_patch.encode())
    if score(gold) != 1.0:
        raise ValueError(f"{task.id}: its own patch does not pass: {gold.reason}")
    nothing = await verifier.verify(task, b"")
    if score(nothing) != 0.0:
        raise ValueError(f"{task.id}: passes without any change")


def find_mirror(mirrors: Path, repository: str) -> Path:
    """The clone of owner/name. ValueError lists the places that were looked at."""
    owner, _, name = repository.partition("/")
    if not name or ".." in repository or "/" in name:
        raise ValueError(f"repository {repository!r} is not owner/name")
    places = [
        mirrors / f"{stem}{ending}"
        for stem in (f"{owner}/{name}", f"{owner}__{name}", name)
        for ending in ("", ".git")
    ]
    for place in places:
        if (place / ".git").exists() or (place / "HEAD").is_file():
            return place
    raise ValueError(
        f"no clone of {repository}: looked at {', '.join(str(place) for place in places)}"
    )


def _names(record: SweBenchRecord, field: str) -> tuple[str, ...]:
    value = getattr(record, field)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=tuple[str, ...])
        except msgspec.DecodeError as error:
            raise ValueError(f"{record.instance_id}: {field}: {error}") from error
    return tuple(value)


async def _check_out(repository: Path, record: SweBenchRecord, tree: str) -> None:
    """The files of the commit, without any of its history."""
    if not _COMMIT.fullmatch(record.base_commit):
        raise ValueError(f"{record.instance_id}: base_commit {record.base_commit!r} is no commit")
    with tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, "GIT_INDEX_FILE": f"{scratch}/index", "GIT_CONFIG_GLOBAL": os.devnull}
        git_directory = repository / ".git" if (repository / ".git").exists() else repository
        git = ["git", f"--git-dir={git_directory}", f"--work-tree={tree}"]
        git += ["-c", "core.autocrlf=false", "-c", "safe.directory=*"]
        # Not `git archive`: it leaves out what `.gitattributes` marks export-ignore, such as tests.
        for command in (["read-tree", record.base_commit], ["checkout-index", "--all", "--force"]):
            process = await asyncio.create_subprocess_exec(
                *git,
                *command,
                env=env,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, words = await process.communicate()
            if process.returncode:
                message = words.decode(errors="replace").strip()[-500:]
                raise ValueError(f"{record.instance_id}: {repository}: {message}")
