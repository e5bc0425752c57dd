"""Which tests run which function: measured in a sandbox, by Python's own call events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from megacomposer.env.grading.python_runtime import PythonRuntime
from megacomposer.env.grading.test_run import PYTEST_ARGUMENTS, RunOptions, grading_env
from megacomposer.env.sandbox import Sandbox
from megacomposer.env.task import TestPlan
from megacomposer.tasks import coverage_probe
from megacomposer.tasks.call_graph import CallGraph
from megacomposer.tasks.definitions import Kind

_PROGRAM = Path(coverage_probe.__file__).read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestCoverage:
    """Calls, both ways."""

    __test__ = False

    tests_of: Mapping[str, frozenset[str]]
    """Symbol id -> ids of tests that call it. A class has its methods' tests."""
    tests: frozenset[str]
    """All that ran."""

    def of(self, symbols: Iterable[str]) -> frozenset[str]:
        """Tests that call any of these."""
        empty: frozenset[str] = frozenset()
        return empty.union(*(self.tests_of.get(id, empty) for id in symbols))


async def measure_coverage(
    sandbox: Sandbox,
    plan: TestPlan,
    runtime: PythonRuntime,
    options: RunOptions,
    graph: CallGraph,
) -> TestCoverage:
    """Run `options.files` once, slower than usual, in an intact workspace.

    Raises ValueError with the end of pytest's words where nothing was measured.
    """
    paths = plan.env.get("PYTHONPATH", "src:.")
    site = f":{runtime.site}" if runtime.site else ""
    env = grading_env(plan, runtime, options)
    env.update({"PYTHONPATH": paths + site, "PYTHONDONTWRITEBYTECODE": "1"})
    arguments = [*PYTEST_ARGUMENTS, "-c", options.config_file or "/dev/null", *plan.command]
    result = await sandbox.exec(
        [runtime.python, "-B", "-c", _PROGRAM, ".", *arguments, *options.files],
        env=env,
        timeout_s=4 * plan.timeout_s,
    )
    lines = result.stdout.decode(errors="replace").strip().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        report = {}
    if not report.get("tests"):
        words = result.stderr.decode(errors="replace").strip()[-1500:]
        raise ValueError(f"no test ran under the coverage probe ({result.status}): {words}")
    return _by_symbol(report["functions"], report["tests"], graph)


def _by_symbol(
    functions: list[tuple[str, int]], tests: Mapping[str, list[int]], graph: CallGraph
) -> TestCoverage:
    by_path: dict[str, list[tuple[int, int, str]]] = {}
    for symbol in graph.symbols.values():
        if symbol.kind in (Kind.FUNCTION, Kind.METHOD):
            entry = (symbol.first_line, symbol.last_line, symbol.id)
            by_path.setdefault(symbol.path, []).append(entry)
    ids = [
        next((id for first, last, id in by_path.get(path, []) if first <= line <= last), None)
        for path, line in functions
    ]
    tests_of: dict[str, set[str]] = {}
    for name, indices in tests.items():
        for index in indices:
            id = ids[index]
            if id is None:
                continue
            tests_of.setdefault(id, set()).add(name)
            if owner := graph.symbols[id].owner_class:
                tests_of.setdefault(owner, set()).add(name)
    return TestCoverage(
        tests_of={id: frozenset(names) for id, names in tests_of.items()},
        tests=frozenset(tests),
    )
