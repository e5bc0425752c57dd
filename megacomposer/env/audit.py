"""The audit log: what was tried and what was answered, one JSON object a line.

Sandboxes, the egress proxy, verifiers and the monitor write to it; nothing inside a sandbox can.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = {
    "sandbox_started": "A sandbox runs; backend, limits and what enforces them.",
    "sandbox_closed": "It ended; why, and its use of resources.",
    "sandbox_reaped": "Leftovers of a host process that died were removed.",
    "snapshot": "A state was frozen.",
    "limit": "A quota was hit: field of Limits, command.",
    "refused": "The sandbox or a tool refused an operation: what, and why.",
    "egress_allowed": "A request went out: method, host, port, rule.",
    "egress_denied": "A request was refused: method, host, port, reason.",
    "verifier": "Evidence was collected, or a tampered file was replaced before grading.",
    "monitor": "A monitor rule fired: rule, evidence span.",
}


class AuditLog:
    """Appends events; `record` is what a component is given.

    `events` keeps the last `keep` in memory, for tests and for the reward; `path` gets all.
    """

    def __init__(self, path: Path | None = None, *, keep: int = 10_000) -> None:
        self.events: list[dict[str, Any]] = []
        self._file = path.open("a", encoding="utf-8") if path else None
        self._keep = keep

    def record(self, kind: str, *, sandbox: str = "", **details: Any) -> None:
        """Raises ValueError for a kind that is not in KINDS."""
        if kind not in KINDS:
            raise ValueError(f"unknown audit event {kind!r}; known: {', '.join(KINDS)}")
        event = {"time": time.time(), "kind": kind, "sandbox": sandbox, **details}
        self.events.append(event)
        del self.events[: -self._keep]
        if self._file:
            # One write a line: several processes may append to one file.
            self._file.write(json.dumps(event, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()


Record = Callable[..., None]
"""The type of `AuditLog.record`."""


def discard(kind: str, *, sandbox: str = "", **details: Any) -> None:
    """A Record that keeps nothing."""
