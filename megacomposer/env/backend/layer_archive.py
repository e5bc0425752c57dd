"""File layers as deterministic OCI-style tar archives: packed from directories, and unpacked.

A layer has the trees `workspace/`, `home/` and `tmp/`. Entries are sorted, owned by USER_ID, and
times are `EPOCH_S` plus the layer's place in its chain, so equal content has equal bytes. A removed
file is `.wh.NAME`; a directory that hides what is below it holds `.wh..wh..opq` as its first entry.

The place in the chain is in the times because Python trusts bytecode whose source has the recorded
time and size: with one time for all, an edit that keeps the size would run the old bytecode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO

from megacomposer.env.sandbox import USER_ID, SnapshotError

TREES = ("workspace", "home", "tmp")
EPOCH_S = 946_684_800
"""2000-01-01: zip archives cannot hold a time before 1980."""
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
OPAQUE_XATTRS = ("trusted.overlay.opaque", "user.overlay.opaque")
"""For an overlay of root, and for one mounted with `userxattr`."""
MAX_DEPTH = 100
"""Directories in one another; each level holds a descriptor while it is walked."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Packer:
    """Writes one layer.

    `overlay_xattr` says that the trees are an overlay's upper directory, whose removed files are
    character devices 0/0 and whose opaque directories carry this attribute. Without it the trees
    are a user's own files: then special files are refused (ValueError), and modes are 644 or 755.
    """

    def __init__(
        self,
        out: IO[bytes],
        *,
        overlay_xattr: str | None = None,
        exact: bool = False,
        mtime_s: int | None = EPOCH_S,
        max_bytes: int | None = None,
    ) -> None:
        self.entries = 0
        """How many were written, not counting the trees' own directories."""
        self._tar = tarfile.open(  # noqa: SIM115 - closed by `finish`
            fileobj=out, mode="w:", format=tarfile.GNU_FORMAT, errors="surrogateescape"
        )
        self._overlay_xattr = overlay_xattr
        self._exact = exact or overlay_xattr is not None
        self._mtime_s = mtime_s
        self._bytes_left = max_bytes
        self._links: dict[tuple[int, int], str] = {}

    def add_tree(self, name: str, directory: int) -> None:
        """Adds what is below an open directory as `name`/."""
        self._tar.addfile(self._header(name, os.fstat(directory), tarfile.DIRTYPE))
        self._add_children(name, directory, depth=1)

    def finish(self) -> None:
        self._tar.close()

    def _header(self, name: str, status: os.stat_result, kind: bytes) -> tarfile.TarInfo:
        header = tarfile.TarInfo(name)
        header.type = kind
        header.uid = header.gid = USER_ID
        header.mtime = int(status.st_mtime) if self._mtime_s is None else self._mtime_s
        if kind == tarfile.SYMTYPE:
            header.mode = 0o777
        elif self._exact:
            header.mode = status.st_mode & 0o777
        else:
            executable = kind == tarfile.DIRTYPE or status.st_mode & 0o111
            header.mode = 0o755 if executable else 0o644
        return header

    def _add_marker(self, name: str, status: os.stat_result) -> None:
        header = self._header(name, status, tarfile.REGTYPE)
        header.mode = 0o600
        self._tar.addfile(header)
        self.entries += 1

    def _add_children(self, prefix: str, directory: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise SnapshotError(f"{prefix[:200]}...: more than {MAX_DEPTH} directories deep")
        if self._overlay_xattr and _is_opaque(directory, self._overlay_xattr):
            self._add_marker(f"{prefix}/{OPAQUE}", os.fstat(directory))
        for name in sorted(os.listdir(directory), key=os.fsencode):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            path = f"{prefix}/{name}"
            if name.startswith(WHITEOUT):
                if not self._exact:
                    raise ValueError(f"{path!r}: names that begin with {WHITEOUT} are reserved")
                continue  # A layer cannot say it, so no layer below holds one either.
            if stat.S_ISDIR(status.st_mode):
                self._tar.addfile(self._header(path, status, tarfile.DIRTYPE))
                self.entries += 1
                with _opened(name, directory, status, _OPEN_DIRECTORY, 0o500) as child:
                    self._add_children(path, child, depth + 1)
            elif stat.S_ISREG(status.st_mode):
                self._add_file(path, name, directory, status)
            elif stat.S_ISLNK(status.st_mode):
                header = self._header(path, status, tarfile.SYMTYPE)
                header.linkname = os.readlink(name, dir_fd=directory)
                self._tar.addfile(header)
                self.entries += 1
            elif self._overlay_xattr:
                # Removed; or a socket or pipe, which means nothing without its process: gone too.
                self._add_marker(f"{prefix}/{WHITEOUT}{name}", status)
            elif not self._exact:
                raise ValueError(f"{path!r} is a device, socket or pipe: remove it first")

    def _add_file(self, path: str, name: str, directory: int, status: os.stat_result) -> None:
        self.entries += 1
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._links:
            header = self._header(path, status, tarfile.LNKTYPE)
            header.linkname = self._links[key]
            self._tar.addfile(header)
            return
        if self._bytes_left is not None:
            self._bytes_left -= status.st_size
            if self._bytes_left < 0:
                raise SnapshotError(f"{path!r}: the files are larger than the quota (sparse ones?)")
        self._links[key] = path
        header = self._header(path, status, tarfile.REGTYPE)
        header.size = status.st_size
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with (
            _opened(name, directory, status, flags, 0o400) as descriptor,
            open(descriptor, "rb", buffering=0, closefd=False) as file,
        ):
            self._tar.addfile(header, file)


def _is_opaque(directory: int, attribute: str) -> bool:
    try:
        return os.getxattr(directory, attribute) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


@contextlib.contextmanager
def _opened(
    name: str, directory: int, status: os.stat_result, flags: int, needed: int
) -> Iterator[int]:
    """Opens one's own file even where its mode forbids it, as `chmod 000` inside does."""
    mode = status.st_mode & 0o777
    # A name is either a directory or a file here (the caller looked), never a link.
    closed = os.geteuid() != 0 and mode & needed != needed
    if closed:
        os.chmod(name, mode | needed, dir_fd=directory)
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        if closed:
            os.chmod(name, mode, dir_fd=directory)


def read_members(file: IO[bytes], label: str) -> Iterator[tarfile.TarInfo]:
    """The entries of a layer, each checked; SnapshotError for anything that is not ours.

    A valid layer names only what is below TREES, once, after its parent directory; so no entry can
    be written through a link of the same layer.
    """
    kinds: dict[str, bytes] = {}
    try:
        tar = tarfile.open(  # noqa: SIM115 - the caller owns the file
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        )
        previous = ""
        for member in tar:
            path = PurePosixPath(member.name)
            plain = _plain_name(member)
            if plain is None or str(path) != member.name or path.parts[0] not in TREES:
                raise SnapshotError(f"{label}: not a layer: bad path {member.name!r}")
            parent = str(path.parent)
            if plain in kinds or (len(path.parts) > 1 and kinds.get(parent) != tarfile.DIRTYPE):
                raise SnapshotError(f"{label}: not a layer: {member.name!r} twice or no parent")
            if path.name == OPAQUE and previous != parent:
                raise SnapshotError(f"{label}: not a layer: {member.name!r} is not first")
            _check_kind(member, plain, kinds, label)
            kinds[plain] = tarfile.CHRTYPE if path.name.startswith(WHITEOUT) else member.type
            previous = member.name
            yield member
    except tarfile.TarError as error:
        raise SnapshotError(f"{label}: not a layer: {error}") from error


def _plain_name(member: tarfile.TarInfo) -> str | None:
    """The name that an entry claims (a whiteout claims the removed one), or None if unsafe."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in member.name:
        return None
    if len(path.parts) > MAX_DEPTH + 1:
        return None
    if any(part.startswith(WHITEOUT) for part in path.parts[:-1]):
        return None
    if path.name.startswith(WHITEOUT) and path.name != OPAQUE:
        hidden = path.name.removeprefix(WHITEOUT)
        if hidden in ("", ".", "..") or hidden.startswith(WHITEOUT):
            return None
        return str(path.parent / hidden)
    return member.name


def _check_kind(
    member: tarfile.TarInfo, plain: str, kinds: Mapping[str, bytes], label: str
) -> None:
    top = "/" not in plain
    marker = PurePosixPath(member.name).name.startswith(WHITEOUT)
    known = (tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
    if (
        member.type not in known
        or (top and member.type != tarfile.DIRTYPE)
        or (marker and (member.type != tarfile.REGTYPE or member.size))
        or (member.type == tarfile.LNKTYPE and kinds.get(member.linkname) != tarfile.REGTYPE)
    ):
        raise SnapshotError(f"{label}: not a layer: {member.name!r} is of a kind that is refused")


class Unpacker:
    """Writes the entries of layers below an open directory, never through a link.

    With `overlay_xattr` the result is a lower directory of an overlay: whiteouts are devices 0/0.
    Without it each layer is applied to what is there already.
    """

    def __init__(self, root: int, *, owner: int | None, overlay_xattr: str | None) -> None:
        self._root = root
        self._owner = owner
        self._overlay_xattr = overlay_xattr
        self._open: list[tuple[str, int, tarfile.TarInfo]] = []

    def unpack(self, file: IO[bytes], label: str) -> None:
        """One layer. SnapshotError if it is damaged; the result is then incomplete."""
        try:
            for member in read_members(file, label):
                self._add(member, file)
        finally:
            self._leave("")

    def _add(self, member: tarfile.TarInfo, file: IO[bytes]) -> None:
        parent, _, name = member.name.rpartition("/")
        self._leave(parent)
        directory = self._open[-1][1] if self._open else self._root
        if name == OPAQUE:
            self._mark_opaque(directory)
            return
        if name.startswith(WHITEOUT):
            name = name.removeprefix(WHITEOUT)
            self._remove(name, directory)
            if self._overlay_xattr:
                os.mknod(name, stat.S_IFCHR, dir_fd=directory)
            return
        if member.isdir():
            self._enter(member, name, directory)
            return
        self._remove(name, directory)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=directory)
            if self._owner is not None:
                os.chown(name, self._owner, self._owner, dir_fd=directory, follow_symlinks=False)
            times = (member.mtime, member.mtime)
            os.utime(name, times, dir_fd=directory, follow_symlinks=False)
        elif member.islnk():
            os.link(
                member.linkname,
                name,
                src_dir_fd=self._root,
                dst_dir_fd=directory,
                follow_symlinks=False,
            )
        else:
            self._write(member, name, directory, file)

    def _write(self, member: tarfile.TarInfo, name: str, directory: int, file: IO[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=directory), "wb", buffering=0) as out:
            file.seek(member.offset_data)
            left = member.size
            while left:
                block = file.read(min(left, 1 << 20))
                if not block:
                    raise SnapshotError(f"{member.name!r}: the layer ends early")
                out.write(block)
                left -= len(block)
            self._finish(member, out.fileno())

    def _finish(self, member: tarfile.TarInfo, descriptor: int) -> None:
        if self._owner is not None:
            os.fchown(descriptor, self._owner, self._owner)
        os.fchmod(descriptor, member.mode & 0o777)
        os.utime(descriptor, (member.mtime, member.mtime))

    def _enter(self, member: tarfile.TarInfo, name: str, directory: int) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=directory)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
                os.mkdir(name, 0o700, dir_fd=directory)
            else:
                os.chmod(name, 0o700, dir_fd=directory)
        self._open.append((member.name, os.open(name, _OPEN_DIRECTORY, dir_fd=directory), member))

    def _leave(self, parent: str) -> None:
        """Closes directories down to `parent`; modes last, since one may forbid writing."""
        while self._open and self._open[-1][0] != parent:
            _, descriptor, member = self._open.pop()
            self._finish(member, descriptor)
            os.close(descriptor)

    def _mark_opaque(self, directory: int) -> None:
        if self._overlay_xattr:
            os.setxattr(directory, self._overlay_xattr, b"y")
            return
        for name in os.listdir(directory):
            self._remove(name, directory)

    def _remove(self, name: str, directory: int) -> None:
        if self._overlay_xattr:
            return  # Starts empty, and no name comes twice.
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=directory)
