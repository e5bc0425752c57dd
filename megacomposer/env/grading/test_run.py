"""One run of a task's tests in a sandbox, and whether its report can be believed."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from megacomposer.env.grading import pytest_report
from megacomposer.env.grading.control_tests import ControlTests
from megacomposer.env.grading.junit import JunitError, parse_junit
from megacomposer.env.grading.python_runtime import PythonRuntime
from megacomposer.env.grading.report_reading import FAILING, ReportReading
from megacomposer.env.sandbox import ExecResult, Sandbox, SandboxFileError, Status
from megacomposer.env.task import TestPlan

PYTEST_ARGUMENTS = (
    *("-p", "no:cacheprovider", "--rootdir=.", "--confcutdir=.", "--continue-on-collection-errors"),
    # What the plan needs of these it says itself, in `command`.
    *("-o", "addopts=", "-o", "required_plugins="),
    *("-q", "--color=no", "--tb=short"),
)
_PROGRAM = Path(pytest_report.__file__).read_text(encoding="utf-8")
_TAIL_BYTES = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestRun:
    """What a run reported. A test that is not in `outcomes` was not run."""

    __test__ = False

    outcomes: Mapping[str, str]
    """Test id -> passed, xpassed, failed, error, skipped or xfailed."""
    details: Mapping[str, str]
    """Test id -> the end of its failure's text; file -> why it could not be collected."""
    durations_s: Mapping[str, float]
    collected: int
    problems: tuple[str, ...]
    """`kind: detail`: why nothing here counts as passed. () for a run that fails test by test."""
    notes: tuple[str, ...]
    status: Status
    exit_code: int
    wall_s: float
    output_tail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How one run differs from another of the same plan."""

    files: tuple[str, ...] = ()
    """Test files to run; () is what the plan or the configuration names."""
    config_file: str | None = None
    """pytest's configuration file in the workspace; None: none."""
    seed: int | None = None
    """Shuffles the order of files, and of tests within one."""
    hash_seed: int | None = None
    """PYTHONHASHSEED; None: Python draws one."""
    time_zone: str = ""
    """TZ, such as "XXX-14"."""
    control: bool = False
    """Run control tests beside `files`, which must fail."""


async def run_tests(
    sandbox: Sandbox, plan: TestPlan, runtime: PythonRuntime, options: RunOptions
) -> TestRun:
    """Run the tests of `plan` in `sandbox`, as its workspace is.

    Raises SandboxError where the sandbox fails, and ValueError for an unknown runner. Everything
    else, time-outs and limits included, is in the result.
    """
    if plan.runner == "junit":
        return await _run_junit(sandbox, plan, runtime, options)
    if plan.runner != "pytest":
        raise ValueError(f'runner {plan.runner!r} is unknown: "pytest" or "junit"')
    control = ControlTests.beside(options.files[0]) if options.control and options.files else None
    if control is not None:
        await sandbox.write_file(control.path, control.source)
    key = secrets.token_bytes(32)
    config = options.config_file or "/dev/null"
    arguments = [*PYTEST_ARGUMENTS, "-c", config, *plan.command, *options.files]
    paths = plan.env.get("PYTHONPATH", "src:.").split(":")
    request = {
        "key": key.hex(),
        "args": arguments + ([control.path] if control else []),
        "paths": [path for path in paths if path],
        "site": runtime.site or "",
        "seed": options.seed,
        "environ": {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **{name: value for name, value in plan.env.items() if name.startswith("PYTHON")},
        },
    }
    # -I ignores every PYTHON variable, the hash seed among them.
    isolated = ["-I"] if options.hash_seed is None else ["-P", "-s"]
    env = grading_env(plan, runtime, options)
    result = await sandbox.exec(
        [runtime.python, *isolated, "-B", "-c", _PROGRAM],
        env=env,
        stdin=json.dumps(request).encode("ascii"),
        timeout_s=plan.timeout_s,
    )
    reading = ReportReading(key)
    ended_by = "" if result.status is Status.EXITED else str(result.status)
    reading.read(result.stdout, result.exit_code, ended_by)
    if control is not None:
        reading.problems += control.problems(reading.outcomes, reading.complete)
        reading.forget(control.expected)
    return _result(result, reading)


def grading_env(plan: TestPlan, runtime: PythonRuntime, options: RunOptions) -> dict[str, str]:
    """The variables of the runner itself: none that changes how Python or pytest starts."""
    env = {**runtime.env, **plan.env}
    for name in list(env):
        if name.startswith(("PYTHON", "PYTEST")):
            del env[name]
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if options.hash_seed is not None:
        env["PYTHONHASHSEED"] = str(options.hash_seed)
    if options.time_zone:
        env["TZ"] = options.time_zone
    return env


def _result(result: ExecResult, reading: ReportReading) -> TestRun:
    return TestRun(
        outcomes=reading.outcomes,
        details=reading.details,
        durations_s=reading.durations_s,
        collected=reading.collected,
        problems=tuple(reading.problems),
        notes=tuple(dict.fromkeys(reading.notes)),
        status=result.status,
        exit_code=result.exit_code,
        wall_s=result.wall_s,
        output_tail=result.stderr[-_TAIL_BYTES:].decode(errors="replace"),
    )


async def _run_junit(
    sandbox: Sandbox, plan: TestPlan, runtime: PythonRuntime, options: RunOptions
) -> TestRun:
    # Relative, so that it is the same place for every backend; nobody can know the name before.
    report = f".report-{secrets.token_hex(16)}.xml"
    command = [part.replace("{report}", report) for part in plan.command]
    env = {**runtime.env, **plan.env}
    if options.time_zone:
        env["TZ"] = options.time_zone
    result = await sandbox.exec(command, env=env, timeout_s=plan.timeout_s)
    reading = ReportReading(b"")
    try:
        parsed = parse_junit(await sandbox.read_file(report, max_bytes=64 << 20))
    except (SandboxFileError, JunitError) as error:
        reading.problems.append(f"runner_failed: no report: {error}")
        return _result(result, reading)
    reading.outcomes.update(parsed.outcomes)
    reading.details.update(parsed.details)
    reading.collected = parsed.cases
    reading.problems += [f"report_mismatch: {problem}" for problem in parsed.problems]
    failing = any(outcome in FAILING for outcome in parsed.outcomes.values())
    if result.status is not Status.EXITED:
        reading.problems.append(f"runner_failed: the tests ended with {result.status}")
    elif (result.exit_code != 0) != failing:
        reading.problems.append(
            f"report_mismatch: exit code {result.exit_code}, but the report has "
            f"{'failures' if failing else 'no failure'}"
        )
    return _result(result, reading)


def test_files(names: Sequence[str]) -> tuple[str, ...]:
    """The files of pytest ids, in order of first mention."""
    return tuple(dict.fromkeys(name.partition("::")[0] for name in names))


def looks_like_tests(path: str) -> bool:
    """By pytest's own naming rule."""
    name = PurePosixPath(path).name
    return name.endswith("_test.py") or (name.startswith("test_") and name.endswith(".py"))
