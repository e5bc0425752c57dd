"""Which tests of a state always pass, always fail, or do neither.

Each run is in a sandbox of its own and differs from the others in what a sound test does not
depend on: the order of files and of the tests within one, the hash seed, and the time zone (so
also the local date). The wall clock itself is not shifted: Linux has no name space for it, and
replacing the functions that read it would change the code under test.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from megacomposer.env.grading.pristine import find_config
from megacomposer.env.grading.python_runtime import PythonRuntime
from megacomposer.env.grading.report_reading import FAILING
from megacomposer.env.grading.test_run import RunOptions, TestRun, run_tests
from megacomposer.env.sandbox import Limits, SandboxBackend, SandboxSpec, Snapshot
from megacomposer.env.task import TestPlan

TIME_ZONES = ("UTC", "XXX-14", "XXX+12", "XXX-5:45", "XXX+3:30")
"""In POSIX form, which needs no time zone files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stability:
    """Every test that any run saw is in exactly one of the three."""

    stable_pass: tuple[str, ...]
    """Passed in every run, in the order of the first."""
    stable_fail: tuple[str, ...]
    """Failed, or could not be set up, in every run."""
    flaky: Mapping[str, tuple[str, ...]]
    """Everything else, skipped tests included: test id -> its outcome in each run."""
    details: Mapping[str, str]
    """Test id, or file that could not be collected -> the end of its failure's text."""
    problems: tuple[str, ...]
    """`run N: ...` for runs that did not come to an honest end; their outcomes count as absent."""
    runs: tuple[TestRun, ...]


async def stable_outcomes(
    backend: SandboxBackend,
    snapshot: Snapshot,
    plan: TestPlan,
    runtime: PythonRuntime,
    runs: int = 5,
    seed: int = 0,
    *,
    files: tuple[str, ...] = (),
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    parallel: int = 2,
) -> Stability:
    """Run the tests of `snapshot` `runs` times, `parallel` at once.

    `files` limits what is run; () is all that the plan or the configuration names. The first run
    keeps the tests in their own order, the others shuffle them by `seed`.

    Raises SandboxError where the infrastructure failed.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, is {runs}")
    slots = asyncio.Semaphore(parallel)
    variables = {
        name: value
        for name, value in (env or {}).items()
        if not name.startswith(("PYTHON", "PYTEST"))
    }
    spec = SandboxSpec(
        base=snapshot, mounts=runtime.mounts, limits=limits or Limits(), env=variables
    )

    async def one(number: int) -> TestRun:
        async with slots, await backend.start(spec) as sandbox:
            options = RunOptions(
                files=files,
                config_file=await find_config(sandbox),
                seed=None if number == 0 else seed + number,
                hash_seed=seed + number,
                time_zone=TIME_ZONES[number % len(TIME_ZONES)],
            )
            return await run_tests(sandbox, plan, runtime, options)

    tasks = [asyncio.create_task(one(number)) for number in range(runs)]
    try:
        finished = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return combine(finished)


def combine(runs: list[TestRun]) -> Stability:
    """What several runs say together."""
    believed = [{} if run.problems else run.outcomes for run in runs]
    names = dict.fromkeys(name for outcomes in believed for name in outcomes)
    table = {name: tuple(outcomes.get(name, "absent") for outcomes in believed) for name in names}
    passing = tuple(name for name, row in table.items() if set(row) == {"passed"})
    failing = tuple(name for name, row in table.items() if set(row) <= FAILING)
    stable = {*passing, *failing}
    details: dict[str, str] = {}
    for run in runs:
        details = {**run.details, **details}
    return Stability(
        stable_pass=passing,
        stable_fail=failing,
        flaky={name: row for name, row in table.items() if name not in stable},
        details=details,
        problems=tuple(
            f"run {number}: {problem}"
            for number, run in enumerate(runs)
            for problem in run.problems
        ),
        runs=tuple(runs),
    )
