"""state.json: the layout-free state of the host, and what it is compared by."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import megacomposer

from .agreement import Ranks
from .manifest import FORMAT_VERSION, check_format
from .planner import Table, Tensors, tensor_table

STATE_NAME = "state.json"
_LISTED = 10  # names per kind of mismatch in a message


def compose_state(
    step: int, host_state: dict[str, Any], placement: dict[str, Any]
) -> dict[str, Any]:
    """What `state.json` holds."""
    return {
        "format": FORMAT_VERSION,
        "step": step,
        "host_state": host_state,
        "placement": placement,
        "versions": {
            "megacomposer": megacomposer.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint directory; ValueError for a format of another version.

    Keys: format, step, host_state, placement, versions. Not collective, not verified.
    """
    file = path / STATE_NAME
    state = json.loads(file.read_bytes())
    check_format(file, state.get("format"))
    return dict(state)


def describe_placement(
    ranks: Ranks, tensors: Tensors, layout: Mapping[str, int] | None
) -> dict[str, Any]:
    """What must be equal for a rank's random state to mean the same again. Collective."""
    blocks = sorted(
        (key, _tuples(entry.local_shape), [_tuples(b.global_offset, b.shape) for b in entry.blocks])
        for key, (entry, _) in tensors.items()
    )
    digests = ranks.gather(_digest(blocks))
    return {
        "world_size": ranks.size,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "layout": dict(layout or {}),
        "blocks": _digest(digests),
    }


def check_arguments(
    ranks: Ranks,
    step: int,
    tensors: Tensors,
    host_state: dict[str, Any],
    placement: dict[str, Any],
) -> None:
    """ValueError on every rank unless the ranks ask for the same thing and it can be written."""

    def check() -> dict[str, Any]:
        _check_json(host_state, "host_state")
        for key, (layout, local) in tensors.items():
            if tuple(local.shape) != tuple(layout.local_shape):
                raise ValueError(
                    f"{key}: the local tensor is {tuple(local.shape)}, its layout says "
                    f"{tuple(layout.local_shape)}"
                )
        return {
            "step": step,
            "host_state": _digest(host_state),
            "layout": placement["layout"],
            "tensors": tensor_table(tensors),
        }

    first, *others = ranks.each(check)
    for rank, other in enumerate(others, start=1):
        unequal = [name for name in first if first[name] != other[name]]
        if "tensors" in unequal:
            keys = {k for k, _ in set(first["tensors"].items()) ^ set(other["tensors"].items())}
            raise ValueError(
                f"ranks 0 and {rank} save other keys, shapes or dtypes: {shorten(keys)}"
            )
        if unequal:
            raise ValueError(f"ranks 0 and {rank} save another {', '.join(unequal)}")


def check_same_model(
    path: Path,
    state: Mapping[str, Any],
    saved: Table,
    tensors: Tensors,
    expect: Mapping[str, Any],
    allow_unused: bool,
) -> None:
    """One ValueError that lists every way in which the checkpoint is not of `tensors`."""
    wanted = tensor_table(tensors)
    differences = []
    if missing := wanted.keys() - saved.keys():
        differences.append(f"missing in the checkpoint: {shorten(missing)}")
    if not allow_unused and (unexpected := saved.keys() - wanted.keys()):
        differences.append(f"in the checkpoint only: {shorten(unexpected)}")
    unequal = [key for key in wanted.keys() & saved.keys() if wanted[key] != saved[key]]
    if unequal:
        shown = [f"{key} ({_shown(saved[key])}, here {_shown(wanted[key])})" for key in unequal]
        differences.append(f"of another dtype or shape: {shorten(shown)}")
    for key, value in expect.items():
        if state["host_state"].get(key) != value:
            there = state["host_state"].get(key)
            differences.append(f"{key} is {there!r} in the checkpoint and {value!r} here")
    if differences:
        raise ValueError(f"{path} is a checkpoint of another model: " + "; ".join(differences))


def shorten(names: Iterable[str]) -> str:
    """The first few names in order, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def _check_json(value: Any, where: str) -> None:
    """Refuse what JSON would bring back as something else (tuples, int keys) or not at all."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings")
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check_json(item, f"{where}[{position}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ValueError(f"{where} is a {type(value).__name__}; state.json holds plain JSON values")


def _shown(entry: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = entry
    return f"{dtype} {list(shape)}"


def _tuples(*shapes: Iterable[int]) -> list[tuple[int, ...]]:
    return [tuple(shape) for shape in shapes]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
