"""Judges an answer: a fresh sandbox, the answer's patch, the true tests, evidence by kind.

    verifier = Verifier(backend, record=audit.record)
    verdict = await verifier.verify(task, patch)
    reward = score(verdict)

Nothing of the sandbox that the agent used is looked at; only its patch is. What of this code under
test could still forge is said in docs/verifier.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from megacomposer.env.audit import Record, discard
from megacomposer.env.grading.evidence import (
    PASSING,
    BehaviourEvidence,
    LintEvidence,
    PatchEvidence,
    TamperEvidence,
    TestEvidence,
    Verdict,
    score,
)
from megacomposer.env.grading.lint import ruff_findings
from megacomposer.env.grading.patch_size import patch_evidence
from megacomposer.env.grading.pristine import Pristine, protected_patterns, read_pristine
from megacomposer.env.grading.python_runtime import PythonRuntime, runtime_of
from megacomposer.env.grading.report_reading import SUSPICIOUS
from megacomposer.env.grading.test_run import (
    RunOptions,
    TestRun,
    run_tests,
    test_files,
)
from megacomposer.env.grading.workspace_diff import (
    Manifest,
    read_manifest,
    replace_files,
    workspace_patch,
)
from megacomposer.env.sandbox import (
    PatchRejectedError,
    Sandbox,
    SandboxBackend,
    SandboxFileError,
    SandboxSpec,
    Status,
)
from megacomposer.env.task import BehaviourCheck, Task

__all__ = ["Verifier", "Verdict", "score", "workspace_patch"]

_KEPT_STATES = 64
_DETAIL_CHARS = 500


class Verifier:
    """Grades answers on one backend. Several calls may run at once."""

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        record: Record = discard,
        runtime: PythonRuntime | None = None,
        confirm: bool = False,
        lint: bool = True,
    ) -> None:
        """`runtime` must have pytest; None: the interpreter of this process, with the packages
        that the task mounts at /opt/site. `confirm` runs the required tests a second time where
        they pass, each file in a process of its own, and compares. `lint` runs ruff if the runtime
        has it."""
        self._backend, self._record = backend, record
        self._runtime, self._confirm, self._lint = runtime, confirm, lint
        self._states: dict[tuple[object, ...], Pristine] = {}

    async def verify(self, task: Task, patch: bytes) -> Verdict:
        """Judge `patch`, a `git diff --binary` against `task.base`; b"" is no answer.

        Raises SandboxError where the infrastructure failed: then there is no verdict.
        """
        runtime = runtime_of(task.mounts, in_place=not self._backend.isolates, given=self._runtime)
        # What changes how Python and pytest start is for the agent's own runs.
        env = {
            name: value
            for name, value in task.env.items()
            if not name.startswith(("PYTHON", "PYTEST"))
        }
        spec = SandboxSpec(base=task.base, mounts=runtime.mounts, limits=task.limits, env=env)
        state = await self._pristine(task, spec)
        async with await self._backend.start(spec) as sandbox:
            size = await patch_evidence(sandbox, patch, state.patterns)
            lint_before = await self._findings(sandbox, runtime, size.paths)
            before = await read_manifest(sandbox, state.patterns)
            try:
                await sandbox.patch(patch)
            except PatchRejectedError as error:
                return self._rejected(task, sandbox, size.evidence, str(error))
            replaced = _changes(before, await read_manifest(sandbox, state.patterns))
            lint = _new_findings(lint_before, await self._findings(sandbox, runtime, size.paths))
            await replace_files(sandbox, state.archive, state.patterns)
            if replaced:
                self._record("verifier", sandbox=sandbox.id, task=task.id, replaced=replaced)
            run, behaviour, disagreements = await self._judge(task, sandbox, runtime, state)
            verdict = _verdict(task, run, size.evidence, lint, behaviour, replaced, disagreements)
            self._record_verdict(sandbox, verdict)
            return verdict

    async def _pristine(self, task: Task, spec: SandboxSpec) -> Pristine:
        patterns = protected_patterns(task.tests)
        key = (task.pristine, patterns, spec.mounts)
        if key not in self._states:
            true_spec = dataclasses.replace(spec, base=task.pristine)
            async with await self._backend.start(true_spec) as sandbox:
                state = await read_pristine(sandbox, patterns)
            while len(self._states) >= _KEPT_STATES:
                del self._states[next(iter(self._states))]
            self._states[key] = state
        return self._states[key]

    async def _judge(
        self, task: Task, sandbox: Sandbox, runtime: PythonRuntime, state: Pristine
    ) -> tuple[TestRun, tuple[BehaviourEvidence, ...], list[str]]:
        """Tests, checks and the second run, each where the others have left no trace."""
        plan = task.tests
        required = (*plan.fail_to_pass, *plan.pass_to_pass)
        files = tuple(file for file in test_files(required) if state.may_exist(file))
        options = RunOptions(files=files, config_file=state.config_file, control=True)
        second = await sandbox.fork() if plan.behaviour or self._confirm else None
        try:
            run = await run_tests(sandbox, plan, runtime, options)
            behaviour: list[BehaviourEvidence] = []
            disagreements: list[str] = []
            if second is not None:
                if self._confirm and plan.runner == "pytest" and _all_pass(run, required):
                    disagreements = await _confirm(second, task, runtime, options, run)
                for check in plan.behaviour:
                    behaviour.append(await _behaviour(second, check, runtime))
            return run, tuple(behaviour), disagreements
        finally:
            if second is not None:
                await second.close()

    async def _findings(
        self, sandbox: Sandbox, runtime: PythonRuntime, paths: Sequence[str]
    ) -> tuple[str, ...] | None:
        if not self._lint:
            return None
        return await ruff_findings(sandbox, runtime, paths)

    def _rejected(self, task: Task, sandbox: Sandbox, size: PatchEvidence, message: str) -> Verdict:
        verdict = Verdict(
            task_id=task.id,
            status="patch_rejected",
            reason=f"the patch does not apply: {message[:_DETAIL_CHARS]}",
            tests=TestEvidence(
                fail_to_pass=dict.fromkeys(task.tests.fail_to_pass, "absent"),
                pass_to_pass=dict.fromkeys(task.tests.pass_to_pass, "absent"),
                other={},
                details={},
                collected=0,
                status="",
                exit_code=0,
                wall_s=0.0,
                output_tail="",
            ),
            patch=size,
            lint=LintEvidence(available=False),
            behaviour=(),
            tampering=TamperEvidence(),
        )
        self._record_verdict(sandbox, verdict)
        return verdict

    def _record_verdict(self, sandbox: Sandbox, verdict: Verdict) -> None:
        self._record(
            "verifier",
            sandbox=sandbox.id,
            task=verdict.task_id,
            status=verdict.status,
            passed=verdict.passed,
            reason=verdict.reason,
            tampering=list(verdict.tampering.mattered),
        )


def _all_pass(run: TestRun, required: Sequence[str]) -> bool:
    return not run.problems and all(run.outcomes.get(name) in PASSING for name in required)


async def _confirm(
    sandbox: Sandbox, task: Task, runtime: PythonRuntime, options: RunOptions, first: TestRun
) -> list[str]:
    required = {*task.tests.fail_to_pass, *task.tests.pass_to_pass}
    found: list[str] = []
    for file in options.files:
        alone = dataclasses.replace(options, files=(file,))
        run = await run_tests(sandbox, task.tests, runtime, alone)
        found += [f"second_run: {problem}" for problem in run.problems]
        for name in sorted(required):
            again = run.outcomes.get(name, "absent")
            if name.partition("::")[0] == file and again not in PASSING:
                found.append(f"second_run: {name} was {first.outcomes[name]}, then {again}")
    return found


async def _behaviour(
    sandbox: Sandbox, check: BehaviourCheck, runtime: PythonRuntime
) -> BehaviourEvidence:
    command = [part.replace("{python}", runtime.python) for part in check.command]
    try:
        result = await sandbox.exec(
            command, env=runtime.env, stdin=check.stdin.encode(), timeout_s=check.timeout_s
        )
    except SandboxFileError as error:
        return BehaviourEvidence(name=check.name, passed=False, detail=str(error))
    detail = ""
    if result.status is not Status.EXITED:
        detail = f"ended with {result.status}"
    elif result.exit_code != check.exit_code:
        detail = f"exit code {result.exit_code}, expected {check.exit_code}"
    elif check.stdout is not None and result.stdout != check.stdout.encode():
        detail = f"printed {result.stdout[:_DETAIL_CHARS]!r}"
    return BehaviourEvidence(name=check.name, passed=not detail, detail=detail)


def _changes(before: Manifest, after: Manifest) -> tuple[str, ...]:
    changes = []
    for path in sorted({*before, *after}):
        if path not in before:
            changes.append(f"added {path}")
        elif path not in after:
            changes.append(f"deleted {path}")
        elif before[path] != after[path]:
            changes.append(f"modified {path}")
    return tuple(changes)


def _new_findings(before: tuple[str, ...] | None, after: tuple[str, ...] | None) -> LintEvidence:
    if before is None or after is None:
        return LintEvidence(available=False)
    left = list(before)
    new = []
    for finding in after:
        if finding in left:
            left.remove(finding)
        else:
            new.append(finding)
    return LintEvidence(available=True, new_findings=tuple(new))


def _verdict(
    task: Task,
    run: TestRun,
    size: PatchEvidence,
    lint: LintEvidence,
    behaviour: tuple[BehaviourEvidence, ...],
    replaced: tuple[str, ...],
    disagreements: Sequence[str],
) -> Verdict:
    # What a run reported that cannot be believed, or did not end, is as if it had not run.
    outcomes: Mapping[str, str] = {} if run.problems else run.outcomes
    plan = task.tests
    required = {*plan.fail_to_pass, *plan.pass_to_pass}
    tests = TestEvidence(
        fail_to_pass={name: outcomes.get(name, "absent") for name in plan.fail_to_pass},
        pass_to_pass={name: outcomes.get(name, "absent") for name in plan.pass_to_pass},
        other={name: out for name, out in outcomes.items() if name not in required},
        details={
            name: text
            for name, text in run.details.items()
            if name in required or any(test.startswith(f"{name}::") for test in required)
        },
        collected=run.collected,
        status=str(run.status),
        exit_code=run.exit_code,
        wall_s=run.wall_s,
        output_tail=run.output_tail,
    )
    mattered = [problem for problem in run.problems if problem.startswith(SUSPICIOUS)]
    return Verdict(
        task_id=task.id,
        status="graded",
        reason=_reason(tests, run, behaviour, [*mattered, *disagreements]),
        tests=tests,
        patch=size,
        lint=lint,
        behaviour=behaviour,
        tampering=TamperEvidence(
            replaced=replaced, mattered=(*mattered, *disagreements), noted=run.notes
        ),
    )


def _reason(
    tests: TestEvidence,
    run: TestRun,
    behaviour: Sequence[BehaviourEvidence],
    mattered: Sequence[str],
) -> str:
    if mattered:
        return mattered[0]
    if run.problems:
        return run.problems[0]
    required = tests.required
    if not required:
        return "the task requires no test"
    bad = [f"{name} {outcome}" for name, outcome in required.items() if outcome not in PASSING]
    if bad:
        return f"{len(bad)} of {len(required)} required tests do not pass: {bad[0]}"
    return next((f"check {one.name}: {one.detail}" for one in behaviour if not one.passed), "")
