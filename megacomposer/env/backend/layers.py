"""The layer store: snapshots of files, named by their content, shared by all backends.

`layers/<sha256>.tar` are the layers (see `layer_archive`), `unpacked*/<sha256>/` the same files as
lower directories of an overlay. Several processes may use one store at once: everything is made
beside and renamed, and nothing is changed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from megacomposer.env.backend.layer_archive import (
    EPOCH_S,
    OPAQUE_XATTRS,
    TREES,
    Packer,
    Unpacker,
    read_members,
)
from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.sandbox import USER_ID, Snapshot, SnapshotError

SQUASH_LAYERS = 50
"""Chains as long as this are squashed: the kernel stacks 500 at most, and lookups slow down."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 1 << 20


class LayerStore:
    """Layers of one directory of the host. Its methods block; none needs the network."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self._layers = self.root / "layers"
        is_root = os.geteuid() == 0
        # Attributes and owners differ, so root and a user never share unpacked files.
        self._unpacked = self.root / ("unpacked" if is_root else f"unpacked-{os.geteuid()}")
        self.opaque_xattr = OPAQUE_XATTRS[0] if is_root else OPAQUE_XATTRS[1]
        """What marks an opaque directory in an overlay that this process mounts."""
        self._owner = USER_ID if is_root else None
        self._verified: set[str] = set()
        self._layers.mkdir(parents=True, exist_ok=True)
        self._unpacked.mkdir(exist_ok=True)

    def path(self, digest: str) -> Path:
        """The tar file of a layer. SnapshotError if the store does not have it."""
        if not _DIGEST.fullmatch(digest):
            raise SnapshotError(f"{digest[:80]!r} is not a layer digest")
        file = self._layers / f"{digest}.tar"
        if not file.exists():
            raise SnapshotError(f"layer {digest} is not in {self.root}: import it first")
        return file

    def import_tree(self, path: Path) -> str:
        """Packs a directory as the workspace of a new layer; its digest.

        Links stay links; times, owners and modes other than "executable" are dropped. ValueError
        names a special file.
        """
        return self.pack_trees({"workspace": path})

    def pack_trees(
        self, trees: Mapping[str, Path], *, exact: bool = False, mtime_s: int | None = EPOCH_S
    ) -> str:
        """Packs whole trees (keys of TREES) as one layer; its digest.

        `exact` keeps the modes and leaves out sockets and pipes; `mtime_s` None keeps the times.
        """
        assert set(trees) <= set(TREES)

        def fill(out: IO[bytes]) -> bool:
            packer = Packer(out, exact=exact, mtime_s=mtime_s)
            for name in TREES:
                if name in trees:
                    with _directory(trees[name]) as directory:
                        packer.add_tree(name, directory)
            packer.finish()
            return True

        digest = self._add(fill)
        assert digest is not None
        return digest

    def pack_upper(
        self, directory: Path | int, *, below: Snapshot, max_bytes: int | None = None
    ) -> str | None:
        """Packs an overlay's upper directory (path, or open descriptor); None: nothing changed.

        `below` is what the overlay stands on. Sockets, pipes and names that begin with `.wh.` are
        left out. SnapshotError if the files are larger than `max_bytes` together.
        """

        def fill(out: IO[bytes]) -> bool:
            packer = Packer(
                out,
                overlay_xattr=self.opaque_xattr,
                mtime_s=EPOCH_S + len(below.layers),
                max_bytes=max_bytes,
            )
            with _directory(directory) as upper:
                for name in TREES:
                    if name in os.listdir(upper):
                        with _directory(name, upper) as tree:
                            packer.add_tree(name, tree)
            packer.finish()
            return packer.entries > 0

        return self._add(fill)

    def export_layer(self, digest: str, file: Path) -> None:
        """Copies a layer to a file, checked on the way. SnapshotError if unknown or damaged."""
        with self.path(digest).open("rb") as source, file.open("wb") as out:
            if _copy(source, out) != digest:
                raise SnapshotError(f"layer {digest} is damaged in {self.root}: import it again")

    def import_layer(self, file: Path, digest: str | None = None) -> str:
        """Adds a layer file of another machine; its digest.

        Where `digest` is given, or the file is named `<sha256>.tar`, it must match. SnapshotError
        for that, and for absolute paths, `..`, devices and anything else that is no layer.
        """
        expected = digest or (file.stem if _DIGEST.fullmatch(file.stem) else None)

        def fill(out: IO[bytes]) -> bool:
            with file.open("rb") as source:
                actual = _copy(source, out)
                if expected and actual != expected:
                    raise SnapshotError(f"{file}: its digest is {actual}, not {expected}")
                source.seek(0)
                for _ in read_members(source, str(file)):
                    pass
            return True

        added = self._add(fill)
        assert added is not None
        return added

    def lower_directories(self, snapshot: Snapshot) -> list[Path]:
        """Directories for an overlay's `lowerdir`, highest first, unpacked where they are not."""
        return [self.unpacked(digest) for digest in reversed(snapshot.layers)]

    def unpacked(self, digest: str) -> Path:
        """The layer as a lower directory, made at the first call. SnapshotError if damaged."""
        target = self._unpacked / digest
        if _DIGEST.fullmatch(digest) and target.exists():
            return target
        with self._scratch(self._unpacked) as scratch:
            with _directory(scratch) as root:
                unpacker = Unpacker(root, owner=self._owner, overlay_xattr=self.opaque_xattr)
                with self._open_verified(digest) as file:
                    unpacker.unpack(file, digest)
            scratch.chmod(0o755)
            # Another process may have been faster; its files are the same.
            with contextlib.suppress(FileExistsError, OSError):
                scratch.rename(target)
            if not target.exists():
                raise SnapshotError(f"cannot unpack layer {digest} to {target}")
        return target

    def checkout(self, snapshot: Snapshot, directory: Path, *, owner: int | None = None) -> None:
        """Writes the merged files of a snapshot as plain `workspace/`, `home/` and `tmp/`.

        `directory` must exist and be empty; `owner` is chowned to, where given.
        """
        with _directory(directory) as root:
            for name in TREES:
                os.mkdir(name, 0o755, dir_fd=root)
                if owner is not None:
                    os.chown(name, owner, owner, dir_fd=root)
            unpacker = Unpacker(root, owner=owner, overlay_xattr=None)
            for digest in snapshot.layers:
                with self._open_verified(digest) as file:
                    unpacker.unpack(file, digest)

    def squash(self, snapshot: Snapshot) -> Snapshot:
        """The same files in one layer."""
        with self._scratch(self.root) as scratch:
            self.checkout(snapshot, scratch)
            trees = {name: scratch / name for name in TREES}
            digest = self.pack_trees(trees, exact=True, mtime_s=None)
        return Snapshot(layers=(digest,), memory=snapshot.memory)

    def extend(self, snapshot: Snapshot, digest: str | None) -> Snapshot:
        """`snapshot` with one more layer on top (None: as it is), squashed where it got long."""
        if digest is None:
            return snapshot
        longer = Snapshot(layers=(*snapshot.layers, digest))
        return self.squash(longer) if len(longer.layers) >= SQUASH_LAYERS else longer

    @contextlib.contextmanager
    def _open_verified(self, digest: str) -> Iterator[IO[bytes]]:
        with self.path(digest).open("rb") as file:
            if digest not in self._verified:
                if _copy(file, None) != digest:
                    raise SnapshotError(f"layer {digest} is damaged in {self.root}")
                self._verified.add(digest)
                file.seek(0)
            yield file

    def _add(self, fill: Callable[[IO[bytes]], bool]) -> str | None:
        """Writes a layer file beside, and renames it to its digest; None if `fill` says so."""
        with self._scratch(self._layers) as scratch:
            with (scratch / "layer").open("w+b") as out:
                if not fill(out):
                    return None
                out.flush()
                out.seek(0)
                digest = _copy(out, None)
                target = self._layers / f"{digest}.tar"
                if not target.exists() or target.stat().st_size != out.tell():
                    os.fsync(out.fileno())
                    (scratch / "layer").rename(target)
            self._verified.add(digest)
            return digest

    @contextlib.contextmanager
    def _scratch(self, parent: Path) -> Iterator[Path]:
        """A directory named after this process, so that the reaper knows whose it was."""
        path = Path(tempfile.mkdtemp(prefix=f".{own_identity()}.", dir=parent))
        try:
            yield path
        finally:
            if path.exists():  # Not where it was renamed to its place.
                remove_tree(path)


def remove_tree(path: Path) -> None:
    """Removes a directory of our own, also where modes inside forbid it."""

    def allow(function: Callable[..., object], name: str, _: object) -> None:
        os.chmod(os.path.dirname(name), 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            os.chmod(name, 0o700)
            shutil.rmtree(name)
        else:
            function(name)

    shutil.rmtree(path, onerror=allow)


def _copy(source: IO[bytes], out: IO[bytes] | None) -> str:
    """SHA-256 of the rest of `source`, which goes to `out`."""
    digest = hashlib.sha256()
    while block := source.read(_BLOCK_BYTES):
        digest.update(block)
        if out is not None:
            out.write(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _directory(path: Path | str | int, parent: int | None = None) -> Iterator[int]:
    if isinstance(path, int):
        yield path
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(path, flags | (os.O_NOFOLLOW if parent is not None else 0), dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
