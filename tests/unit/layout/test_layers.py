"""The import layers of pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(_LINT_IMPORTS), "--no-logo", "--no-cache"], cwd=root, capture_output=True, text=True
    )


def test_rooms_import_only_lower_rooms() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("megacomposer/mesh/new.py", "import megacomposer.train", "only lower rooms"),
        ("kernels/new.py", "import megacomposer.config", "kernels import nothing of ours"),
        ("megacomposer/mesh/config.py", "import torch", "without torch"),
        ("megacomposer/tasks/new.py", "import torch", "without torch"),
        ("megacomposer/unplanned/__init__.py", "", "only lower rooms"),
    ],
)
def test_contracts_notice_a_wrong_import(tmp_path: Path, file: str, line: str, broken: str) -> None:
    shutil.copytree(ROOT / "megacomposer", tmp_path / "megacomposer", symlinks=True)
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert any(broken in row and "BROKEN" in row for row in result.stdout.splitlines())
