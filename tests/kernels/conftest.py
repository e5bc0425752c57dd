"""Runs Triton kernels on the CPU: triton reads TRITON_INTERPRET once, at its import, so the cases
run in a process of their own that starts with it set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

_CASES = Path(__file__).parent / "interpreted"


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """Runs tests/kernels/interpreted/<name> under pytest in the interpreter, and fails with its
    output if any case does, or if there was none."""

    def run(name: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        result = subprocess.run(
            [*command, str(_CASES / name)],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert " passed" in result.stdout
        assert " skipped" not in result.stdout

    return run


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Makes torch fill what `torch.empty` hands out with NaN, so that reading it shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
