"""Sandboxes for the tests that attack them: see sandbox_cases.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sandbox_cases import COMBINATIONS, Box, Host


@pytest.fixture(scope="session", params=COMBINATIONS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A backend as one user; skips, with the reason, what this machine cannot run."""
    if request.param.endswith("-root") and os.geteuid() != 0:
        pytest.skip(f"{request.param}: needs root")
    host = Host(request.param)
    try:
        if host.why_not:
            pytest.skip(f"{request.param}: {host.why_not}")
        yield host
    finally:
        host.close()


@pytest.fixture(scope="session")
def box(host: Host) -> Iterator[Box]:
    """One sandbox of `host` that harmless cases share."""
    with host.box() as box:
        yield box
