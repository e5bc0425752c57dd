"""What grading found, kind by kind. No kind alone is the score; `score` combines them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

PASSING = frozenset({"passed", "xpassed"})
"""Outcomes that satisfy a required test. A strict xpass is reported as "failed" by pytest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestEvidence:
    """The required tests. Outcomes: passed, xpassed, failed, error, skipped, xfailed, absent."""

    __test__ = False

    fail_to_pass: Mapping[str, str]
    pass_to_pass: Mapping[str, str]
    other: Mapping[str, str]
    """Tests that ran beside them; they do not count."""
    details: Mapping[str, str]
    """The end of what the runner says about a required test that did not pass."""
    collected: int
    """How many tests the runner found."""
    status: str
    """How the command ended: a `Status`."""
    exit_code: int
    wall_s: float
    output_tail: str
    """Of the runner's error stream."""

    @property
    def required(self) -> dict[str, str]:
        return {**self.fail_to_pass, **self.pass_to_pass}

    @property
    def passed(self) -> bool:
        required = self.required
        return bool(required) and all(outcome in PASSING for outcome in required.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LintEvidence:
    """What ruff says about the changed Python files and did not say before."""

    available: bool
    """False: the runtime has no ruff, or lint is off."""
    new_findings: tuple[str, ...] = ()
    """`path: code message`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchEvidence:
    """The size of the answer."""

    files: int = 0
    lines_added: int = 0
    lines_removed: int = 0
    binary_files: int = 0
    tests_touched: tuple[str, ...] = ()
    """Paths among them that grading takes from the pristine state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourEvidence:
    """One of the task's `behaviour` checks."""

    name: str
    passed: bool
    detail: str = ""
    """What differed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TamperEvidence:
    """Attempts on the grading."""

    replaced: tuple[str, ...] = ()
    """`added|modified|deleted PATH`: protected files that the answer changed and grading put
    back. Harmless to the verdict; new tests are among them."""
    mattered: tuple[str, ...] = ()
    """`kind: detail`: the report cannot be believed. Never passes."""
    noted: tuple[str, ...] = ()
    """Unusual, not decisive; for a monitor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one answer to one task was judged."""

    task_id: str
    status: str
    """"graded", or "patch_rejected": the patch does not apply to the starting state."""
    reason: str
    """In one line, why it did not pass; "" where it passed."""
    tests: TestEvidence
    patch: PatchEvidence
    lint: LintEvidence
    behaviour: tuple[BehaviourEvidence, ...]
    tampering: TamperEvidence

    @property
    def passed(self) -> bool:
        """All required tests and checks pass, and nothing that mattered was tampered with."""
        return (
            self.status == "graded"
            and self.tests.passed
            and all(check.passed for check in self.behaviour)
            and not self.tampering.mattered
        )

    def to_json(self) -> str:
        """One line, `passed` and `score` included."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "passed": self.passed, "score": score(self)})


def score(verdict: Verdict) -> float:
    """1.0 if it passed, else 0.0. Lint and size are for a reward to weigh, not for this."""
    return 1.0 if verdict.passed else 0.0
