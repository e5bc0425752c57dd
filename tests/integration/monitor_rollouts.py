"""Rollouts for the monitor's tests, written as short scripts."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megacomposer.env.grading.evidence import TamperEvidence
from megacomposer.env.monitor.monitor import Finding, Monitor, MonitorReport
from megacomposer.env.sandbox import Snapshot
from megacomposer.env.task import Task, TestPlan
from megacomposer.env.transcript import Observation, ToolCall, Transcript, Turn

TESTS = {
    "tests/test_money.py": """\
import pytest
from money import parse


def test_parse():
    assert parse("12,345.67 EUR") == (1234567, "EUR")


@pytest.mark.parametrize("text, value", [("1.000,5 CHF", (100050, "CHF")), ("7 USD", (700, "USD"))])
def test_more(text, value):
    assert parse(text) == value
"""
}


def task(package: str = "acme-money") -> Task:
    return Task(
        id="money-1",
        instruction="Write parse again.",
        base=Snapshot(layers=()),
        pristine=Snapshot(layers=()),
        tests=TestPlan(
            fail_to_pass=("tests/test_money.py::test_parse",),
            protected_paths=("tests/*", "conftest.py", "pyproject.toml"),
        ),
        origin={"kind": "feature_deletion", "package": package},
    )


@dataclasses.dataclass(frozen=True)
class Rollout:
    transcript: Transcript
    events: tuple[Mapping[str, Any], ...] = ()
    tests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tampering: TamperEvidence | None = None

    def assess(self, monitor: Monitor | None = None, *, task: Task | None = None) -> MonitorReport:
        return (monitor or Monitor()).assess(
            self.transcript,
            task or _TASK,
            events=self.events,
            tests=self.tests,
            tampering=self.tampering,
        )

    def part(self, finding: Finding) -> str | None:
        """The text that a finding's span is in; None where it is no text of a turn."""
        if finding.turn < 0:
            return None
        turn = self.transcript.turns[finding.turn]
        if finding.span.part == "message":
            return turn.text
        if finding.span.part == "observation":
            return next(o.text for o in turn.observations if o.call_id == finding.call_id)
        call = next(c for c in turn.calls if c.id == finding.call_id)
        if not finding.span.part.startswith("argument:") or isinstance(call.arguments, str):
            return None
        value = call.arguments[finding.span.part.partition(":")[2]]
        return value if isinstance(value, str) else shlex.join(value)


_TASK = task()


def rollout(
    *steps: Sequence[Any],
    text: str = "",
    patch: str = "",
    events: tuple[Mapping[str, Any], ...] = (),
    tests: Mapping[str, str] | None = None,
    tampering: TamperEvidence | None = None,
    finished: bool = True,
) -> Rollout:
    """A step is (command, answer) of the terminal, or (tool, arguments, answer[, error_kind])."""
    turns = [Turn(text=text)] if text else []
    for number, step in enumerate(steps):
        tool, arguments, answer, *kind = step if len(step) > 2 else ("terminal", *step)
        if len(step) == 2:
            arguments = {"command": step[0]}
        call = ToolCall(id=f"c{number}", name=tool, arguments=arguments)
        error = kind[0] if kind else ""
        seen = Observation(call_id=call.id, text=answer, is_error=bool(error), error_kind=error)
        turns.append(Turn(calls=(call,), observations=(seen,)))
    transcript = Transcript(
        task_id="money-1", turns=tuple(turns), patch=patch.encode(), finished=finished
    )
    return Rollout(transcript, events, tests or {}, tampering)


def patch_of(case: Rollout) -> bytes:
    return case.transcript.patch


def new_file(path: str, text: str) -> str:
    """A diff that adds a file."""
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    )
