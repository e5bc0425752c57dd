"""Tasks from the history of a git repository: a commit that changes code and its tests.

The task is the parent's tree, as one root commit without any history. What is asked comes from the
commit's message. The commit's tests are the true ones that grading uses; its other changes are the
known answer. A commit is kept only where its tests are shown to fail before and pass after.

    maker = CommitTasks(CommitTasksConfig(), backend, site=site)
    report = await maker.make(Path("repository"), Path("tasks"))
"""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megacomposer.config import Config
from megacomposer.env.grading.flaky import Stability, stable_outcomes
from megacomposer.env.grading.python_runtime import SITE_TARGET, PythonRuntime, python_runtime
from megacomposer.env.grading.verifier import Verifier
from megacomposer.env.monitor.patches import is_protected
from megacomposer.env.sandbox import WORKDIR, Limits, Mount, SandboxBackend
from megacomposer.env.task import Task, TestPlan
from megacomposer.tasks.bundle import load_bundle, save_bundle
from megacomposer.tasks.commit_message import scrub_message
from megacomposer.tasks.funnel import Funnel, RejectedError
from megacomposer.tasks.proof import prove_answers
from megacomposer.tasks.repository import Repository, describe_repository
from megacomposer.tasks.scrub import commit_root, diff_between, run_git, scrub_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitTasksConfig(Config):
    """Which commits become tasks. All numbers are our choice."""

    count: int = 10
    """Tasks to keep, newest commits first."""
    max_commits: int = 1000
    """Commits to look at."""
    revision: str = "HEAD"
    """Where to begin; its first parents are followed."""
    runs: int = 3
    """Shuffled runs of the tests, before and after, that must agree."""
    min_fail_to_pass: int = 1
    """Tests that the commit makes pass, at least."""
    max_changed_lines: int = 500
    """Lines of the answer, added and removed."""
    min_words: int = 4
    """Words that are left of the message when it is scrubbed."""
    seed: int = 0
    """Fixes the order of tests."""
    pytest_args: tuple[str, ...] = ()
    """More arguments of pytest."""
    timeout_s: float = 300.0
    """Of one run of the tests."""

    def __post_init__(self) -> None:
        for field in ("count", "max_commits", "runs", "min_fail_to_pass", "max_changed_lines"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, is {getattr(self, field)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit and its first parent."""

    sha: str
    parent: str
    message: str
    paths: tuple[str, ...]
    """What it changes; a rename is both names."""


class Writer(Protocol):
    """Writes what is asked of the agent; what it says is scrubbed as a message is."""

    async def __call__(self, commit: Commit, gold_patch: str) -> str: ...


def commits_of(root: Path, revision: str, count: int) -> list[Commit]:
    """The newest commits with one parent, newest first. ValueError where there is no history."""
    try:
        listing = run_git(
            root, "log", "--first-parent", "--no-merges", f"--max-count={count}",
            "--format=%H%x00%P%x00%B%x01", "--end-of-options", revision, "--",
        )  # fmt: skip
    except RuntimeError as error:
        raise ValueError(f"{root}: not a git repository with {revision}: {error}") from error
    found = []
    for record in listing.decode("utf-8", "replace").split("\x01"):
        sha, _, rest = record.strip("\n").partition("\0")
        parents, _, message = rest.partition("\0")
        if len(parents.split()) != 1:
            continue
        changed = run_git(
            root, "diff-tree", "-r", "-z", "--name-only", "--no-renames", parents, sha
        )
        paths = tuple(sorted(changed.decode("utf-8", "surrogateescape").split("\0")[:-1]))
        found.append(Commit(sha=sha, parent=parents, message=message, paths=paths))
    return found


class CommitTasks:
    """The pipeline, for one backend."""

    def __init__(
        self,
        config: CommitTasksConfig,
        backend: SandboxBackend,
        *,
        site: Path | None = None,
        writer: Writer | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`site` holds pytest and what the package needs, not the package (`install_site`).

        It may lie in the directory that tasks are written to, and then travels with them.
        """
        self._config, self._backend, self._site = config, backend, site
        self._writer, self._progress = writer, progress
        self._runtime: PythonRuntime = python_runtime(site, in_place=not backend.isolates)
        self._verifier = Verifier(backend, runtime=self._runtime, lint=False)

    async def make(self, repository: Path, out: Path) -> dict[str, Any]:
        """Write tasks under `out`; returns the funnel.

        Raises ValueError where `repository` is no git repository with the revision, or `out` holds
        anything but the site, and SandboxError where the infrastructure failed.
        """
        if out.exists() and any(path != self._site for path in out.iterdir()):
            raise ValueError(f"out {out} is not empty: name a new directory")
        out = out.resolve()
        commits = commits_of(repository, self._config.revision, self._config.max_commits)
        scratch = out / ".scratch"
        scratch.mkdir(parents=True)
        funnel = Funnel()
        try:
            for commit in commits:
                if len(funnel.kept) >= self._config.count:
                    break
                funnel.candidates += 1
                place = scratch / commit.sha
                place.mkdir()
                try:
                    task = await self._try(commit, repository, place, out)
                except RejectedError as error:
                    funnel.reject(commit.sha[:12], error)
                    self._progress(f"{commit.sha[:12]} {error}")
                else:
                    funnel.kept.append({"id": task.id, **task.difficulty})
                    self._progress(f"{task.id} kept")
                finally:
                    shutil.rmtree(place)
        finally:
            shutil.rmtree(scratch)
        return {"repository": repository.name, "backend": self._backend.name, **funnel.report()}

    async def _try(self, commit: Commit, repository: Path, place: Path, out: Path) -> Task:
        """The task of one commit, proven and written. Raises RejectedError."""
        if not commit.paths:
            raise RejectedError("too_small", "it changes nothing")
        after = self._tree(repository, commit.sha, place, "after")
        before = self._tree(repository, commit.parent, place, "before")
        described = self._describe(after, repository.name)
        patterns = described.protected_paths
        tests = [path for path in commit.paths if is_protected(path, patterns)]
        if not any((after / path).is_file() for path in tests):
            raise RejectedError("too_few_tests", "it changes no tests")
        answer = place / "answer"
        shutil.copytree(before, answer)
        for path in commit.paths:
            if path not in tests:
                _take(path, after, answer)
        gold = diff_between(before, answer, place)
        lines = [line for line in gold.splitlines() if re.match(rb"[+-](?![+-]{2} )", line)]
        if (
            not any(path.endswith(".py") and path not in tests for path in commit.paths)
            or not lines
        ):
            raise RejectedError("too_small", "it changes no code beside tests")
        if len(lines) > self._config.max_changed_lines:
            raise RejectedError("too_large", f"{len(lines)} lines")
        try:
            patch = gold.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RejectedError("not_text", str(error)) from error
        statement = await self._statement(commit, patch)
        plan = await self._plan(described, before, after, answer, tests, place)
        task = await self._task(commit, described, before, after, patch, statement, plan, place)
        staged = place / "staged" / task.id
        await save_bundle(task, self._backend, staged, out)
        await prove_answers(self._verifier, await load_bundle(staged, self._backend, home=out))
        staged.rename(out / task.id)
        return task

    def _tree(self, repository: Path, sha: str, place: Path, name: str) -> Path:
        """The files of a revision, scrubbed; links and submodules are left out."""
        raw = place / f"{name}-raw"
        raw.mkdir()
        archive = run_git(repository, "archive", "--format=tar", sha)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            # By hand: Python 3.11.2 has no extraction filters.
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                path = raw / member.name
                if content is None or ".." in path.parts or raw not in path.parents:
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                path.chmod(0o755 if member.mode & 0o111 else 0o644)
        tree = place / name
        tree.mkdir()
        scrub_tree(raw, tree)
        shutil.rmtree(raw)
        return tree

    def _describe(self, tree: Path, name: str) -> Repository:
        try:
            return describe_repository(tree, fallback_name=name)
        except ValueError as error:
            raise RejectedError("too_few_tests", str(error)) from error

    async def _statement(self, commit: Commit, patch: str) -> str:
        text = await self._writer(commit, patch) if self._writer else commit.message
        statement = scrub_message(text, patch)
        words = len(re.findall(r"[^\W\d_]{2,}", statement))
        if words < self._config.min_words:
            raise RejectedError("no_description", f"{words} words are left of the message")
        return statement

    async def _plan(
        self,
        described: Repository,
        before: Path,
        after: Path,
        answer: Path,
        changed: Sequence[str],
        place: Path,
    ) -> TestPlan:
        """Which tests fail before the commit's code and pass with it, on the commit's tests."""
        plan = TestPlan(
            command=self._config.pytest_args,
            protected_paths=described.protected_paths,
            timeout_s=self._config.timeout_s,
        )
        old = place / "old-code"
        shutil.copytree(before, old)
        for tree in (old, answer):
            for path in _protected(before, described.protected_paths):
                (tree / path).unlink(missing_ok=True)
            for path in _protected(after, described.protected_paths):
                _take(path, after, tree)
        passing = await self._outcomes(answer, described, plan)
        if passing.problems:
            raise RejectedError("runner_problem", "; ".join(passing.problems)[:300])
        failing = await self._outcomes(old, described, plan)
        if failing.problems:
            raise RejectedError("runner_problem", "before: " + "; ".join(failing.problems)[:300])
        known = {*failing.stable_pass, *failing.flaky}
        gained = [test for test in passing.stable_pass if test not in known]
        kept = set(failing.stable_pass)
        touched = set(changed)
        targets = tuple(test for test in gained if test.partition("::")[0] in touched) or ()
        if len(targets) < self._config.min_fail_to_pass:
            raise RejectedError("too_few_tests", f"{len(targets)} tests fail before and pass after")
        return dataclasses.replace(
            plan,
            fail_to_pass=targets,
            pass_to_pass=tuple(test for test in passing.stable_pass if test in kept),
        )

    async def _outcomes(self, tree: Path, described: Repository, plan: TestPlan) -> Stability:
        snapshot = await self._backend.import_tree(str(tree))
        return await stable_outcomes(
            self._backend, snapshot, plan, self._runtime, self._config.runs, self._config.seed,
            files=described.test_paths,
        )  # fmt: skip

    async def _task(
        self,
        commit: Commit,
        described: Repository,
        before: Path,
        after: Path,
        patch: str,
        statement: str,
        plan: TestPlan,
        place: Path,
    ) -> Task:
        true_tests = place / "pristine"
        for path in _protected(after, described.protected_paths):
            _take(path, after, true_tests)
        commit_root(before)
        paths = [str(WORKDIR / "src")] if described.source_root else []
        mounts: tuple[Mount, ...] = ()
        if self._site is not None:
            mounts = (Mount(source=str(self._site.resolve()), target=SITE_TARGET),)
        package = re.sub(r"[^a-z0-9]+", "-", described.name.lower()).strip("-")
        return Task(
            id=f"{package}-commit-{commit.sha[:12]}",
            instruction=statement,
            base=await self._backend.import_tree(str(before)),
            pristine=await self._backend.import_tree(str(true_tests)),
            tests=plan,
            mounts=mounts,
            env={
                "PYTHONPATH": ":".join([*paths, str(WORKDIR), SITE_TARGET]),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            limits=Limits(),
            gold_patch=patch,
            origin={
                "kind": "commit",
                "repository": described.name,
                "version": described.version,
                "licence": described.licence,
                "commit": commit.sha,
            },
            difficulty={
                "target_tests": len(plan.fail_to_pass),
                "files": patch.count("\ndiff --git ") + 1,
                "changed_lines": sum(
                    line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
                    for line in patch.splitlines()
                ),
                "instruction_chars": len(statement),
            },
        )


def _protected(tree: Path, patterns: Sequence[str]) -> list[str]:
    files = (path for path in sorted(tree.rglob("*")) if path.is_file())
    names = (path.relative_to(tree).as_posix() for path in files)
    return [name for name in names if is_protected(name, patterns)]


def _take(path: str, source: Path, target: Path) -> None:
    """Make `path` of `target` what it is in `source`: there, or not there."""
    (target / path).unlink(missing_ok=True)
    if (source / path).is_file():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target / path)
