"""Reads the events that `pytest_report` wrote, and says why they cannot be believed.

Standard library only: task directories for other harnesses carry this file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Collection
from typing import Any

FAILING = frozenset({"failed", "error"})
SUSPICIOUS = ("report_mismatch", "patched_runner", "control", "always_equal")
"""Kinds of problems that an honest answer does not cause. `runner_failed` it may."""
_RUNNER_FAILURES = {2: "interrupted", 3: "internal error", 4: "usage error"}
_MAX_PROBLEMS = 20


class ReportReading:
    """The events of one run, checked line by line."""

    def __init__(self, key: bytes) -> None:
        self.outcomes: dict[str, str] = {}
        self.details: dict[str, str] = {}
        self.durations_s: dict[str, float] = {}
        self.collected = 0
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._key = key
        self._names: list[str] = []
        self._runs_left: Counter[str] = Counter()
        self._open: dict[str, None] = {}
        self._finish: tuple[int, int] | None = None
        self.complete = False
        self._broken_files = False

    def read(self, stdout: bytes, exit_code: int, ended_by: str = "") -> None:
        """`ended_by` says what ended the process, where it did not exit by itself."""
        for sequence, line in enumerate(stdout.splitlines()):
            event = self._event(sequence, line)
            if event is None:
                self.problems.append(f"report_mismatch: line {sequence} is not the reporter's")
                break
            if self._finish is not None:
                self.problems.append("report_mismatch: the report goes on after its end")
                break
            try:
                self._take(event)
            except (ValueError, TypeError, IndexError, AttributeError):
                # The key was found and used by something else: a valid line with no valid event.
                self.problems.append(f"report_mismatch: line {sequence} is no event")
                break
        self._check_end(exit_code, ended_by)
        del self.problems[_MAX_PROBLEMS:]

    def forget(self, names: Collection[str]) -> None:
        """Tests that are ours, not the task's."""
        self.collected -= sum(name in names for name in self._names)
        for name in names:
            self.outcomes.pop(name, None)
            self.details.pop(name, None)

    def _event(self, sequence: int, line: bytes) -> list[Any] | None:
        number, _, rest = line.partition(b" ")
        mac, _, body = rest.partition(b" ")
        expected = hmac.new(self._key, b"%d %b" % (sequence, body), hashlib.sha256).hexdigest()
        if number != b"%d" % sequence or not hmac.compare_digest(mac, expected[:20].encode()):
            return None
        event = json.loads(body)
        return event if isinstance(event, list) else None

    def _take(self, event: list[Any]) -> None:
        kind, *values = event
        if kind == "collected":
            if self._names:
                raise ValueError("the tests are collected once")
            self._names = [_text(name) for name in values[0]]
            self._runs_left = Counter(self._names)
            self.collected = len(self._names)
        elif kind == "collect":
            name, outcome, text = map(_text, values)
            self._broken_files |= outcome == "failed"
            self.details[name] = text
            self.notes.append(f"not collected ({outcome}): {name}")
        elif kind == "start":
            self._open[self._name(values[0])] = None
        elif kind == "end":
            name, duration_ms = self._name(values[0]), int(values[2])
            outcome, text = _text(values[1]), _text(values[3])
            self._open.pop(name, None)
            self._runs_left[name] -= 1
            if self._runs_left[name] < 0:
                raise ValueError("more ends than tests of that name")
            if self.outcomes.get(name) not in FAILING:
                self.outcomes[name] = outcome
            self.durations_s[name] = duration_ms / 1000
            if text:
                self.details[name] = text
        elif kind == "tampered":
            where, labels = _text(values[0]), [_text(label) for label in values[1]]
            self.problems.append(f"patched_runner: {', '.join(labels[:5])} (seen at {where})")
        elif kind == "finish":
            self._finish = (int(values[0]), int(values[1]))
        elif kind == "deselected":
            self.notes.append(f"deselected {len(values[0])} tests")
        elif kind == "always_equal":
            self.problems.append(f"always_equal: {', '.join(map(_text, values[0]))}")

    def _name(self, reference: int | str) -> str:
        return self._names[reference] if isinstance(reference, int) else _text(reference)

    def _check_end(self, exit_code: int, ended_by: str) -> None:
        if ended_by:
            self.problems.append(f"runner_failed: the tests ended with {ended_by}")
            return
        if self._finish is None:
            during = f" during {next(iter(self._open))}" if self._open else ""
            self.problems.append(
                f"report_mismatch: the process ended with exit code {exit_code}{during} "
                "before the report did"
            )
            return
        status, counted = self._finish
        if status == exit_code and status in _RUNNER_FAILURES:
            self.problems.append(f"runner_failed: pytest says {_RUNNER_FAILURES[status]}")
            return
        self.complete = True
        failing = self._broken_files or any(
            outcome in FAILING for outcome in self.outcomes.values()
        )
        expected = 1 if failing else 0 if self.collected else 5
        if exit_code != status or status != expected:
            self.problems.append(
                f"report_mismatch: exit code {exit_code}, reported {status}; the outcomes "
                f"say {expected}"
            )
        without = [name for name in self._names if name not in self.outcomes]
        if without or counted != len(set(self._names)):
            self.problems.append(
                f"report_mismatch: {len(without)} of {self.collected} collected tests have no "
                f"outcome{': ' + without[0] if without else ''}"
            )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value
