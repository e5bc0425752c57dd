"""Shared by all tests: one thread, and a reason for each test that this machine cannot run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test imports torch: results must not depend on how many cores there are.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# So that a process which a test starts sees its packages as a launcher's would.
os.environ["PYTHONSAFEPATH"] = "1"

_GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all of tests/gpu as `gpu`, and skips what needs more CUDA devices than there are."""
    for item in items:
        if item.path.is_relative_to(_GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
    needed = {item: _num_devices_needed(item) for item in items}
    if not any(needed.values()):
        return
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, count in needed.items():
        if count > available:
            what = "a CUDA device" if count == 1 else f"{count} CUDA devices"
            item.add_marker(pytest.mark.skip(reason=f"needs {what}; torch sees {available}"))


def _num_devices_needed(item: pytest.Item) -> int:
    if item.get_closest_marker("multi_gpu"):
        return 2
    return 1 if item.get_closest_marker("gpu") else 0
