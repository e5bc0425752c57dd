"""What tests of grading share: a backend, a site with this environment's pytest, small tasks."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import shutil
from collections.abc import AsyncIterator, Coroutine, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megacomposer.env.audit import AuditLog
from megacomposer.env.backend import bubblewrap
from megacomposer.env.backends import open_backend
from megacomposer.env.grading.evidence import Verdict
from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.sandbox import Mount, SandboxBackend
from megacomposer.env.task import Task, TestPlan

PYTEST_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")

SOURCE = "def add(a, b):\n    raise NotImplementedError\n"
SOLUTION = "def add(a, b):\n    return a + b\n"
TESTS = """import unittest

from adder import add


def test_small():
    assert add(1, 2) == 3


def test_large():
    assert add(40, 2) == 42


class TestZero(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 0), 0)


def test_module_has_a_name():
    assert add.__name__ == "add"
"""
FAIL_TO_PASS = (
    "tests/test_adder.py::test_small",
    "tests/test_adder.py::test_large",
    "tests/test_adder.py::TestZero::test_zero",
)
PASS_TO_PASS = ("tests/test_adder.py::test_module_has_a_name",)


def copy_site(target: Path, names: tuple[str, ...] = PYTEST_PACKAGES) -> Path:
    """Installed packages of this environment, as `install_site` would make them."""
    for name in names:
        distribution = metadata.distribution(name)
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." in file.parts or not source.is_file():
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / file)
    return target


def write_tree(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def diff(path: str, before: str | None, after: str | None) -> bytes:
    """A patch of one text file; None: the file does not exist."""
    head = f"diff --git a/{path} b/{path}\n"
    if before is None:
        head += "new file mode 100644\n"
    if after is None:
        head += "deleted file mode 100644\n"
    old, new = (before or "").splitlines(True), (after or "").splitlines(True)
    lines = difflib.unified_diff(
        old,
        new,
        "/dev/null" if before is None else f"a/{path}",
        "/dev/null" if after is None else f"b/{path}",
    )
    return (head + "".join(lines)).encode()


@contextlib.asynccontextmanager
async def grading_backend(store: Path, audit: AuditLog) -> AsyncIterator[SandboxBackend]:
    """bubblewrap, or plain processes where this machine cannot run it.

    MEGACOMPOSER_TEST_BACKEND names another one.
    """
    name = os.environ.get("MEGACOMPOSER_TEST_BACKEND", "")
    if not name:
        name = "local" if await bubblewrap.probe() else "bubblewrap"
    backend = await open_backend(
        name, store=store, record=audit.record, allow_unsafe=name == "local"
    )
    try:
        yield backend
    finally:
        await backend.close()


async def adder_task(
    backend: SandboxBackend, site: Path, work: Path, files: Mapping[str, str], **plan: Any
) -> Task:
    """A package `adder` without its addition, and tests for it."""
    base = {"adder.py": SOURCE, "tests/test_adder.py": TESTS, **files}
    snapshot = await backend.import_tree(str(write_tree(work, base)))
    return Task(
        id="adder",
        instruction="Make add add.",
        base=snapshot,
        pristine=snapshot,
        tests=TestPlan(
            **{
                "fail_to_pass": FAIL_TO_PASS,
                "pass_to_pass": PASS_TO_PASS,
                "protected_paths": ("tests",),
                "timeout_s": 60.0,
                **plan,
            }
        ),
        mounts=(Mount(source=str(site), target="/opt/site"),),
        gold_patch=diff("adder.py", SOURCE, SOLUTION).decode(),
    )


class Grader:
    """Grades patches of the adder task, synchronously, each in a real sandbox."""

    def __init__(self, root: Path) -> None:
        self.audit = AuditLog()
        self.site = copy_site(root / "site")
        self.mounts = (Mount(source=str(self.site), target="/opt/site"),)
        self._root, self._trees = root, 0
        self._runner = asyncio.Runner()
        self._opened = grading_backend(root / "store", self.audit)
        self.backend = self.run(self._opened.__aenter__())
        self._verifiers: dict[str, Verifier] = {}

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *error: object) -> None:
        self.run(self._opened.__aexit__(None, None, None))
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def task(self, files: Mapping[str, str] | None = None, **plan: Any) -> Task:
        self._trees += 1
        work = self._root / f"work{self._trees}"
        task = self.run(adder_task(self.backend, self.site, work, files or {}, **plan))
        assert isinstance(task, Task)
        return task

    def grade(
        self,
        patch: bytes,
        *,
        files: Mapping[str, str] | None = None,
        verifier: Mapping[str, Any] | None = None,
        **plan: Any,
    ) -> Verdict:
        options = verifier or {}
        # One for each setting: it keeps the pristine states that it has read.
        judge = self._verifiers.setdefault(
            repr(options), Verifier(self.backend, record=self.audit.record, **options)
        )
        verdict = self.run(judge.verify(self.task(files, **plan), patch))
        assert isinstance(verdict, Verdict)
        return verdict
