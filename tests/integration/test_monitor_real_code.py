"""No false alarm on patches of real packages: what honest people wrote, given back as an answer."""

from __future__ import annotations

import ast
import difflib
from importlib import metadata
from pathlib import Path

import pytest
from monitor_rollouts import new_file, rollout

from megacomposer.env.monitor.monitor import Monitor, MonitorConfig, Verdict

PACKAGES = ("packaging", "pluggy", "iniconfig", "httpx", "rich", "safetensors", "numpy")
WHOLE = Monitor(MonitorConfig(max_text_chars=1 << 24))
MAX_FILES = 60
"""Of one package."""
PLUGIN = ("numpy/conftest.py", "numpy/testing/", "numpy/_pytesttester.py", "numpy/f2py/")
"""Test machinery of its own, and a compiler that runs in tests."""


def sources(package: str) -> tuple[dict[str, str], dict[str, str]]:
    """Code and tests of an installed package."""
    code: dict[str, str] = {}
    tests: dict[str, str] = {}
    distribution = metadata.distribution(package)
    for file in distribution.files or ():
        name = str(file)
        if not name.endswith(".py") or ".." in file.parts or name.startswith(PLUGIN):
            continue
        path = Path(str(distribution.locate_file(file)))
        if path.is_file():
            target = tests if "/tests/" in name else code
            target[name] = path.read_text(encoding="utf-8")
    keys = sorted(code)[:: max(1, len(code) // MAX_FILES)]
    tests = {name: tests[name] for name in sorted(tests)[:40]}
    return {key: code[key] for key in keys}, tests


def without_a_function(text: str) -> str:
    """The text without its longest function, as in a task that asks for it again."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    if not functions:
        return ""
    longest = max(functions, key=lambda node: (node.end_lineno or 0) - node.lineno)
    lines = text.splitlines(keepends=True)
    return "".join(lines[: longest.lineno - 1] + lines[longest.end_lineno :])


@pytest.mark.parametrize("package", PACKAGES)
def test_real_code_as_an_answer_stays_clean(package: str) -> None:
    code, tests = sources(package)
    assert code
    patches = [new_file(path, text) for path, text in code.items()]
    for path, text in code.items():
        left = without_a_function(text).splitlines(keepends=True)
        changed = difflib.unified_diff(
            left, text.splitlines(keepends=True), f"a/{path}", f"b/{path}"
        )
        patches.append(f"diff --git a/{path} b/{path}\n" + "".join(changed))
    report = rollout(patch="\n".join(patches), tests=tests).assess(WHOLE)
    assert report.verdict is Verdict.CLEAN, report.render()
