"""Builds a task's tree from nothing: source files only, and git with exactly one root commit."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

RESIDUE_DIRECTORIES = (
    *(".git", ".hg", ".svn", ".bzr", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"),
    *(".pytype", ".pyre", ".hypothesis", ".tox", ".nox", ".eggs", ".venv", "venv", "htmlcov"),
    *(".ipynb_checkpoints", ".cache", "node_modules", "__pypackages__", ".idea", ".vscode"),
    *("*.egg-info", "*.dist-info", "*.dSYM", ".benchmarks", "site-packages"),
)
"""Directories that no task's tree holds, at any depth. Shell patterns of the name."""
RESIDUE_FILES = (
    *("*.pyc", "*.pyo", "*.pyd", "*.so", "*.o", "*.a", "*.dylib", "*.dll", "*.class", "*.jar"),
    *("*.war", "*.whl", "*.egg", "*.egg-link", "*.pth", "*.tar", "*.tar.*", "*.tgz", "*.tbz2"),
    *("*.orig", "*.rej", "*.bak", "*~", "#*#", ".#*", ".*.sw?", ".sw?", "*.un~"),
    *(".coverage", ".coverage.*", "coverage.xml", "*.cover", "*,cover", ".dmypy.json"),
    *("PKG-INFO", "core", "core.[0-9]*", "*.prof", "TAGS", "tags", ".tags"),
)
"""Files that no task's tree holds, at any depth."""
RESIDUE_PATHS = (
    *("build", "dist", "sdist", "wheels", "docs/_build", "doc/_build", "docs/build", "doc/build"),
    "site",
)
"""Directories at these places only: build output and rendered documentation."""


def is_residue(path: str, *, directory: bool) -> bool:
    """Whether a path of a workspace is one that scrubbing takes away."""
    name = PurePosixPath(path).name
    patterns = RESIDUE_DIRECTORIES if directory else RESIDUE_FILES
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
        return True
    return directory and path in RESIDUE_PATHS


def scrub_tree(source: Path, target: Path, *, keep: frozenset[str] = frozenset()) -> list[str]:
    """Copy the files of `source` that are no residue; returns what was left out, sorted.

    `keep` names files that stay although they look like residue: data of tests. Links are left
    out too: a task's tree is plain files.
    """
    removed: list[str] = []
    for path, kind in _walk(source):
        relative = path.relative_to(source).as_posix()
        kept_below = any(name.startswith(relative + "/") for name in keep)
        if kind == "directory":
            if is_residue(relative, directory=True) and not kept_below:
                removed.append(relative + "/")
        elif kind == "link" or relative not in keep and is_residue(relative, directory=False):
            removed.append(relative)
        elif not any(relative.startswith(gone) for gone in removed if gone.endswith("/")):
            destination = target / relative
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)
            destination.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)
    return sorted(removed)


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    for directory, names, files in os.walk(root):
        names.sort()
        for name in names:
            path = Path(directory, name)
            yield path, "link" if path.is_symlink() else "directory"
        for name in sorted(files):
            path = Path(directory, name)
            yield path, "link" if path.is_symlink() else "file"


def write_edits(root: Path, edits: Mapping[str, bytes | None]) -> None:
    """Replace files, or remove them (None), and directories that become empty."""
    for relative, content in edits.items():
        path = root / relative
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            continue
        path.unlink()
        parent = path.parent
        while parent != root and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent


# Git --------------------------------------------------------------------------------------------

_IDENTITY = {
    "GIT_AUTHOR_NAME": "task",
    "GIT_AUTHOR_EMAIL": "task@localhost",
    "GIT_COMMITTER_NAME": "task",
    "GIT_COMMITTER_EMAIL": "task@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


def run_git(root: Path, *arguments: str, git_directory: Path | None = None) -> bytes:
    """Git without the user's or the system's configuration. RuntimeError with its words."""
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "LC_ALL": "C",
        **_IDENTITY,
    }
    if git_directory is not None:
        env["GIT_DIR"], env["GIT_WORK_TREE"] = str(git_directory.resolve()), str(root.resolve())
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.quotePath=false", *arguments]
    result = subprocess.run(command, cwd=root, env=env, capture_output=True, check=False)
    if result.returncode:
        words = result.stderr.decode(errors="replace").strip()
        raise RuntimeError(f"git {' '.join(arguments)} failed in {root}: {words}")
    return result.stdout


def commit_root(root: Path) -> None:
    """Make `root` a repository of one root commit that holds every file, and check that.

    The same files give the same bytes: dates are fixed and the index holds no file times.
    """
    template = (root / ".git-template").resolve()
    template.mkdir()
    run_git(root, "init", "--quiet", "--initial-branch=main", f"--template={template}")
    template.rmdir()
    attributes = root / ".git" / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    # Whatever .gitattributes says: files are stored, and diffed, byte for byte.
    attributes.write_text("* -text -filter -ident -working-tree-encoding\n", encoding="ascii")
    run_git(root, "add", "--all", "--force")
    run_git(root, "commit", "--quiet", "--allow-empty", "--no-verify", "-m", "Initial commit")
    (root / ".git" / "COMMIT_EDITMSG").unlink()
    shutil.rmtree(root / ".git" / "logs")
    (root / ".git" / "index").unlink()
    run_git(root, "read-tree", "HEAD")
    assert_one_root_commit(root)


def assert_one_root_commit(root: Path) -> None:
    """AssertionError unless the repository is one commit without anything beside it."""
    commits = run_git(root, "rev-list", "--all", "--parents").split()
    assert len(commits) == 1, f"{root}: {len(commits)} commits, expected one root"
    assert run_git(root, "remote") == b"", f"{root} has remotes"
    # --no-reflogs: a reflog would keep an object reachable that no branch has.
    assert run_git(root, "fsck", "--unreachable", "--no-reflogs", "--full") == b""
    references = run_git(root, "for-each-ref", "--format=%(refname)").split()
    assert references == [b"refs/heads/main"], references
    leftovers = ("ORIG_HEAD", "FETCH_HEAD", "packed-refs", "logs", "hooks", "modules", "worktrees")
    for name in (*leftovers, "objects/info/alternates", "refs/stash"):
        assert not (root / ".git" / name).exists(), f"{root}/.git/{name}"


def diff_between(before: Path, after: Path, scratch: Path) -> bytes:
    """`git diff --binary` from one tree of files to another, as a patch for `before`."""
    git = (scratch / "diff.git").resolve()
    git.mkdir(parents=True)
    try:
        run_git(before, "init", "--quiet", "--bare", "--template=", str(git))
        (git / "info").mkdir(exist_ok=True)
        (git / "info" / "attributes").write_text("* -text -filter -ident\n", encoding="ascii")
        run_git(before, "add", "--all", "--force", git_directory=git)
        run_git(before, "commit", "--quiet", "--allow-empty", "-m", "before", git_directory=git)
        run_git(after, "add", "--all", "--force", git_directory=git)
        return run_git(
            after,
            "diff",
            "--cached",
            "--binary",
            "--no-color",
            "--no-ext-diff",
            "HEAD",
            git_directory=git,
        )
    finally:
        shutil.rmtree(git)
