"""Reads and changes a workspace from inside its sandbox; run as `python -c` with this text.

Stdin is one JSON object with "command" and "root"; the reply is JSON too, compressed. Archives are
named relative to TMPDIR. Links are never followed, and nothing named
`.git` is looked at: what a repository of the agent says about its files is not evidence.
Standard library only.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

Entry = tuple[str, str]
"""Git's mode and blob id."""


def walk(root: str) -> Iterator[str]:
    """Relative paths of regular files and links, sorted within a directory."""
    for directory, directories, files in os.walk(root):
        links = [name for name in directories if os.path.islink(os.path.join(directory, name))]
        directories[:] = sorted(set(directories) - set(links) - {".git"})
        for name in sorted(files + links):
            if name != ".git":
                yield os.path.relpath(os.path.join(directory, name), root)


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names the path or a directory above it; `*` also crosses `/`."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in above)


def contents(path: str) -> tuple[str, bytes] | None:
    """Git's mode and the bytes; None for what git cannot hold, or cannot be read."""
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return "120000", os.fsencode(os.readlink(path))
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                return ("100755" if status.st_mode & 0o100 else "100644"), file.read()
    except OSError:
        return None
    return None


def manifest(root: str, patterns: list[str] | None) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in walk(root):
        if patterns is None or matches(path, patterns):
            entry = contents(os.path.join(root, path))
            if entry is not None:
                mode, data = entry
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
                found[path] = (mode, blob.hexdigest())
    return found


def pack(root: str, paths: Iterable[str], output: str) -> None:
    with tarfile.open(output, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in paths:
            entry = contents(os.path.join(root, path))
            if entry is None:
                continue
            mode, data = entry
            member = tarfile.TarInfo(path)
            member.mode = int(mode, 8) & 0o777 or 0o777
            if mode == "120000":
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(data)
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def replace(root: str, patterns: list[str], archive_path: str) -> None:
    """Remove everything that matches and put the archive's files there."""
    for path in list(walk(root)):
        if matches(path, patterns):
            os.unlink(os.path.join(root, path))
    with tarfile.open(archive_path) as archive:
        unpack(archive, root)
    for directory, _, _ in os.walk(root, topdown=False):
        # An empty package directory would still be a namespace package.
        name = os.path.relpath(directory, root)
        if name != "." and matches(name, patterns) and not os.listdir(directory):
            os.rmdir(directory)


def unpack(archive: tarfile.TarFile, root: str) -> None:
    """Files and links, over what is there; nothing is written through a link."""
    for member in archive:
        if member.isdir():
            continue
        target = make_way(root, member.name)
        if member.issym():
            os.symlink(member.linkname, target)
            continue
        source = archive.extractfile(member)
        assert source is not None, member.name
        with open(target, "xb") as file:
            file.write(source.read())
        os.chmod(target, member.mode & 0o777)


def make_way(root: str, path: str) -> str:
    """Directories for `path` under `root`; a link or file in the way goes."""
    current = root
    parts = path.split("/")
    assert parts[0], f"{path} leaves the tree"
    assert ".." not in parts, f"{path} leaves the tree"
    os.makedirs(root, exist_ok=True)
    for part in parts[:-1]:
        current = os.path.join(current, part)
        if os.path.islink(current) or (os.path.lexists(current) and not os.path.isdir(current)):
            os.unlink(current)
        os.makedirs(current, exist_ok=True)
    target = os.path.join(current, parts[-1])
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    elif os.path.lexists(target):
        os.unlink(target)
    return target


def quoted(path: str) -> bytes:
    plain = b"".join(
        bytes([byte]) if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte
        for byte in os.fsencode(path)
    )
    return b'"' + plain + b'"'


def import_commit(name: str, mark: bytes, changes: list[bytes]) -> bytes:
    head = b"commit refs/heads/%b\ncommitter base <base> 0 +0000\ndata 0\n" % name.encode()
    return head + mark + b"".join(changes) + b"\n"


def change(path: str, entry: tuple[str, bytes] | None) -> bytes:
    if entry is None:
        return b"D " + quoted(path) + b"\n"
    mode, data = entry
    place = b"M %b inline %b\n" % (mode.encode(), quoted(path))
    return place + b"data %d\n%b\n" % (len(data), data)


def diff(root: str, paths: list[str], archive_path: str, git_directory: str, output: str) -> None:
    """`git diff --binary` from the files under `root` to the archive's, for `paths`."""
    after: dict[str, tuple[str, bytes]] = {}
    with tarfile.open(archive_path) as archive:
        for member in archive:
            if member.issym():
                after[member.name] = ("120000", os.fsencode(member.linkname))
            else:
                source = archive.extractfile(member)
                assert source is not None
                mode = "100755" if member.mode & 0o100 else "100644"
                after[member.name] = (mode, source.read())
    before = {path: contents(os.path.join(root, path)) for path in paths}
    old = [change(path, entry) for path, entry in before.items() if entry is not None]
    # Deletions first: a directory may have become a file.
    gone = [change(path, None) for path in paths if path not in after and before[path]]
    new = gone + [change(path, entry) for path, entry in after.items()]
    stream = import_commit("old", b"", old)
    stream += import_commit("new", b"from refs/heads/old\n", new)
    git = ["git", f"--git-dir={git_directory}"]
    quiet = {"stdout": subprocess.DEVNULL, "check": True}
    subprocess.run([*git, "init", "--quiet", "--bare"], **quiet)  # type: ignore[call-overload]
    imported = [*git, "fast-import", "--quiet"]
    subprocess.run(imported, input=stream, **quiet)  # type: ignore[call-overload]
    with open(output, "wb") as file:
        arguments = ["--binary", "--full-index", "--find-renames", "--no-color", "--no-ext-diff"]
        command = [*git, "diff", *arguments, "refs/heads/old", "refs/heads/new", "--"]
        subprocess.run(command, stdout=file, check=True)
    shutil.rmtree(git_directory)


def answer(request: dict[str, Any]) -> Any:
    command, root = request["command"], request["root"]
    if command == "manifest":
        return manifest(root, request["patterns"])
    archive = os.path.join(os.environ["TMPDIR"], request["archive"])
    if command == "pack":
        paths = request["paths"]
        if paths is None:
            paths = [path for path in walk(root) if matches(path, request["patterns"])]
        pack(root, paths, archive)
        return paths
    if command == "replace":
        replace(root, request["patterns"], archive)
        return None
    assert command == "diff", command
    diff(root, request["paths"], archive, f"{archive}.git", f"{archive}.diff")
    return None


if __name__ == "__main__":
    reply = json.dumps(answer(json.loads(sys.stdin.buffer.read())))
    sys.stdout.buffer.write(zlib.compress(reply.encode("ascii")))
