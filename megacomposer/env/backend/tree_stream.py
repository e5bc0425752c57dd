"""Files of a running sandbox as a layer, and a snapshot as files to unpack inside.

For backends whose files the host cannot see: `tar` inside is the way in and out. What comes out is
not trusted: it is never unpacked on the host, only read, sorted and written again as a layer.
"""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.layer_archive import EPOCH_S, TREES, WHITEOUT
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.sandbox import (
    HOME,
    TEMPORARY,
    USER_ID,
    WORKDIR,
    SandboxError,
    Snapshot,
    SnapshotError,
)

PLACES = {"workspace": WORKDIR, "home": HOME, "tmp": TEMPORARY}
"""Tree of a layer -> where it is inside."""
_INSIDE = {name: str(place).lstrip("/") for name, place in PLACES.items()}
_PACK_TIMEOUT_S = 600.0
# A file that its owner made unreadable is still part of the state.
_PACK_SCRIPT = """
cd / || exit 1
find {trees} \\( -type d ! -perm -700 -exec chmod u+rwx {{}} \\; \\) \
  -o \\( -type f ! -perm -400 -exec chmod u+r {{}} \\; \\)
exec tar -cf - {trees}
"""


def pack_command() -> list[str]:
    """Run inside, it writes the three trees to its standard output as a tar archive."""
    return ["/bin/sh", "-c", _PACK_SCRIPT.format(trees=" ".join(_INSIDE.values()))]


def layer_from_tar(store: LayerStore, archive: IO[bytes], *, generation: int) -> str:
    """Stores what `pack_command` wrote as one layer, and returns its digest.

    Sockets, pipes and devices are left out, and so are names that layers reserve. `generation`,
    the number of layers that the state stands on, is in the times (see `layer_archive`). Blocks.

    Raises SnapshotError where the archive is none, or its entries make no layer.
    """
    members = _read(archive)
    with tempfile.NamedTemporaryFile(dir=store.root, prefix=".pack-") as file:
        _write(members, archive, file, EPOCH_S + generation)
        file.flush()
        return store.import_layer(Path(file.name))


async def pack_over_link(
    link: AgentLink, store: LayerStore, *, max_bytes: int, generation: int
) -> str:
    """Run `pack_command` inside and store its layer. SandboxError where tar fails inside."""
    result = await link.exec(
        pack_command(),
        cwd="/",
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"},
        stdin=b"",
        timeout_s=_PACK_TIMEOUT_S,
        output_bytes=max_bytes,
    )
    if not result.ok:
        text = result.stderr.decode(errors="replace")[-500:]
        raise SandboxError(f"tar inside ended with {result.status} {result.exit_code}: {text}")
    archive = io.BytesIO(result.stdout)
    return await asyncio.to_thread(layer_from_tar, store, archive, generation=generation)


def write_tree_tar(store: LayerStore, snapshot: Snapshot, file: IO[bytes]) -> None:
    """The merged files of a snapshot as a tar archive to be unpacked in `/` inside. Blocks."""

    def own(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = USER_ID
        member.uname = member.gname = ""
        return member

    with tempfile.TemporaryDirectory(dir=store.root, prefix=".checkout-") as name:
        store.checkout(snapshot, Path(name))
        with tarfile.open(fileobj=file, mode="w:", format=tarfile.GNU_FORMAT) as tar:
            for tree, place in _INSIDE.items():
                # Not the tree itself: its owner inside may be another one.
                for child in sorted((Path(name) / tree).iterdir()):
                    tar.add(child, arcname=f"{place}/{child.name}", filter=own)


def _read(archive: IO[bytes]) -> dict[str, tarfile.TarInfo]:
    """The entries by their names in a layer; hard links by the name of what they link to."""
    members: dict[str, tarfile.TarInfo] = {}
    archive.seek(0)
    try:
        tar = tarfile.open(  # noqa: SIM115 - the caller owns the file
            fileobj=archive, mode="r:", encoding="utf-8", errors="surrogateescape"
        )
        for member in tar:
            name = _layer_name(member.name)
            if name is None or not (
                member.isreg() or member.isdir() or member.issym() or member.islnk()
            ):
                continue
            if member.islnk():
                target = members.get(_layer_name(member.linkname) or "")
                if target is None or not target.isreg():
                    continue  # To something that was left out.
                member = target
            members[name] = member
    except tarfile.TarError as error:
        raise SnapshotError(f"tar inside the sandbox wrote no archive: {error}") from error
    return members


def _layer_name(name: str) -> str | None:
    """`home/agent/x` -> `home/x`; None for what has no place in a layer."""
    path = PurePosixPath(name)
    if ".." in path.parts or any(part.startswith(WHITEOUT) for part in path.parts):
        return None
    for tree, place in _INSIDE.items():
        if path.is_relative_to(place):
            return str(PurePosixPath(tree) / path.relative_to(place))
    return None


def _write(
    members: Mapping[str, tarfile.TarInfo], archive: IO[bytes], out: IO[bytes], mtime_s: int
) -> None:
    written: dict[int, str] = {}
    with tarfile.open(
        fileobj=out, mode="w:", format=tarfile.GNU_FORMAT, errors="surrogateescape"
    ) as tar:
        for name in _sorted(members):
            source = members[name]
            header = tarfile.TarInfo(name)
            header.uid = header.gid = USER_ID
            header.mtime = mtime_s
            header.type = source.type
            header.mode = 0o777 if source.issym() else source.mode & 0o777
            if source.issym():
                header.linkname = source.linkname
            elif source.isreg() and source.offset in written:
                header.type, header.linkname = tarfile.LNKTYPE, written[source.offset]
            elif source.isreg():
                written[source.offset] = name
                header.type, header.size = tarfile.REGTYPE, source.size
                archive.seek(source.offset_data)
                tar.addfile(header, archive)
                continue
            tar.addfile(header)


def _sorted(members: Mapping[str, tarfile.TarInfo]) -> Iterator[str]:
    def key(name: str) -> list[bytes]:
        return [os.fsencode(part) for part in PurePosixPath(name).parts]

    yield from sorted((name for name in members if name.split("/")[0] in TREES), key=key)
