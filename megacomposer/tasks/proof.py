"""Shows, in sandboxes, that a deletion is a task: the right tests fail, for the right reason."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from megacomposer.env.grading.flaky import Stability, stable_outcomes
from megacomposer.env.grading.pristine import find_config
from megacomposer.env.grading.python_runtime import PythonRuntime
from megacomposer.env.grading.test_run import RunOptions, TestRun, run_tests
from megacomposer.env.grading.verifier import Verifier, score
from megacomposer.env.sandbox import Limits, Sandbox, SandboxBackend, SandboxSpec, Snapshot
from megacomposer.env.task import Task, TestPlan
from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.coverage import TestCoverage, measure_coverage
from megacomposer.tasks.funnel import RejectedError
from megacomposer.tasks.repository import Repository

_IMPORT_PROGRAM = """
import importlib, json, os, sys
channel = os.dup(1)
os.dup2(2, 1)
sys.path[:0] = sys.argv[1].split(":")
failed = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
os.write(channel, json.dumps(failed).encode())
"""
_MISSING = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NameError"})
"""A missing name; the message must say which."""
_WRONG_RESULT = frozenset({"AssertionError", "Failed"})
"""An assertion, or `pytest.raises` and its like; the test must run the deleted code."""
_ERROR_LINE = re.compile(r"^E\s+(?:([\w.]+?)(?::|$)|(assert)\b)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intact:
    """What the whole package does, before anything is deleted."""

    stable: tuple[str, ...]
    """Tests that passed in every run, in files of the package's own."""
    unstable: int
    """Tests that did not: failing, skipped or changing."""
    coverage: TestCoverage
    not_importable: frozenset[str]
    """Modules that do not import here, such as those for other systems."""
    wall_s: float
    """Of one whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProofLimits:
    """When a proven deletion is a good task."""

    min_target_tests: int = 2
    max_target_share: float = 0.8
    """Of the stable tests."""
    runs: int = 5
    """Of the intact suite, shuffled."""


class Prover:
    """Runs the suite of one repository in sandboxes of one backend."""

    def __init__(
        self,
        backend: SandboxBackend,
        runtime: PythonRuntime,
        repository: Repository,
        graph: CallGraph,
        *,
        limits: ProofLimits,
        sandbox_limits: Limits,
        plan: TestPlan,
    ) -> None:
        """`plan` says how tests are run; its lists of tests are not used."""
        self._backend, self._runtime = backend, runtime
        self._repository, self._graph = repository, graph
        self.limits, self._plan = limits, plan
        self._sandbox_limits = sandbox_limits

    def _spec(self, base: Snapshot) -> SandboxSpec:
        return SandboxSpec(base=base, mounts=self._runtime.mounts, limits=self._sandbox_limits)

    async def intact(self, base: Snapshot, seed: int) -> Intact:
        """The suite of the whole package, several times, and which test calls what.

        Raises ValueError where the suite cannot be used: no stable test, no honest end.
        """
        paths = self._repository.test_paths
        runs = self.limits.runs
        stability = await stable_outcomes(
            self._backend, base, self._plan, self._runtime, runs, seed,
            files=paths, limits=self._sandbox_limits,
        )  # fmt: skip
        if stability.problems or not stability.stable_pass:
            raise ValueError(
                f"the tests of {self._repository.name} do not run here: {_words(stability)}. "
                "Packages that they need are named with --requires, plugins with --pytest-args"
            )
        own = set(self._repository.test_files)
        stable = tuple(name for name in stability.stable_pass if _file(name) in own)
        async with await self._backend.start(self._spec(base)) as sandbox:
            options = RunOptions(files=paths, config_file=await find_config(sandbox))
            coverage = await measure_coverage(
                sandbox, self._plan, self._runtime, options, self._graph
            )
            broken = await self._not_importable(sandbox, self._graph.modules)
        return Intact(
            stable=stable,
            unstable=len(stability.stable_fail) + len(stability.flaky),
            coverage=coverage,
            not_importable=frozenset(broken),
            wall_s=max(run.wall_s for run in stability.runs),
        )

    async def deleted(
        self,
        base: Snapshot,
        intact: Intact,
        symbols: frozenset[str],
        modules: frozenset[str],
        seed: int,
    ) -> tuple[str, ...]:
        """The tests that fail without `symbols`: exactly those that should. RejectedError.

        First the affected test files only, then the whole suite in another order.
        """
        covered = intact.coverage.of(symbols) & set(intact.stable)
        names = frozenset(_leaf_names(symbols, modules))
        affected = sorted({_file(name) for name in covered} | self._files_naming(names))
        self._check_count(len(covered), len(intact.stable), at_least=1)
        async with await self._backend.start(self._spec(base)) as sandbox:
            left = [name for name in self._graph.modules if name not in modules]
            broken = await self._not_importable(sandbox, left)
            fresh = sorted(set(broken) - intact.not_importable)
            if fresh:
                raise RejectedError("broken_import", f"{fresh[0]}: {broken[fresh[0]]}")
            config = await find_config(sandbox)
            # Quick and cheap: most candidates that fail, fail here.
            run = await self._run(sandbox, tuple(affected), config, None)
            _targets(run, intact.stable, covered, names, set(affected))
        async with await self._backend.start(self._spec(base)) as sandbox:
            run = await self._run(sandbox, self._repository.test_paths, config, seed)
            everywhere = set(self._repository.test_files)
            targets = _targets(run, intact.stable, covered, names, everywhere)
        self._check_count(len(targets), len(intact.stable), at_least=self.limits.min_target_tests)
        if len(targets) == len(intact.stable):
            raise RejectedError("no_survivors", f"all {len(targets)} tests fail")
        return targets

    def _check_count(self, count: int, of: int, *, at_least: int) -> None:
        if count < at_least:
            raise RejectedError("too_few_tests", f"{count} tests")
        if count > self.limits.max_target_share * of:
            raise RejectedError("too_broad", f"{count} of {of} tests")

    def _files_naming(self, names: Iterable[str]) -> set[str]:
        """Test files with one of the names in their text: they may fail to import it."""
        pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
        root = self._repository.root
        return {
            path
            for path in self._repository.test_files
            if pattern.search((root / path).read_text(encoding="utf-8", errors="replace"))
        }

    async def _run(
        self, sandbox: Sandbox, files: tuple[str, ...], config: str | None, seed: int | None
    ) -> TestRun:
        options = RunOptions(files=files, config_file=config, seed=seed, hash_seed=seed)
        run = await run_tests(sandbox, self._plan, self._runtime, options)
        if run.problems:
            raise RejectedError("runner_problem", "; ".join(run.problems)[:300])
        return run

    async def _not_importable(self, sandbox: Sandbox, modules: Iterable[str]) -> dict[str, str]:
        """Module -> why it does not import."""
        paths = ":".join([part for part in (self._repository.source_root, ".") if part])
        names = [name for name in modules if not name.endswith("__main__")]
        site = f"{paths}:{self._runtime.site}" if self._runtime.site else paths
        result = await sandbox.exec(
            [self._runtime.python, "-I", "-B", "-c", _IMPORT_PROGRAM, site, *names],
            env=dict(self._runtime.env),
        )
        if not result.ok:
            words = result.stderr.decode(errors="replace")[-300:]
            raise RejectedError("broken_import", f"the process ended ({result.exit_code}): {words}")
        failed: dict[str, str] = json.loads(result.stdout)
        return failed


async def prove_answers(verifier: Verifier, task: Task) -> None:
    """The starting state scores 0 and breaks nothing else; the true code scores 1.

    Raises RejectedError.
    """
    verdict = await verifier.verify(task, b"")
    still = [name for name, how in verdict.tests.fail_to_pass.items() if how == "passed"]
    broken = [name for name, how in verdict.tests.pass_to_pass.items() if how != "passed"]
    if score(verdict) != 0.0 or still or broken:
        which = (still or broken or ["all"])[0]
        raise RejectedError("no_op_accepted", f"{which}; {verdict.reason}")
    verdict = await verifier.verify(task, task.gold_patch.encode())
    if score(verdict) != 1.0:
        raise RejectedError("answer_refused", verdict.reason)


def _words(stability: Stability) -> str:
    """Why a suite is of no use, in one line."""
    words = [*stability.problems[:1], *stability.runs[0].output_tail.strip().splitlines()[-1:]]
    for text in list(stability.details.values())[:3]:
        words += [line.lstrip("E ") for line in text.splitlines() if line.startswith("E ")][-1:]
    return "; ".join(words) or "no test passes"


# Reasons ----------------------------------------------------------------------------------------


def _targets(
    run: TestRun,
    stable: Sequence[str],
    covered: frozenset[str],
    names: frozenset[str],
    files: set[str],
) -> tuple[str, ...]:
    """Of the stable tests in `files`, those that do not pass; each must have the right reason."""
    targets: list[str] = []
    for test in stable:
        if _file(test) not in files:
            continue
        outcome = run.outcomes.get(test, "absent")
        if outcome == "passed":
            continue
        if outcome == "absent":
            _check_collection(test, run.details, names)
        elif outcome in ("failed", "error"):
            _check_failure(test, run.details.get(test, ""), names, test in covered)
        else:
            raise RejectedError("wrong_reason", f"{test} is {outcome}")
        targets.append(test)
    return tuple(targets)


def _check_collection(test: str, details: Mapping[str, str], names: frozenset[str]) -> None:
    text = details.get(_file(test), "")
    if not _says_missing(text, names):
        last = text.strip().splitlines()[-1:] or ["nothing is said"]
        raise RejectedError("collection_error", f"{_file(test)}: {last[0]}")


def _check_failure(test: str, text: str, names: frozenset[str], covered: bool) -> None:
    if _says_missing(text, names):
        return
    kinds = {name or "AssertionError" for name, _ in _ERROR_LINE.findall(text)}
    kinds = {name.rpartition(".")[2] for name in kinds}
    if not kinds & _WRONG_RESULT:
        raise RejectedError("wrong_reason", f"{test}: {' '.join(sorted(kinds)) or text[-100:]}")
    if not covered:
        raise RejectedError("unrelated_failure", test)


def _says_missing(text: str, names: frozenset[str]) -> bool:
    """A line of pytest's such as `E   NameError: name 'chunked' is not defined`."""
    for line in text.splitlines():
        match = _ERROR_LINE.match(line)
        missing = match and (match.group(1) or "").rpartition(".")[2] in _MISSING
        if missing and names & set(re.findall(r"\w+", line)):
            return True
    return False


def _leaf_names(symbols: Iterable[str], modules: Iterable[str]) -> Iterable[str]:
    for id in symbols:
        yield id.partition(":")[2].rpartition(".")[2]
    for module in modules:
        yield module.rpartition(".")[2]


def _file(test: str) -> str:
    return test.partition("::")[0]
