"""A task as a directory that another machine can load.

    TASKS/<task id>/task.json
    TASKS/<task id>/layers/<sha256>.tar
    TASKS/site/            packages that the tests need, shared by the tasks beside it

In `task.json` the sources of mounts are relative to it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megacomposer.env.sandbox import SandboxBackend
from megacomposer.env.task import Task, load_task

TASK_FILE = "task.json"


async def save_bundle(task: Task, backend: SandboxBackend, directory: Path, home: Path) -> None:
    """Write `task` and its layers into `directory`, which will in the end stand in `home`."""
    layers = directory / "layers"
    layers.mkdir(parents=True)
    for digest in dict.fromkeys((*task.base.layers, *task.pristine.layers)):
        await backend.export_layer(digest, str(layers / f"{digest}.tar"))
    final = home / directory.name
    mounts = tuple(
        dataclasses.replace(mount, source=os.path.relpath(mount.source, final))
        for mount in task.mounts
    )
    text = dataclasses.replace(task, mounts=mounts).to_json()
    (directory / TASK_FILE).write_text(text + "\n", encoding="utf-8")


async def load_bundle(
    directory: Path, backend: SandboxBackend, *, home: Path | None = None
) -> Task:
    """Put the layers into the backend's store, and return the task for this machine.

    `home` is the directory that relative mounts start in; None: where `directory` is.

    Raises ValueError where a file is missing or is not what its name says.
    """
    task = load_task(directory / TASK_FILE)
    for digest in dict.fromkeys((*task.base.layers, *task.pristine.layers)):
        file = directory / "layers" / f"{digest}.tar"
        if not file.is_file():
            raise ValueError(f"{directory}: layer {digest} is missing")
        found = await backend.import_layer(str(file))
        if found != digest:
            raise ValueError(f"{file}: its content is {found}")
    final = (home or directory.parent) / directory.name
    mounts = tuple(
        dataclasses.replace(mount, source=os.path.normpath(final.resolve() / mount.source))
        for mount in task.mounts
    )
    return dataclasses.replace(task, mounts=mounts)
