"""Harbor task directories, out and in (`task.toml` schema 1.4; https://harborframework.com).

    await write_harbor(task, Path("tasks/attrs-17"), backend)
    task = await read_harbor(Path("tasks/attrs-17"), backend)

A directory that we wrote is graded in Harbor by the same reporter and the same control tests as
here, and comes back as the same task. One of another author is read as far as it can be: see
`megacomposer.tasks.harbor_foreign`.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacomposer.env.backend import tree_program
from megacomposer.env.grading import control_tests, pytest_report, report_reading
from megacomposer.env.grading.pristine import protected_patterns, read_pristine
from megacomposer.env.grading.python_runtime import SITE_TARGET, runtime_of
from megacomposer.env.grading.test_run import PYTEST_ARGUMENTS
from megacomposer.env.grading.workspace_diff import pack_files
from megacomposer.env.sandbox import Mount, SandboxBackend, SandboxSpec
from megacomposer.env.task import Task, task_from_json
from megacomposer.tasks import harbor_grade
from megacomposer.tasks.harbor_foreign import read_foreign

SCHEMA_VERSION = "1.4"
ORGANISATION = "megacomposer"
_MIB = 1 << 20
_CARRIED = (pytest_report, report_reading, control_tests, tree_program)

_DOCKERFILE = """FROM {image}
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
ADD workspace.tar /workspace/
{site}WORKDIR /workspace
"""
_TEST = """#!/bin/sh
cd /workspace && exec {python} -I /tests/grade.py
"""
_SOLVE = """#!/bin/sh
cd /workspace && git apply --whitespace=nowarn /solution/gold.patch
"""


async def write_harbor(
    task: Task,
    directory: Path,
    backend: SandboxBackend,
    *,
    image: str = "python:3.11-slim",
    python: str = "/usr/local/bin/python3",
) -> None:
    """Write `task` into `directory`, which must be new or empty.

    `image` must have the minor version of Python that the task's packages are for, at `python`.

    Raises ValueError for a directory with content and for a task whose runner is not pytest.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty: name a new directory")
    if task.tests.runner != "pytest" or task.tests.behaviour:
        raise ValueError(
            f"task {task.id}: only pytest tasks without behaviour checks can be written for Harbor"
        )
    runtime = runtime_of(task.mounts, in_place=not backend.isolates)
    patterns = protected_patterns(task.tests)
    spec = SandboxSpec(base=task.base, mounts=runtime.mounts, limits=task.limits)
    async with await backend.start(spec) as sandbox:
        workspace = await pack_files(sandbox, patterns=["*"])
    async with await backend.start(dataclasses.replace(spec, base=task.pristine)) as sandbox:
        pristine = await read_pristine(sandbox, patterns)
    site = next((mount.source for mount in task.mounts if mount.target == SITE_TARGET), None)
    setting = {
        "patterns": patterns,
        "config_file": pristine.config_file,
        "pytest_arguments": PYTEST_ARGUMENTS,
        "site": SITE_TARGET if site else "",
    }
    site_line = f"ADD site.tar {SITE_TARGET}/\n" if site else ""
    portable = dataclasses.replace(task, mounts=())
    files: dict[str, bytes | str] = {
        "task.toml": task_toml(task),
        "instruction.md": task.instruction,
        "environment/Dockerfile": _DOCKERFILE.format(image=image, site=site_line),
        "environment/workspace.tar": workspace,
        "tests/test.sh": _TEST.format(python=python),
        "tests/grade.py": Path(harbor_grade.__file__).read_text(encoding="utf-8"),
        "tests/task.json": portable.to_json(),
        "tests/setting.json": json.dumps(setting, indent=1),
        "tests/pristine.tar": pristine.archive,
        "solution/solve.sh": _SOLVE,
        "solution/gold.patch": task.gold_patch,
    }
    if site:
        files["environment/site.tar"] = _tar(Path(site))
    for module in _CARRIED:
        source = Path(str(module.__file__))
        files[f"tests/{source.name}"] = source.read_text(encoding="utf-8")
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        if name.endswith(".sh"):
            path.chmod(0o755)


async def read_harbor(
    directory: Path, backend: SandboxBackend, *, accept_image_steps: bool = False
) -> Task:
    """The task in `directory`; its trees are put into the backend's store.

    `accept_image_steps`: for a task of another author, take it although its Dockerfile runs
    commands, because the sandboxes' root has what they make.

    Raises ValueError naming the file and what is wrong with it.
    """
    settings = read_toml(directory / "task.toml")
    if not (directory / "tests" / "task.json").is_file():
        return await read_foreign(
            directory, backend, settings, accept_image_steps=accept_image_steps
        )
    task = task_from_json((directory / "tests" / "task.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        unpack(directory / "environment" / "workspace.tar", tree)
        base = await backend.import_tree(name)
        setting = json.loads((directory / "tests" / "setting.json").read_text(encoding="utf-8"))
        tree_program.replace(name, setting["patterns"], str(directory / "tests" / "pristine.tar"))
        pristine = await backend.import_tree(name)
    mounts: tuple[Mount, ...] = ()
    packed = directory / "environment" / "site.tar"
    if packed.is_file():
        site = directory / ".site"
        if not site.exists():
            unpack(packed, site)
        mounts = (Mount(source=str(site.resolve()), target=SITE_TARGET),)
    return dataclasses.replace(
        task,
        instruction=(directory / "instruction.md").read_text(encoding="utf-8"),
        base=base,
        pristine=pristine,
        mounts=mounts,
    )


def read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: this is no Harbor task directory") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def unpack(archive: Path, target: Path) -> None:
    """A tar of files that we wrote, or somebody edited: nothing outside `target` is touched."""
    try:
        with tarfile.open(archive) as tar:
            # Links may point anywhere: they are made, never followed.
            tree_program.unpack(tar, str(target))
    except FileNotFoundError:
        raise ValueError(f"{archive} is missing") from None
    except (tarfile.TarError, AssertionError) as error:
        raise ValueError(f"{archive}: {error!r}") from error


def task_toml(task: Task) -> str:
    """The settings that Harbor reads; the whole task is in `tests/task.json`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", task.id).strip(".-") or "task"
    network = "allowlist" if task.egress else "no-network"
    lines = [
        f'schema_version = "{SCHEMA_VERSION}"',
        "[task]",
        f"name = {_quoted(f'{ORGANISATION}/{name}')}",
        "[metadata]",
        f"id = {_quoted(task.id)}",
        f"kind = {_quoted(str(task.origin.get('kind', '')))}",
        "[metadata.difficulty]",
        *(f"{_quoted(key)} = {float(value)!r}" for key, value in task.difficulty.items()),
        "[verifier]",
        f"timeout_sec = {task.tests.timeout_s + 60.0!r}",
        "[agent]",
        f"timeout_sec = {task.limits.wall_s!r}",
        "[environment]",
        f"cpus = {max(1, round(task.limits.cpus))}",
        f"memory_mb = {task.limits.memory_bytes // _MIB}",
        f"storage_mb = {task.limits.disk_bytes // _MIB}",
        'workdir = "/workspace"',
        f'network_mode = "{network}"',
    ]
    if task.egress:
        hosts = sorted({rule.host for rule in task.egress})
        lines.append(f"allowed_hosts = [{', '.join(_quoted(host) for host in hosts)}]")
    lines.append("[environment.env]")
    lines += [f"{_quoted(key)} = {_quoted(value)}" for key, value in task.env.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, but for DEL and characters that need two escapes.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tar(root: Path) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            if "__pycache__" not in path.parts and not path.is_dir():
                archive.add(path, str(path.relative_to(root)), recursive=False)
    return output.getvalue()
