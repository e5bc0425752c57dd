"""How a backend is chosen: never silently another one, never `local` by accident."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megacomposer.env import backends
from megacomposer.env.backends import open_backend, probe_backends
from megacomposer.env.sandbox import BackendUnavailableError


def test_local_needs_an_explicit_opt_in(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="allow_unsafe=True"):
        asyncio.run(open_backend("local", store=tmp_path))
    backend = asyncio.run(open_backend("local", store=tmp_path, allow_unsafe=True))
    assert not backend.isolates


def test_an_unknown_backend_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'podman'; known: auto, bubblewrap, gvisor"):
        asyncio.run(open_backend("podman", store=tmp_path))


def test_an_unknown_option_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="local has no option 'color'"):
        asyncio.run(open_backend("local", store=tmp_path, allow_unsafe=True, color="red"))


def test_every_backend_is_probed_and_says_what_is_missing() -> None:
    reasons = asyncio.run(probe_backends())
    assert set(reasons) == set(backends.BACKENDS)
    for reason in reasons.values():
        assert isinstance(reason, str)


def test_auto_takes_the_first_usable_and_never_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = asyncio.run(probe_backends())
    usable = [name for name in backends.AUTOMATIC if not reasons[name]]
    if usable:
        backend = asyncio.run(open_backend("auto", store=tmp_path))
        assert (backend.name, backend.isolates) == (usable[0], True)
    monkeypatch.setenv("PATH", str(tmp_path))  # no program is found
    with pytest.raises(BackendUnavailableError, match="bubblewrap: .*gvisor: "):
        asyncio.run(open_backend("auto", store=tmp_path, allow_unsafe=True))
