"""What a scrub leaves behind is what an agent reads the answer from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megacomposer.tasks.scrub import (
    assert_one_root_commit,
    commit_root,
    diff_between,
    is_residue,
    run_git,
    scrub_tree,
)

Project = Callable[[dict[str, str]], Path]
RESIDUE = (
    *("kit/__pycache__/core.cpython-311.pyc", ".mypy_cache/3.11/kit/core.data.json"),
    *(".pytest_cache/v/cache/lastfailed", "build/lib/kit/core.py", "dist/kit-1.whl"),
    *("kit.egg-info/SOURCES.txt", "kit-1.dist-info/METADATA", "PKG-INFO", "kit/core.py.orig"),
    *("kit/core.py~", "kit/.core.py.swp", "kit/core.rej", "kit/fast.so", "lib/kit.jar"),
    *("Kit.class", "docs/_build/html/core.html", ".git/HEAD", ".tox/py/kit.py", "old.tar.gz"),
    *(".hypothesis/examples/a", ".coverage", "kit.egg-link", "htmlcov/index.html"),
)
KEPT = ("kit/core.py", "tests/test_core.py", "docs/index.rst", "setup.py", "kit/build/step.py")


def test_only_sources_are_copied(project: Project, tmp_path: Path) -> None:
    root = project(dict.fromkeys((*RESIDUE, *KEPT), "content"))
    (root / "kit" / "link.py").symlink_to("/etc/hostname")
    target = tmp_path / "target"
    removed = scrub_tree(root, target)
    left = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert left == set(KEPT)
    assert "kit/link.py" in removed
    assert ".git/" in removed


@pytest.mark.parametrize("path", KEPT)
def test_source_is_no_residue(path: str) -> None:
    parts = path.split("/")
    folders = ["/".join(parts[:end]) for end in range(1, len(parts))]
    assert not any(is_residue(folder, directory=True) for folder in folders)
    assert not is_residue(path, directory=False)


def test_repository_has_one_root_commit_and_nothing_beside_it(
    sample_project: Path, tmp_path: Path
) -> None:
    (sample_project / ".gitignore").write_text("*.md\n")
    commit_root(sample_project)
    assert_one_root_commit(sample_project)
    assert run_git(sample_project, "status", "--porcelain") == b""
    assert b"README.md" in run_git(sample_project, "ls-files"), "ignored files are committed too"
    reachable = len(run_git(sample_project, "rev-list", "--objects", "--all").splitlines())
    counted = run_git(sample_project, "count-objects", "-v").decode()
    assert f"count: {reachable}\n" in counted
    assert "packs: 0\n" in counted


def test_same_files_make_the_same_repository(project: Project, tmp_path: Path) -> None:
    digests = []
    for _ in range(2):
        root = project({"a.py": "x = 1\n", "crlf.txt": "a\r\nb\r\n", ".gitattributes": "* text\n"})
        commit_root(root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        digests.append([(path.relative_to(root), path.read_bytes()) for path in files])
        subprocess.run(["rm", "-r", str(root)], check=True)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("leftover", ["commit", "object", "remote", "branch", "reflog"])
def test_leftovers_in_git_are_noticed(leftover: str, project: Project) -> None:
    root = project({"a.py": "x = 1\n"})
    commit_root(root)
    if leftover == "commit":
        run_git(root, "commit", "--quiet", "--allow-empty", "-m", "second")
    elif leftover == "object":
        (root / "a.py").write_text("secret = 2\n")
        run_git(root, "hash-object", "-w", "a.py")
    elif leftover == "remote":
        run_git(root, "remote", "add", "origin", "https://example.org/a.git")
    elif leftover == "branch":
        run_git(root, "branch", "other")
    else:
        (root / ".git" / "logs").mkdir()
    with pytest.raises(AssertionError):
        assert_one_root_commit(root)


def test_patch_between_trees_restores_every_byte(project: Project, tmp_path: Path) -> None:
    before = project({"kit/a.py": "x = 1\n", "kit/gone.py": "y = 2\n"})
    after = tmp_path / "after"
    (after / "kit").mkdir(parents=True)
    (after / "kit" / "a.py").write_bytes(b"x = 1\r\ny = 3")
    (after / "kit" / "na\u00efve name.bin").write_bytes(b"\0\1\2\xff")
    (tmp_path / "scratch").mkdir()
    patch = diff_between(before, after, tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []
    commit_root(before)
    (tmp_path / "p").write_bytes(patch)
    run_git(before, "apply", "--binary", str(tmp_path / "p"))
    left = {
        path.relative_to(before).as_posix(): path.read_bytes()
        for path in (before / "kit").rglob("*")
    }
    assert left == {
        "kit/a.py": b"x = 1\r\ny = 3",
        "kit/na\u00efve name.bin": b"\0\1\2\xff",
    }
