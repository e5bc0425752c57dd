"""The manifest: length and SHA-256 of every file of a checkpoint, and what they are checked by.

torch's own format notices none of a flipped bit in the payload, a shard of another step, or two
shards swapped, so every byte is checked here before any of it is trusted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import FileEntry, describe_file, write_durably

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class CorruptCheckpointError(ValueError):
    """A checkpoint whose files are not the ones that were saved; the message names them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The complete list of a checkpoint's files."""

    step: int
    files: Mapping[str, FileEntry]
    """Path relative to the checkpoint directory, with `/`, to what it must be."""


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the checkpoint directory `path`, durably."""
    content = _content(manifest)
    content["content_sha256"] = _digest(content)
    write_durably(path / MANIFEST_NAME, (json.dumps(content, indent=1) + "\n").encode())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`, checked against its own digest.

    Raises ValueError for a format that this version does not read, and CorruptCheckpointError when
    the file is absent, damaged, or belongs to another step than the directory's name says.
    """
    file = path / MANIFEST_NAME
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CorruptCheckpointError(f"{file} is missing: not a complete checkpoint") from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{file} is damaged: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{file} is damaged: not a JSON object")
    recorded = content.pop("content_sha256", None)
    if recorded != _digest(content):
        raise CorruptCheckpointError(f"{file} is damaged: its content has another SHA-256")
    check_format(file, content.get("format"))
    if path.name.startswith("step_") and path.name != f"step_{content['step']:08d}":
        raise CorruptCheckpointError(f"{file} belongs to step {content['step']}, not {path.name}")
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    return Manifest(step=content["step"], files=files)


def check_format(file: Path, found: Any) -> None:
    """Raise ValueError unless `found`, the format version in `file`, is the one we read."""
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{file} has checkpoint format {found!r}; this version of megacomposer reads format "
            f"{FORMAT_VERSION}. Load it with the version that wrote it (see `versions` in "
            "state.json beside it)"
        )


def check_files(path: Path, manifest: Manifest, names: Iterable[str], *, deep: bool) -> None:
    """Raise CorruptCheckpointError that names every bad file among `names`.

    `deep` reads the files and compares SHA-256; otherwise only presence and length are checked.
    """
    faults = [
        f"{path / name} {fault}"
        for name in names
        if (fault := _fault(path / name, manifest.files[name], deep)) is not None
    ]
    if faults:
        raise CorruptCheckpointError("; ".join(faults))


def verify_checkpoint(path: Path, *, deep: bool) -> None:
    """Check one checkpoint directory; CorruptCheckpointError names every bad file.

    Not collective: reads everything in this process (about 1-2 GB/s when `deep`).
    """
    manifest = read_manifest(path)
    check_files(path, manifest, manifest.files, deep=deep)


def divide_files(manifest: Manifest, parts: int) -> list[list[str]]:
    """The manifest's files in `parts` lists of about equal bytes, the same on every rank."""
    lists: list[list[str]] = [[] for _ in range(parts)]
    loads_bytes = [0] * parts
    by_length = sorted(manifest.files.items(), key=lambda item: (-item[1].length_bytes, item[0]))
    for name, entry in by_length:
        lightest = loads_bytes.index(min(loads_bytes))
        lists[lightest].append(name)
        loads_bytes[lightest] += entry.length_bytes
    return lists


def _fault(file: Path, expected: FileEntry, deep: bool) -> str | None:
    try:
        length_bytes = file.stat().st_size
        if length_bytes != expected.length_bytes:
            return f"is damaged: {length_bytes} bytes, the manifest says {expected.length_bytes}"
        if deep and describe_file(file) != expected:
            return "is damaged: its SHA-256 is not the one in the manifest"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _content(manifest: Manifest) -> dict[str, Any]:
    files = {name: dataclasses.asdict(entry) for name, entry in sorted(manifest.files.items())}
    return {"format": FORMAT_VERSION, "step": manifest.step, "files": files}


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
