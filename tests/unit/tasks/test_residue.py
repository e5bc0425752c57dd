"""Each hiding place that agents were seen to read, or could, is planted and must be found."""

from __future__ import annotations

import base64
import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import pickle
import py_compile
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.deletion import delete
from megacomposer.tasks.repository import describe_repository
from megacomposer.tasks.residue import (
    Finding,
    ScanLimitError,
    Traces,
    files_of_tree,
    image_parts,
    published_files,
    scan_site,
    scan_workspace,
    traces_of,
)
from megacomposer.tasks.scrub import commit_root, run_git, write_edits

DELETED = frozenset(
    {"shelf.loans:late_fee", "shelf.loans:_without_grace", "shelf.report:monthly_report"}
)


@pytest.fixture
def scene(sample_project: Path) -> tuple[Path, Traces, bytes]:
    """A task's tree, what must not be in it, and the source that was deleted from it."""
    repository = describe_repository(sample_project)
    graph = CallGraph(repository)
    secret = (sample_project / "src/shelf/loans.py").read_bytes()
    write_edits(sample_project, delete(graph, sample_project, DELETED))
    kept = [*repository.modules.values(), *repository.test_files]
    traces = traces_of(graph, DELETED, (), sample_project, kept)
    commit_root(sample_project)
    return sample_project, traces, secret


def scan(tree: Path, traces: Traces) -> list[Finding]:
    return scan_workspace(traces, image_parts(files_of_tree(tree)))


def zipped(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr(name, data)
    return out.getvalue()


def tarred(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        opened.addfile(info, io.BytesIO(data))
    return out.getvalue()


def bytecode(data: bytes, scratch: Path) -> bytes:
    (scratch / "x.py").write_bytes(data)
    py_compile.compile(str(scratch / "x.py"), cfile=str(scratch / "x.pyc"), doraise=True)
    return (scratch / "x.pyc").read_bytes()


NAME = b"late_fee"
CACHE = json.dumps({"names": {"late_fee": {"kind": "Gdef", "node": ["days"]}}}).encode()
CLASS_FILE = b"\xca\xfe\xba\xbe\0\0\0\x34\0\5\1\0\x08late_fee\1\0\4Code"
PLACES: dict[str, Callable[[bytes, Path], tuple[str, bytes]]] = {
    "old copy": lambda s, _: ("src/shelf/old_loans.txt", s),
    "build output": lambda s, _: ("build/lib/shelf/loans.py", s),
    "editor backup": lambda s, _: ("src/shelf/loans.py.orig", s),
    "editor swap file": lambda s, _: ("src/shelf/.loans.py.swp", b"b0VIM 9.0\0\0" + s),
    "type-check cache": lambda s, _: (".mypy_cache/3.11/shelf/loans.data.json", CACHE),
    "cache with another name": lambda s, _: ("var/state.dat", b"\0\1" + CACHE),
    "test cache": lambda s, _: (".pytest_cache/v/cache/nodeids", b'["late_fee"]'),
    "bytecode": lambda s, d: ("src/shelf/__pycache__/loans.cpython-311.pyc", bytecode(s, d)),
    "bytecode with another name": lambda s, d: ("var/blob.bin", bytecode(s, d)),
    "pickle": lambda s, _: ("var/p.bin", pickle.dumps({"late_fee": 1})),
    "wheel": lambda s, _: ("dist/shelf-1.whl", zipped("shelf/loans.py", s)),
    "wheel with another name": lambda s, _: ("var/w.bin", zipped("shelf/loans.py", s)),
    "jar with a class file": lambda s, _: ("lib/a.jar", zipped("Loans.class", CLASS_FILE)),
    "class file": lambda s, _: ("lib/Loans.class", CLASS_FILE),
    "sdist": lambda s, _: ("var/s.bin", gzip.compress(tarred("loans.py", s))),
    "archives in archives": lambda s, _: (
        "var/n.bin", zipped("a.tar.gz", gzip.compress(tarred("b.zip", zipped("c.py", s)))),
    ),
    "bzip2": lambda s, _: ("var/b.bin", bz2.compress(s)),
    "xz": lambda s, _: ("var/x.bin", lzma.compress(s)),
    "zlib in the middle of a file": lambda s, _: ("var/z.bin", b"\0head" * 9 + zlib.compress(s)),
    "gzip that is cut short": lambda s, _: ("var/g.bin", gzip.compress(s * 50)[:-20]),
    "zip without its directory": lambda s, _: ("var/c.bin", zipped("loans.py", s)[:-60]),
    "utf-16": lambda s, _: ("docs/notes.txt", s.decode().encode("utf-16")),
    "egg-link": lambda s, _: ("shelf.egg-link", b"/srv/shelf\n"),
    "coverage data": lambda s, _: (".coverage", b"SQLite format 3\0"),
}  # fmt: skip


def test_clean_tree_has_no_residue(scene: tuple[Path, Traces, bytes]) -> None:
    tree, traces, _ = scene
    assert b"late_fee" in traces.names
    assert "tests/test_loans.py" in traces.names[NAME]
    assert "README.md" in traces.names[NAME]
    assert b"remaining_days = days - _GRACE_DAYS" in traces.lines
    assert scan(tree, traces) == []


@pytest.mark.parametrize("place", PLACES)
def test_residue_is_found(place: str, scene: tuple[Path, Traces, bytes], tmp_path: Path) -> None:
    tree, traces, secret = scene
    name, data = PLACES[place](secret, tmp_path)
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    found = scan(tree, traces)
    assert found, place
    assert all(finding.path.split("!")[0] == name for finding in found)
    content = [finding for finding in found if finding.encoding != "path"]
    assert content or place in ("egg-link", "coverage data"), "found by more than the file's name"


@pytest.mark.parametrize("packed", [False, True])
def test_residue_in_git_objects_is_found(packed: bool, scene: tuple[Path, Traces, bytes]) -> None:
    tree, traces, secret = scene
    (tree / "old.py").write_bytes(secret)
    digest = run_git(tree, "hash-object", "-w", "old.py").decode().strip()
    (tree / "old.py").unlink()
    if packed:
        run_git(tree, "tag", "old", digest)
        run_git(tree, "repack", "-a", "-d", "--quiet")
    found = scan(tree, traces)
    assert {finding.path.split("!")[0].split("/")[0] for finding in found} == {".git"}
    assert {finding.trace for finding in found} >= {"def late_fee(days, daily_cents=25):"}


def make_site(root: Path, files: dict[str, bytes]) -> Path:
    """An installed distribution `other` with its RECORD."""
    rows = []
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append((name, f"sha256={digest}", len(data)))
    record = root / "other-1.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    with record.open("w", newline="") as file:
        csv.writer(file).writerows([*rows, ("other-1.dist-info/RECORD", "", "")])
    return root


def site_findings(site: Path, traces: Traces) -> list[Finding]:
    parts = image_parts(files_of_tree(site))
    return scan_site(traces, parts, ("shelf",), published_files(site))


def test_dependency_may_use_the_same_word(
    scene: tuple[Path, Traces, bytes], tmp_path: Path
) -> None:
    site = make_site(tmp_path / "site", {"other/a.py": b"def late_fee():\n    return 1\n"})
    assert site_findings(site, scene[1]) == []


@pytest.mark.parametrize(
    "place", ["package", "vendored copy", "changed file", "bytecode", "egg-link", "wheel"]
)
def test_copy_among_the_dependencies_is_found(
    place: str, scene: tuple[Path, Traces, bytes], tmp_path: Path
) -> None:
    _, traces, secret = scene
    site = make_site(
        tmp_path / "site",
        {"other/a.py": b"x = 1\n", "other/_vendor/books.py": secret}
        if place == "vendored copy"
        else {"other/a.py": b"x = 1\n"},
    )
    planted = {
        "package": ("shelf/__init__.py", b""),
        "changed file": ("other/a.py", b"x = 1\n# late_fee\n"),
        "bytecode": ("other/__pycache__/a.pyc", bytecode(b"x = 1\n", tmp_path)),
        "egg-link": ("shelf-keeper.egg-link", b"/src\n"),
        "wheel": ("other/cache.bin", zipped("loans.py", secret)),
    }
    if place in planted:
        name, data = planted[place]
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    assert site_findings(site, traces), place


def test_bomb_is_an_error_not_a_clean_result(
    scene: tuple[Path, Traces, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megacomposer.tasks.residue.MAX_UNPACKED_BYTES", 1 << 16)
    tree, traces, _ = scene
    (tree / "bomb.bin").write_bytes(gzip.compress(bytes(1 << 20)))
    with pytest.raises(ScanLimitError, match=r"bomb\.bin"):
        scan(tree, traces)
    shutil.rmtree(tree)
