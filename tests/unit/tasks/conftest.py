"""Projects to take apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from shelf_project import SAMPLE, write_files


@pytest.fixture
def sample_project(tmp_path: Path) -> Path:
    """The project's directory."""
    return write_files(tmp_path / "shelf-keeper", SAMPLE)


@pytest.fixture
def project(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Writes another project: path -> text."""
    return lambda files: write_files(tmp_path / "project", files)
