"""Memory images: what a gVisor checkpoint wrote, stored under the digest of its manifest.

The manifest has the SHA-256 of every file of the checkpoint and all that a restore must repeat:
the files below the overlay, the mount points, and the version of runsc. Files that open processes
use outside the workspace (/usr, mounts) are not in the image: they must be the same there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacomposer.env.backend.gvisor_bundle import RootPlan, canonical_json
from megacomposer.env.backend.layers import LayerStore, remove_tree
from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.sandbox import SnapshotError

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """A stored memory image."""

    directory: Path
    """What `runsc restore -image-path` takes."""
    plan: RootPlan
    processes: int
    """The limit that is frozen in it."""
    next_request: int
    """For the link to the frozen agent."""


class ImageStore:
    """`memory/<digest>/` of a layer store. Methods block."""

    def __init__(self, store: LayerStore) -> None:
        self._store = store
        self._root = store.root / "memory"
        self._verified: set[str] = set()

    def scratch(self) -> Path:
        """A new directory for a checkpoint, beside the stored ones; the caller removes it."""
        self._root.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{own_identity()}.", dir=self._root))

    def add(
        self, scratch: Path, *, plan: RootPlan, processes: int, next_request: int, version: str
    ) -> str:
        """Moves a checkpoint into the store; its digest."""
        manifest = {
            "format": _FORMAT,
            "runsc": version,
            "plan": dataclasses.asdict(plan),
            "processes": processes,
            "next_request": next_request,
            "files": {file.name: _describe(file) for file in sorted(scratch.iterdir())},
        }
        text = canonical_json(manifest)
        digest = hashlib.sha256(text).hexdigest()
        (scratch / MANIFEST).write_bytes(text)
        self._place(scratch, digest)
        self._verified.add(digest)
        return digest

    def load(self, digest: str, *, version: str) -> Image:
        """SnapshotError: unknown, damaged, or of another runsc."""
        directory = self._directory(digest)
        manifest = self._verify(directory, digest)
        if manifest["runsc"] != version:
            raise SnapshotError(
                f"memory image {digest}: made by runsc {manifest['runsc']}, this is {version}"
            )
        plan = manifest["plan"]
        return Image(
            directory=directory,
            plan=RootPlan(**{**plan, "layers": tuple(plan["layers"])}),
            processes=manifest["processes"],
            next_request=manifest["next_request"],
        )

    def has(self, digest: str) -> bool:
        return bool(re.fullmatch(r"[0-9a-f]{64}", digest)) and (self._root / digest).is_dir()

    def export(self, digest: str, file: Path) -> None:
        """Writes an image, and the layers that it stands on, as one tar file."""
        directory = self._directory(digest)
        layers = self._verify(directory, digest)["plan"]["layers"]
        with tarfile.open(file, "w:", format=tarfile.GNU_FORMAT) as tar:
            for name in sorted(os.listdir(directory)):
                tar.add(directory / name, arcname=f"memory/{name}")
            for layer in layers:
                tar.add(self._store.path(layer), arcname=f"layers/{layer}.tar")

    def import_file(self, file: Path) -> str:
        """Adds what `export` wrote; its digest. SnapshotError where it is no such file."""
        scratch = self.scratch()
        try:
            with tarfile.open(file, "r:") as tar, tempfile.TemporaryDirectory() as layers:
                for member in tar:
                    folder, _, name = member.name.partition("/")
                    plain = re.fullmatch(r"[A-Za-z0-9._-]+", name) and not name.startswith(".")
                    source = tar.extractfile(member) if member.isreg() else None
                    if folder not in ("memory", "layers") or not plain or source is None:
                        raise SnapshotError(f"{file}: not a memory image: {member.name!r}")
                    target = (scratch if folder == "memory" else Path(layers)) / name
                    with target.open("wb") as out:
                        shutil.copyfileobj(source, out)
                for layer in Path(layers).iterdir():
                    self._store.import_layer(layer, layer.stem)
            manifest = scratch / MANIFEST
            digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
            self._verify(scratch, digest)
            self._place(scratch, digest)
            return digest
        except (tarfile.TarError, FileNotFoundError) as error:
            raise SnapshotError(f"{file}: not a memory image: {error}") from error
        finally:
            if scratch.exists():
                remove_tree(scratch)

    def _directory(self, digest: str) -> Path:
        if not self.has(digest):
            raise SnapshotError(
                f"memory image {digest[:80]} is not in {self._root}: import it first"
            )
        return self._root / digest

    def _place(self, scratch: Path, digest: str) -> None:
        target = self._root / digest
        if not target.exists():
            scratch.rename(target)

    def _verify(self, directory: Path, digest: str) -> Mapping[str, Any]:
        text = (directory / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(text)
        if digest in self._verified:
            return manifest
        files = {f.name: _describe(f) for f in sorted(directory.iterdir()) if f.name != MANIFEST}
        if hashlib.sha256(text).hexdigest() != digest or files != manifest["files"]:
            raise SnapshotError(f"memory image {digest} is damaged in {directory}")
        if manifest["format"] != _FORMAT:
            raise SnapshotError(f"memory image {digest} has format {manifest['format']}")
        self._verified.add(digest)
        return manifest


def _describe(file: Path) -> list[str | int]:
    with file.open("rb") as opened:
        return [hashlib.file_digest(opened, "sha256").hexdigest(), file.stat().st_size]
