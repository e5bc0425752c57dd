"""`dataset.json`: the manifest of a prepared dataset, and what it lets a reader refuse."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megacomposer.data.indexed import bin_path, idx_path, incomplete_path

MANIFEST_NAME = "dataset.json"
MANIFEST_VERSION = 1
_CHUNK_BYTES = 1 << 22
_PAGE_BYTES = 4096
_SAMPLED_PAGES = 256


def manifest_path(directory: Path) -> Path:
    return directory / MANIFEST_NAME


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of `directory`, or None when it has none.

    Raises ValueError, naming the file, for a damaged manifest and for a directory in which files
    were being replaced when the writer was killed.
    """
    path = manifest_path(directory)
    if not path.exists():
        if incomplete_path(path).exists():
            raise ValueError(
                f"{directory} was being replaced when its writer stopped: {path.name} is missing; "
                "run prepare_data.py on it again"
            )
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}); prepare the dataset again with --force"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("version") != MANIFEST_VERSION:
        raise ValueError(f"{path} is not a manifest of version {MANIFEST_VERSION}")
    return manifest


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_files(directory: Path, manifest: dict[str, Any], *, checksums: bool) -> None:
    """ValueError, naming the file, when one is missing or has another size (or SHA-256)."""
    for name, entry in manifest["files"].items():
        path = directory / name
        size = path.stat().st_size if path.exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(
                f"{path} {found}, {MANIFEST_NAME} says {entry['bytes']}; "
                "prepare the dataset again with --force"
            )
        if checksums and file_sha256(path) != entry["sha256"]:
            raise ValueError(
                f"{path} does not have the SHA-256 of {MANIFEST_NAME}; "
                "prepare the dataset again with --force"
            )


def manifest_of(prefix: str) -> dict[str, Any] | None:
    """The manifest that covers the pair `prefix`, sizes checked; None for a pair from elsewhere."""
    data, index = bin_path(prefix), idx_path(prefix)
    manifest = read_manifest(data.parent)
    if manifest is None or not {data.name, index.name} <= manifest["files"].keys():
        return None
    pair = {name: manifest["files"][name] for name in (data.name, index.name)}
    check_files(data.parent, {"files": pair}, checksums=False)
    return manifest


def sampled_fingerprint(prefix: str) -> str:
    """SHA-256 over the index, the size of the `.bin`, and 256 evenly spread pages of it.

    Cheap for any size, but a change elsewhere in the `.bin` that keeps every length is not seen.
    """
    data = bin_path(prefix)
    size = data.stat().st_size
    digest = hashlib.sha256(f"{file_sha256(idx_path(prefix))}/{size}".encode())
    pages = -(-size // _PAGE_BYTES)
    count = min(pages, _SAMPLED_PAGES)
    with open(data, "rb") as file:
        for k in range(count):
            file.seek(k * (pages - 1) // max(count - 1, 1) * _PAGE_BYTES)
            digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def data_fingerprint(prefix: str) -> str:
    """What a checkpoint remembers of the dataset `prefix`.

    The SHA-256 of both files from the manifest when there is one, else (data made by Megatron's
    own tool) `sampled_fingerprint`.
    """
    manifest = manifest_of(prefix)
    if manifest is None:
        return sampled_fingerprint(prefix)
    files = manifest["files"]
    names = (bin_path(prefix).name, idx_path(prefix).name)
    joined = "/".join(files[name]["sha256"] for name in names)
    return hashlib.sha256(joined.encode()).hexdigest()


def check_tokenizer(prefix: str, fingerprint: str) -> None:
    """ValueError when the manifest of `prefix` says that another tokenizer made it."""
    manifest = manifest_of(prefix)
    if manifest is not None and manifest["tokenizer"]["fingerprint"] != fingerprint:
        made_with = manifest["tokenizer"]
        raise ValueError(
            f"{prefix} was made with tokenizer {made_with['spec']} ({made_with['fingerprint']}), "
            f"the run's is {fingerprint}; set data.tokenizer, or prepare the data with it"
        )
