"""What all layout tests look at: the files that a commit of this tree would hold."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def repository_files() -> list[Path]:
    """Paths from the root of all files that git tracks or would add; symlinks are themselves."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.split("\0") if name]
    return [file for file in files if (ROOT / file).exists()]  # not one that is being deleted
