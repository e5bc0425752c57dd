"""Files that survive a power cut, and the length and SHA-256 that tell whether they did."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a manifest says of one file."""

    length_bytes: int
    sha256: str
    """Lower-case hex digest of the whole file."""


def describe_file(path: Path) -> FileEntry:
    """Length and SHA-256 of a file, read back from the file system."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(length_bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def write_durably(path: Path, data: bytes) -> None:
    """Create or overwrite `path` and return once its content is on stable storage."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Give `path` new content at once: a reader, or a crash, sees the old or the new, no mix."""
    temporary = path.with_name(f".{path.name}.new")
    write_durably(temporary, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put the directory's entries (created, renamed, removed names) on stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
