"""Which sandbox backends there are, which of them this machine can run, and how one is opened.

    backend = await open_backend("auto", store=Path("~/.cache/megacomposer/layers"))

A backend is a module with `async probe() -> str` ("" where it is usable, else why not and the
remedy) and a class that takes `(store, *, record, **options)`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.local import LocalBackend
from megacomposer.env.sandbox import BackendUnavailableError, SandboxBackend

BACKENDS = {
    "bubblewrap": ("megacomposer.env.backend.bubblewrap", "BubblewrapBackend"),
    "gvisor": ("megacomposer.env.backend.gvisor", "GvisorBackend"),
    "docker": ("megacomposer.env.backend.container", "DockerBackend"),
    "e2b": ("megacomposer.env.backend.e2b", "E2bBackend"),
}
"""Name -> module and class. `local` is no sandbox, and not among them."""
AUTOMATIC = ("bubblewrap", "gvisor")
"""What "auto" tries, in this order."""


async def open_backend(
    name: str,
    *,
    store: Path,
    record: Record = discard,
    allow_unsafe: bool = False,
    **options: Any,
) -> SandboxBackend:
    """The backend `name`, or for "auto" the first usable of AUTOMATIC; its layers are in `store`.

    `allow_unsafe` is the opt-in that "local" needs: it isolates nothing. `options` are the
    backend's own.

    Raises ValueError for a name or an option that does not exist, and BackendUnavailableError,
    with the remedy, where this machine cannot run it: another one is never taken instead.
    """
    if name == "local":
        if not allow_unsafe:
            raise BackendUnavailableError(
                "local isolates nothing: commands can do all that this process can. Pass "
                'allow_unsafe=True for trusted code, or use "bubblewrap" or "gvisor"'
            )
        _check_options(name, LocalBackend, options)
        return LocalBackend(LayerStore(store), record=record)
    if name != "auto" and name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS, "local"])
        raise ValueError(f"unknown sandbox backend {name!r}; known: {known}")
    reasons = {}
    for candidate in AUTOMATIC if name == "auto" else (name,):
        module, kind = _load(candidate)
        _check_options(candidate, kind, options)
        reasons[candidate] = await module.probe()
        if reasons[candidate]:
            continue
        try:
            backend: SandboxBackend = kind(LayerStore(store), record=record, **options)
        except BackendUnavailableError as error:  # it was usable at an earlier probe
            reasons[candidate] = str(error)
        else:
            return backend
    raise BackendUnavailableError("; ".join(f"{key}: {text}" for key, text in reasons.items()))


async def probe_backends() -> dict[str, str]:
    """Of each backend: "" where this machine can run it, else why not and the remedy."""
    modules = [_load(name)[0] for name in BACKENDS]
    reasons = await asyncio.gather(*(module.probe() for module in modules))
    return dict(zip(BACKENDS, reasons, strict=True))


def _load(name: str) -> tuple[ModuleType, Any]:
    module_name, class_name = BACKENDS[name]
    module = importlib.import_module(module_name)
    return module, getattr(module, class_name)


def _check_options(name: str, kind: Any, options: dict[str, Any]) -> None:
    known = set(inspect.signature(kind).parameters) - {"store", "record"}
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"backend {name} has no option {unknown[0]!r}; its options: "
            f"{', '.join(sorted(known)) or 'none'}"
        )
