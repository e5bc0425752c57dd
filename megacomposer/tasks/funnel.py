"""Counts of what became of the candidates, by reason."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

REASONS = {
    "ambiguous_definition": "A name is bound twice, or inside `if` or `try`.",
    "answer_refused": "The true code does not score 1 in a fresh sandbox.",
    "bad_proposal": "A model's answer is not in the form asked for, or its edits do not apply.",
    "broken_import": "What is left does not import.",
    "broken_syntax": "What is left is not Python.",
    "collection_error": "A test file fails to load for another reason than a missing name.",
    "dangling_name": "What is left names what is gone.",
    "entangled": "Too much of the package goes along.",
    "import_time_use": "Code that runs at import needs it.",
    "incomplete": "The edits take more away than they say, or less.",
    "no_description": "No documentation says what it does.",
    "no_survivors": "No test passes any more.",
    "no_op_accepted": "The starting state does not score 0, or breaks other tests.",
    "not_text": "The true code is not UTF-8.",
    "overlaps": "It is nearly the same as another candidate.",
    "residue": "A trace of the deleted code is in what an agent can read.",
    "runner_problem": "pytest did not come to an honest end.",
    "shared_line": "Two statements stand on one line.",
    "too_broad": "Too large a part of the tests depends on it.",
    "too_few_tests": "Too few tests depend on it.",
    "too_large": "More code than a task should have.",
    "too_small": "Less code than a task should have.",
    "unrelated_failure": "A test fails that does not run it.",
    "wrong_reason": "A test fails, but not because something is missing.",
}
"""Why a candidate is not kept."""


class RejectedError(ValueError):
    """A candidate that is no task; `reason` is one of REASONS."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclasses.dataclass
class Funnel:
    """Filled while candidates are tried."""

    candidates: int = 0
    rejected: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of each reason, the first candidate that it turned away, with the detail."""
    kept: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def reject(self, candidate: str, error: RejectedError) -> None:
        self.rejected[error.reason] += 1
        self.examples.setdefault(error.reason, f"{candidate}: {error.detail}"[:300])

    def report(self) -> dict[str, Any]:
        return {
            "candidates": self.candidates,
            "rejected": dict(sorted(self.rejected.items())),
            "examples": dict(sorted(self.examples.items())),
            "kept": sorted(self.kept, key=lambda task: str(task["id"])),
        }


def write_report(report: dict[str, Any], out: Path) -> str:
    """Write `out`/funnel.json; returns the one line that sums it up."""
    (out / "funnel.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fields = {name: report[name] for name in ("candidates", "rejected")}
    line = {"event": "make_tasks", **fields, "kept": len(report["kept"]), "out": str(out)}
    return json.dumps(line)
