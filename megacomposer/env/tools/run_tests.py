"""The tool that runs the task's tests and says what failed, from JUnit XML rather than stdout.

It is the agent's own view, in its own sandbox: nothing here is evidence for a reward.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated
from xml.etree import ElementTree

from msgspec import Meta

from megacomposer.env.sandbox import TEMPORARY, ExecResult, Sandbox, SandboxFileError
from megacomposer.env.task import TestPlan
from megacomposer.env.tools.observation_text import OBSERVATION_BYTES, clip_start, ending
from megacomposer.env.tools.schema import Arguments, Tool, ToolError

PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
MAX_REPORT_BYTES = 16 << 20
_NOTHING_COLLECTED = 5
"""pytest's exit code where the tests that were asked for are none."""
_DETAILED_FAILURES = 10
_LISTED_FAILURES = 100

TestName = Annotated[str, Meta(min_length=1, max_length=2000, pattern="^[^-]")]


class RunTests(Arguments, frozen=True, kw_only=True):
    tests: Annotated[
        tuple[TestName, ...],
        Meta(
            max_length=500,
            description="Test ids or paths, such as `tests/test_a.py::test_b`; none is all.",
        ),
    ] = ()
    timeout_s: Annotated[
        float | None, Meta(description="Seconds; the task's own limit is the default and most.")
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One test case of a report."""

    id: str
    outcome: str
    """"passed", "failed", "error" or "skipped"."""
    detail: str = ""
    """The traceback, or the reason of a skip."""


class TestRunner:
    """The tool over one sandbox."""

    __test__ = False

    def __init__(
        self, sandbox: Sandbox, plan: TestPlan, *, observation_bytes: int = OBSERVATION_BYTES
    ) -> None:
        self._sandbox, self._plan = sandbox, plan
        self._observation_bytes = observation_bytes
        self._number = itertools.count(1)

    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                name="run_tests",
                description="Run the project's tests, all or some. The answer has counts, and the"
                " failing ids with the end of their tracebacks.",
                arguments=RunTests,
                run=self._run,
                programs=("rm",),
            ),
        )

    async def _run(self, arguments: RunTests) -> str:
        most_s = self._plan.timeout_s
        timeout_s = most_s if arguments.timeout_s is None else arguments.timeout_s
        if not 0.0 < timeout_s <= most_s:
            raise ToolError(
                "bad_arguments", f"run_tests: timeout_s is above 0, at most {most_s:g}."
            )
        # A new name each time: the report of an earlier run is never taken for this one's.
        report = f"{TEMPORARY}/tests-{next(self._number)}.xml"
        command = self._command(arguments.tests, report)
        await self._sandbox.exec(["rm", "-f", "--", report])
        try:
            result = await self._sandbox.exec(
                command,
                env={**self._plan.env, "PYTHONDONTWRITEBYTECODE": "1"},
                timeout_s=timeout_s,
            )
            how = ending(result, timeout_s, self._sandbox.spec.limits)
            try:
                data = await self._sandbox.read_file(report, max_bytes=MAX_REPORT_BYTES)
                cases = read_junit(data)
                if not cases and result.exit_code not in (0, _NOTHING_COLLECTED):
                    raise ValueError("it has no tests")
            except (SandboxFileError, ValueError) as error:
                raise self._no_report(result, how, timeout_s, error) from error
        finally:
            await self._sandbox.exec(["rm", "-f", "--", report])
        return self._summary(cases, result, how)

    def _command(self, tests: tuple[str, ...], report: str) -> list[str]:
        if self._plan.runner == "pytest":
            return [*PYTEST, f"--junitxml={report}", *self._plan.command, *tests]
        if tests:
            raise ToolError(
                "bad_arguments",
                "run_tests: this project's runner takes no test names; leave out tests, or run"
                " the one test in the terminal.",
            )
        return [word.replace("{report}", report) for word in self._plan.command]

    def _no_report(
        self, result: ExecResult, how: str, timeout_s: float, error: Exception
    ) -> ToolError:
        """The run ended before the runner wrote its report, or what it wrote is none."""
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        tail = clip_start(output.rstrip(), min(6000, self._observation_bytes - 300))
        missing = isinstance(error, SandboxFileError) and error.code == "ENOENT"
        reason = "no report" if missing else f"no usable report: {error}"
        why = how or f"The runner ended with exit code {result.exit_code} and {reason}."
        kind = "timeout" if how and result.wall_s >= timeout_s else "failed"
        return ToolError(kind, f"{why} The end of its output:\n{tail}")

    def _summary(self, cases: list[CaseResult], result: ExecResult, how: str) -> str:
        outcomes = ("passed", "failed", "error", "skipped")
        counts = {name: sum(case.outcome == name for case in cases) for name in outcomes}
        shown = [f"{count} {name}" for name, count in counts.items() if count]
        head = f"{', '.join(shown) or 'no tests ran'} in {result.wall_s:.1f} s"
        if result.exit_code:
            head += f" (exit code {result.exit_code})"
        bad = [case for case in cases if case.outcome in ("failed", "error")]
        lines = [head, *([how] if how else [])]
        if not cases:
            output = (result.stdout + result.stderr).decode("utf-8", "replace")
            lines.append(clip_start(output.strip(), 2000))
        detailed = bad[:_DETAILED_FAILURES]
        room = (self._observation_bytes - 300) // 2 // max(1, len(detailed))
        for case in detailed:
            lines += ["", f"{case.outcome.upper()} {case.id[:500]}"]
            lines.append(clip_start(_tail(case.detail, 25), max(room, 300)))
        rest = bad[_DETAILED_FAILURES:]
        if rest:
            lines += ["", f"{len(rest)} more:"]
            lines += [f"{case.outcome} {case.id[:200]}" for case in rest[:_LISTED_FAILURES]]
        if len(rest) > _LISTED_FAILURES:
            lines.append(f"[{len(rest) - _LISTED_FAILURES} ids left out]")
        return "\n".join(lines)


def read_junit(data: bytes) -> list[CaseResult]:
    """The cases of a JUnit XML report. ValueError where it is none."""
    # No runner writes entities, and an attacker's would grow without bound; UTF-16 would hide them.
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
        raise ValueError("the report declares a document type, or is not UTF-8")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ValueError(f"the report is no XML: {error}") from error
    cases = []
    for case in root.iter("testcase"):
        found = {child.tag: child for child in case}
        outcome, detail = "passed", ""
        for tag, name in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
            if tag in found:
                outcome, node = name, found[tag]
                detail = (node.text or "").strip() or node.get("message", "")
                break
        cases.append(CaseResult(id=_case_id(case), outcome=outcome, detail=detail))
    return cases


def _case_id(case: ElementTree.Element) -> str:
    """pytest's node id where the report has a file, else `class::name`."""
    group, name, file = case.get("classname", ""), case.get("name", ""), case.get("file", "")
    if not file:
        return "::".join(part for part in (group, name) if part)
    module = file.removesuffix(".py").replace("/", ".")
    classes = group.removeprefix(module).strip(".") if group.startswith(module) else ""
    return "::".join([file, *classes.split("."), name] if classes else [file, name])


def _tail(text: str, lines: int) -> str:
    rows = text.split("\n")
    if len(rows) <= lines:
        return text
    return "\n".join([f"[... {len(rows) - lines} lines]", *rows[-lines:]])
