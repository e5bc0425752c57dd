"""A Python source tree with tests: where the package is, what the tests are, how they are run."""

from __future__ import annotations

import configparser
import dataclasses
import email.parser
import hashlib
import re
import shutil
import stat
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

RUNNER_FILES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""Configuration of pytest, at any depth; graded from the true copy."""
_TEST_DIRECTORIES = frozenset({"tests", "test", "testing"})
_NOT_PACKAGES = _TEST_DIRECTORIES | {
    *("docs", "doc", "examples", "example", "benchmark", "benchmarks", "bench", "scripts"),
    *("tools", "build", "dist", "bin", "requirements", "node_modules"),
}
_NOT_MODULES = frozenset({"setup", "conftest", "versioneer", "noxfile", "tasks", "fabfile"})
_MAX_ARCHIVE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """What `open_repository` found."""

    root: Path
    name: str
    """Of the distribution, as a package index spells it."""
    version: str
    licence: str
    source_root: str
    """"" or "src": what goes on the import path, relative to `root`."""
    modules: Mapping[str, str]
    """Dotted name -> path relative to `root`, of the package's own code (no tests)."""
    test_files: tuple[str, ...]
    test_paths: tuple[str, ...]
    """The fewest directories and files that hold all test files: arguments of pytest."""
    protected_paths: tuple[str, ...]
    """Patterns for `TestPlan.protected_paths`: tests and runner configuration."""
    requires: tuple[str, ...]
    """What the package itself needs to run, as pip spells it."""
    archive_sha256: str = ""
    """Of the source archive; "" for a directory."""

    @property
    def import_names(self) -> tuple[str, ...]:
        """Top-level names that the package is imported by."""
        return tuple(sorted({module.partition(".")[0] for module in self.modules}))


def open_repository(source: Path, scratch: Path) -> Repository:
    """Copy a directory, or unpack an sdist archive, into `scratch` and describe it.

    Raises ValueError, with the remedy, where it is no Python project with tests.
    """
    digest = ""
    if source.is_dir():
        _copy_directory(source, scratch)
        root = scratch
    elif source.is_file():
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        root = _unpack(source, scratch)
    else:
        raise ValueError(f"{source}: no such directory or archive")
    return describe_repository(root, archive_sha256=digest, fallback_name=_plain_name(source))


def describe_repository(
    root: Path, *, archive_sha256: str = "", fallback_name: str = ""
) -> Repository:
    """As `open_repository`, for a tree that is already in place."""
    metadata = _metadata(root)
    source_root = "src" if _top_level(root / "src") else ""
    tops = _top_level(root / source_root if source_root else root)
    tops = _of_the_distribution(root, tops, metadata)
    if not tops:
        raise ValueError(
            f"{fallback_name or root.name}: no Python package found at the top or under src/; "
            "name a directory or a source archive (.tar.gz, .zip) of one project"
        )
    base = root / source_root if source_root else root
    test_files = tuple(sorted(_test_files(root)))
    if not test_files:
        raise ValueError(
            f"{fallback_name or root.name}: no test files (test_*.py, *_test.py); "
            "the source archive may leave them out"
        )
    modules: dict[str, str] = {}
    for top in tops:
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            relative = path.relative_to(root).as_posix()
            if not _in_test_directory(relative) and relative not in test_files:
                modules[_module_name(path.relative_to(base))] = relative
    return Repository(
        root=root,
        name=metadata.get("name") or fallback_name or root.name,
        version=metadata.get("version") or "0",
        licence=metadata.get("licence") or "unknown",
        source_root=source_root,
        modules=modules,
        test_files=test_files,
        test_paths=_test_paths(test_files),
        protected_paths=_protected_paths(root, test_files),
        requires=tuple(metadata.get("requires", ())),
        archive_sha256=archive_sha256,
    )


def _copy_directory(source: Path, target: Path) -> None:
    """Without version control and environments: they are never part of a task."""
    ignored = shutil.ignore_patterns(".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox")
    shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def _unpack(archive: Path, target: Path) -> Path:
    """Regular files only. An archive with one directory at its top is that directory."""
    target.mkdir(parents=True, exist_ok=True)
    total = 0
    try:
        for name, data, mode in _members(archive):
            parts = PurePosixPath(name).parts
            if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
                raise ValueError(f"{archive}: member {name!r} leaves the archive")
            total += len(data)
            if total > _MAX_ARCHIVE_BYTES:
                raise ValueError(f"{archive}: unpacks to more than {_MAX_ARCHIVE_BYTES} bytes")
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if mode & 0o111 else 0o644)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]  # tarfile goes on with each format that it tried
        raise ValueError(f"{archive}: not a readable .tar.gz or .zip archive: {reason}") from error
    entries = list(target.iterdir())
    return entries[0] if len(entries) == 1 and entries[0].is_dir() else target


def _members(archive: Path) -> Iterator[tuple[str, bytes, int]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
                    yield info.filename, opened.read(info), info.external_attr >> 16
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                yield member.name, content.read(), member.mode


def _plain_name(source: Path) -> str:
    name = re.sub(r"\.(tar\.\w+|tgz|zip)$", "", source.resolve().name)
    return re.sub(r"-\d[\w.+!]*$", "", name)


# Metadata ---------------------------------------------------------------------------------------


def _metadata(root: Path) -> dict[str, Any]:
    """Name, version, licence and requirements: from PKG-INFO, pyproject.toml, setup.cfg."""
    found: dict[str, Any] = {}
    if (root / "PKG-INFO").is_file():
        text = (root / "PKG-INFO").read_text(encoding="utf-8", errors="replace")
        info = email.parser.Parser().parsestr(text, headersonly=True)
        found["name"], found["version"] = info["Name"], info["Version"]
        found["licence"] = _licence(
            info["License-Expression"], info["License"], info.get_all("Classifier") or []
        )
        found["requires"] = [
            line for line in info.get_all("Requires-Dist") or [] if "extra ==" not in line
        ]
    if (root / "pyproject.toml").is_file():
        project = _toml(root / "pyproject.toml").get("project", {})
        licence = project.get("license")
        spelt = licence.get("text") if isinstance(licence, dict) else licence
        _fill(found, project, _licence(spelt, None, project.get("classifiers", [])))
        found.setdefault("requires", project.get("dependencies", []))
    if (root / "setup.cfg").is_file():
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(root / "setup.cfg", encoding="utf-8")
        except configparser.Error as error:
            raise ValueError(f"{root / 'setup.cfg'}: {error}") from error
        if parser.has_section("metadata"):
            section = dict(parser["metadata"])
            _fill(found, section, _licence(section.get("license"), None, []))
    return found


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _fill(found: dict[str, Any], section: Mapping[str, Any], licence: str) -> None:
    for field in ("name", "version"):
        if not found.get(field) and section.get(field):
            found[field] = section[field]
    if not found.get("licence"):
        found["licence"] = licence


def _licence(expression: str | None, text: str | None, classifiers: list[str]) -> str:
    if expression:
        return expression
    words = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License ::")]
    short = (text or "").strip().splitlines()
    if len(short) == 1 and len(short[0]) < 60:
        return short[0]
    return words[0] if words else ""


# Layout -----------------------------------------------------------------------------------------


def _top_level(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            wanted = (path / "__init__.py").is_file() and path.name not in _NOT_PACKAGES
        else:
            wanted = path.suffix == ".py" and path.stem.isidentifier()
            wanted = wanted and path.stem not in _NOT_MODULES and not _is_test_name(path.name)
        if wanted:
            found.append(path)
    return found


def _of_the_distribution(root: Path, tops: list[Path], metadata: Mapping[str, Any]) -> list[Path]:
    """Leave out stray top-level scripts: what the build recorded, else what bears the name."""
    for listing in sorted(root.glob("**/*.egg-info/top_level.txt")):
        names = set(listing.read_text(encoding="utf-8").split())
        listed = [path for path in tops if path.stem in names]
        if listed:
            return listed
    wanted = re.sub(r"[-.]", "_", metadata.get("name") or "").lower()
    named = [path for path in tops if path.stem.lower() == wanted]
    packages = [path for path in tops if path.is_dir()]
    return packages or named or tops


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_test_name(name: str) -> bool:
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _in_test_directory(relative: str) -> bool:
    return any(part in _TEST_DIRECTORIES for part in PurePosixPath(relative).parts[:-1])


def _test_files(root: Path) -> Iterator[str]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root).as_posix()
        skipped = {"docs", "doc", "bench", "benchmarks", "build", "dist", "downstream"}
        if _is_test_name(path.name) and not skipped & set(PurePosixPath(relative).parts):
            yield relative


def _test_directory(relative: str) -> str:
    """The topmost test directory above a file; the file itself where there is none."""
    parts = PurePosixPath(relative).parts
    for index, part in enumerate(parts[:-1]):
        if part in _TEST_DIRECTORIES:
            return "/".join(parts[: index + 1])
    return relative


def _test_paths(test_files: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({_test_directory(path) for path in test_files}))


def _protected_paths(root: Path, test_files: tuple[str, ...]) -> tuple[str, ...]:
    patterns = {path if path.endswith(".py") else f"{path}/**" for path in _test_paths(test_files)}
    for name in RUNNER_FILES:
        patterns.update(path.relative_to(root).as_posix() for path in root.rglob(name))
    return tuple(sorted(patterns))
