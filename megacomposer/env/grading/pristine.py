"""The true tests and runner configuration of a task, read from its pristine state."""

from __future__ import annotations

import dataclasses
import tomllib

from megacomposer.env.grading.test_run import looks_like_tests, test_files
from megacomposer.env.grading.workspace_diff import Manifest, pack_files, read_manifest
from megacomposer.env.sandbox import Sandbox, SandboxFileError
from megacomposer.env.task import TestPlan

CONFIG_FILES = (
    *("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
    *("pyproject.toml", "tox.ini", "setup.cfg"),
)
"""In pytest's order of precedence."""
ANYWHERE = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "sitecustomize", "usercustomize"),
    *("*.pth", "*.pyc", "__pycache__"),
)
"""Run by Python or pytest without being imported by a test."""
AT_IMPORT_ROOTS = ("pytest.py", "pytest", "_pytest", "pluggy", "unittest", "unittest.py")
"""Would take the place of the runner, in processes that tests start."""
ALWAYS = (
    *CONFIG_FILES,
    *(pattern for name in ANYWHERE for pattern in (name, f"*/{name}")),
    *(pattern for name in AT_IMPORT_ROOTS for pattern in (name, f"src/{name}")),
)
"""Protected in every task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pristine:
    """What grading puts back."""

    patterns: tuple[str, ...]
    archive: bytes
    """A tar of what matches `patterns`."""
    files: Manifest
    config_file: str | None
    """The one that pytest would use."""

    def may_exist(self, file: str) -> bool:
        """False for a test file that is protected and not there: pytest would refuse to start."""
        return file in self.files or not looks_like_tests(file)


def protected_patterns(plan: TestPlan) -> tuple[str, ...]:
    """ALWAYS, the plan's own, and the files of its required tests.

    A required test outside a test file is an example in the documentation of a source file, which
    the answer may well have to write: that is not protected.
    """
    required = test_files((*plan.fail_to_pass, *plan.pass_to_pass))
    files = [name for name in required if plan.runner == "pytest" and looks_like_tests(name)]
    return tuple(dict.fromkeys((*ALWAYS, *plan.protected_paths, *files)))


async def read_pristine(sandbox: Sandbox, patterns: tuple[str, ...]) -> Pristine:
    """Of a sandbox of the pristine state. Raises SandboxError."""
    return Pristine(
        patterns=patterns,
        archive=await pack_files(sandbox, patterns=patterns),
        files=await read_manifest(sandbox, patterns),
        config_file=await find_config(sandbox),
    )


async def find_config(sandbox: Sandbox) -> str | None:
    """The configuration file that pytest would take in this workspace."""
    for name in CONFIG_FILES:
        try:
            text = (await sandbox.read_file(name)).decode(errors="replace")
        except SandboxFileError:
            continue
        if _configures_pytest(name, text):
            return name
    return None


def _configures_pytest(name: str, text: str) -> bool:
    if name == "pyproject.toml":
        try:
            return "pytest" in tomllib.loads(text).get("tool", {})
        except tomllib.TOMLDecodeError:
            return False
    if name == "tox.ini":
        return "[pytest]" in text
    return name != "setup.cfg" or "[tool:pytest]" in text
