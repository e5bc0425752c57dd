"""Layers: equal content has equal names, hostile archives are refused, nothing is half there."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import threading
from pathlib import Path

import pytest

from megacomposer.env.backend.layer_archive import EPOCH_S
from megacomposer.env.backend.layers import LayerStore, remove_tree
from megacomposer.env.sandbox import Snapshot, SnapshotError


def tree(root: Path) -> Path:
    (root / "package" / "empty").mkdir(parents=True)
    (root / "package" / "module.py").write_text("x = 1\n")
    (root / "package" / "run").write_text("#!/bin/sh\n")
    (root / "package" / "run").chmod(0o755)
    os.link(root / "package" / "module.py", root / "same.py")
    (root / "link").symlink_to("/etc/shadow")
    with open(os.fsencode(root) + b"/\xff-not-utf8", "w") as file:
        file.write("n")
    (root / ("long-" * 40)).write_text("a name that needs an extended header")
    return root


def contents(root: Path) -> dict[bytes, tuple[int, bytes]]:
    """Path -> kind and permissions, and content or target."""
    found = {}
    for directory, names, files in os.walk(os.fsencode(root)):
        for name in [*names, *files]:
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                data = os.readlink(path)
            else:
                data = Path(os.fsdecode(path)).read_bytes() if stat.S_ISREG(mode) else b""
            found[os.path.relpath(path, os.fsencode(root))] = (mode, data)
    return found


def test_same_files_have_the_same_name_whatever_their_times(tmp_path: Path) -> None:
    first, second = tree(tmp_path / "a"), tree(tmp_path / "b")
    os.utime(second / "same.py", (1, 1))
    (second / "package" / "module.py").chmod(0o600)
    assert LayerStore(tmp_path / "s").import_tree(first) == LayerStore(tmp_path / "t").import_tree(
        second
    )
    (second / "same.py").write_text("x = 2\n")
    assert LayerStore(tmp_path / "s").import_tree(first) != LayerStore(tmp_path / "t").import_tree(
        second
    )


def test_files_come_out_as_they_went_in(tmp_path: Path) -> None:
    source = tree(tmp_path / "source")
    store = LayerStore(tmp_path / "store")
    digest = store.import_tree(source)
    unpacked = store.unpacked(digest)
    assert contents(unpacked / "workspace") == contents(source)
    linked = (unpacked / "workspace" / "same.py").stat()
    assert linked.st_nlink == 2
    assert linked.st_mtime == EPOCH_S
    (tmp_path / "out").mkdir()
    store.checkout(Snapshot(layers=(digest,)), tmp_path / "out")
    assert contents(tmp_path / "out" / "workspace") == contents(source)
    assert not list(store.root.glob("**/.*.*"))


def test_special_and_reserved_files_are_refused_by_name(tmp_path: Path) -> None:
    store = LayerStore(tmp_path / "store")
    for name, make in {
        "pipe": os.mkfifo,
        ".wh.x": lambda path: path.write_text(""),
    }.items():
        source = tmp_path / f"with-{name}"
        source.mkdir()
        make(source / name)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            store.import_tree(source)
    assert os.listdir(store.root / "layers") == []


def upper(store: LayerStore, root: Path) -> Path:
    """What an overlay leaves of: rm same.py; rm -r package; mkdir package; echo > package/new."""
    (root / "workspace" / "package").mkdir(parents=True)
    os.mknod(root / "workspace" / "same.py", stat.S_IFCHR)
    os.setxattr(root / "workspace" / "package", store.opaque_xattr, b"y")
    (root / "workspace" / "package" / "new").write_text("new")
    (root / "workspace" / "package" / "secret").write_text("s")
    (root / "workspace" / "package" / "secret").chmod(0o000)
    os.mkfifo(root / "workspace" / "pipe")
    (root / "workspace" / ".wh.link").write_text("an agent's attempt to remove a lower file")
    (root / "tmp").mkdir()
    (root / "tmp" / "scratch").write_text("t")
    return root


def test_removed_files_stay_removed_through_snapshot_and_squash(tmp_path: Path) -> None:
    store = LayerStore(tmp_path / "store")
    base = Snapshot(layers=(store.import_tree(tree(tmp_path / "source")),))
    digest = store.pack_upper(upper(store, tmp_path / "upper"), below=base)
    snapshot = store.extend(base, digest)
    assert len(snapshot.layers) == 2
    lower = store.lower_directories(snapshot)[0] / "workspace"
    assert (lower / "same.py").stat().st_rdev == 0
    assert os.getxattr(lower / "package", store.opaque_xattr) == b"y"
    squashed = store.squash(snapshot)
    assert len(squashed.layers) == 1
    assert store.squash(squashed) == squashed
    for index, state in enumerate((snapshot, squashed)):
        out = tmp_path / f"out{index}"
        out.mkdir()
        store.checkout(state, out)
        names = sorted(os.listdir(out / "workspace"), key=os.fsencode)
        assert names == ["link", "long-" * 40, "package", "\udcff-not-utf8"]
        assert sorted(os.listdir(out / "workspace" / "package")) == ["new", "secret"]
        assert (out / "workspace" / "package" / "secret").stat().st_mode & 0o777 == 0
        assert (out / "tmp" / "scratch").read_text() == "t"
        # Of a later layer, later: else Python would run the bytecode of the source below.
        assert (out / "workspace" / "package" / "new").stat().st_mtime == EPOCH_S + 1


def test_unchanged_upper_makes_no_layer(tmp_path: Path) -> None:
    store = LayerStore(tmp_path / "store")
    (tmp_path / "upper" / "workspace").mkdir(parents=True)
    empty = Snapshot(layers=())
    assert store.pack_upper(tmp_path / "upper", below=empty) is None
    assert store.extend(empty, None) == empty
    assert os.listdir(store.root / "layers") == []


def test_endless_directories_are_an_error_and_not_a_crash(tmp_path: Path) -> None:
    store = LayerStore(tmp_path / "store")
    top = tmp_path / "upper" / "workspace"
    top.mkdir(parents=True)
    directory = os.open(top, os.O_RDONLY)
    for _ in range(400):
        os.mkdir("d", dir_fd=directory)
        inner = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)
    with pytest.raises(SnapshotError, match="directories deep"):
        store.pack_upper(tmp_path / "upper", below=Snapshot(layers=()))


def test_layers_travel_and_are_checked(tmp_path: Path) -> None:
    here, there = LayerStore(tmp_path / "here"), LayerStore(tmp_path / "there")
    digest = here.import_tree(tree(tmp_path / "source"))
    here.export_layer(digest, tmp_path / "carried")
    with pytest.raises(SnapshotError, match=digest):
        there.unpacked(digest)
    assert there.import_layer(tmp_path / "carried") == digest
    assert there.unpacked(digest).is_dir()
    data = bytearray((tmp_path / "carried").read_bytes())
    data[data.index(b"x = 1")] ^= 1
    (tmp_path / f"{digest}.tar").write_bytes(data)
    with pytest.raises(SnapshotError, match="its digest is"):
        there.import_layer(tmp_path / f"{digest}.tar")
    for unknown in ("0" * 64, "../../etc/passwd"):
        with pytest.raises(SnapshotError):
            there.unpacked(unknown)


def test_damaged_layer_is_found_at_its_first_use(tmp_path: Path) -> None:
    digest = LayerStore(tmp_path / "store").import_tree(tree(tmp_path / "source"))
    file = tmp_path / "store" / "layers" / f"{digest}.tar"
    data = bytearray(file.read_bytes())
    data[data.index(b"x = 1")] ^= 1
    file.write_bytes(data)
    store = LayerStore(tmp_path / "store")
    for use in (
        lambda: store.unpacked(digest),
        lambda: store.export_layer(digest, tmp_path / "out"),
    ):
        with pytest.raises(SnapshotError, match="damaged"):
            use()
    assert list((tmp_path / "store").glob("unpacked*/*")) == []


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode = kind, link, 0o755
    return header


TOP = entry("workspace", tarfile.DIRTYPE)
HOSTILE = {
    "absolute": [entry("/etc/x")],
    "parent": [TOP, entry("workspace/../../x")],
    "not canonical": [TOP, entry("workspace/./x")],
    "outside the trees": [entry("etc", tarfile.DIRTYPE)],
    "tree is a link": [entry("workspace", tarfile.SYMTYPE, "/etc")],
    "through a link": [TOP, entry("workspace/a", tarfile.SYMTYPE, "/tmp"), entry("workspace/a/x")],
    "replaced directory": [
        TOP,
        entry("workspace/a", tarfile.DIRTYPE),
        entry("workspace/a", tarfile.SYMTYPE, "/tmp"),
        entry("workspace/a/x"),
    ],
    "whiteout of a directory": [
        TOP,
        entry("workspace/a", tarfile.DIRTYPE),
        entry("workspace/.wh.a"),
        entry("workspace/a/x"),
    ],
    "whiteout of the parent": [TOP, entry("workspace/.wh...")],
    "hard link out": [TOP, entry("workspace/a", tarfile.LNKTYPE, "../../etc/passwd")],
    "hard link to a link": [
        TOP,
        entry("workspace/a", tarfile.SYMTYPE, "/etc/passwd"),
        entry("workspace/b", tarfile.LNKTYPE, "workspace/a"),
    ],
    "device": [TOP, entry("workspace/sda", tarfile.BLKTYPE)],
    "pipe": [TOP, entry("workspace/pipe", tarfile.FIFOTYPE)],
    "no parent": [TOP, entry("workspace/a/x")],
    "late opaque marker": [TOP, entry("workspace/a"), entry("workspace/.wh..wh..opq")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(case: str, tmp_path: Path) -> None:
    store = LayerStore(tmp_path / "store")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for header in HOSTILE[case]:
            tar.addfile(header)
    (tmp_path / "hostile").write_bytes(out.getvalue())
    with pytest.raises(SnapshotError, match="not a layer"):
        store.import_layer(tmp_path / "hostile")
    assert os.listdir(store.root / "layers") == []


@pytest.mark.parametrize("data", [b"", b"text, and no archive" * 100], ids=["empty", "text"])
def test_files_that_are_no_archive_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(SnapshotError, match="not a layer"):
        LayerStore(tmp_path / "store").import_layer(tmp_path / "file")


def test_two_that_unpack_at_once_agree(tmp_path: Path) -> None:
    digest = LayerStore(tmp_path / "store").import_tree(tree(tmp_path / "source"))
    found: list[Path] = []

    def unpack() -> None:
        store = LayerStore(tmp_path / "store")
        gate.wait()
        found.append(store.unpacked(digest))

    gate = threading.Barrier(8)
    threads = [threading.Thread(target=unpack) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert contents(found[0] / "workspace") == contents(tmp_path / "source")
    assert not list((tmp_path / "store").glob("*/.*"))


def test_removal_reaches_what_modes_forbid(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    (tmp_path / "a" / "b").chmod(0o000)
    (tmp_path / "a").chmod(0o500)
    remove_tree(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    shutil.rmtree(tmp_path, ignore_errors=True)
