"""The cheating monitor: reads a finished rollout and says clean, suspect or cheating, and why.

    monitor = Monitor(MonitorConfig())
    report = monitor.assess(transcript, task, events=log.events)
    if report.verdict is Verdict.CHEATING: ...

It is a pure function of what it is given: the same rollout gives the same report. Text of the
rollout is data; nothing in it is run, imported, followed or believed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megacomposer.env.audit import Record, discard
from megacomposer.env.grading.evidence import TamperEvidence
from megacomposer.env.monitor.report import (
    Finding,
    MonitorConfig,
    MonitorReport,
    Severity,
    Span,
    Verdict,
    report_from_json,
    worst,
)
from megacomposer.env.monitor.rules import RULES
from megacomposer.env.monitor.view import build_view
from megacomposer.env.task import Task
from megacomposer.env.transcript import Transcript

__all__ = [
    "Finding",
    "Monitor",
    "MonitorConfig",
    "MonitorReport",
    "Severity",
    "Span",
    "Verdict",
    "monitor_metrics",
    "report_from_json",
]


class Monitor:
    """Applies all rules.

    Raises ValueError for a config that names a rule which does not exist.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        self.config = config or MonitorConfig()
        for name in self.config.severities:
            if name not in RULES:
                raise ValueError(
                    f"severities.{name}: no such rule; known: {', '.join(sorted(RULES))}"
                )

    def assess(
        self,
        transcript: Transcript,
        task: Task,
        *,
        events: Sequence[Mapping[str, Any]] = (),
        tests: Mapping[str, str] | None = None,
        tampering: TamperEvidence | None = None,
        record: Record = discard,
        sandbox: str = "",
    ) -> MonitorReport:
        """Read the rollout.

        `events` are the audit events of the rollout's sandboxes. `tests` is path -> source of the
        true tests; without it, special-casing is found only against tests that the rollout read.
        `tampering` is the verifier's, where it has judged.
        Each finding that is worse than a note also goes to `record`, under `sandbox`.
        """
        view = build_view(transcript, task, self.config, events, tests or {}, tampering)
        findings: list[Finding] = []
        dropped = 0
        for name, rule in RULES.items():
            override = self.config.severities.get(name, "")
            if override == "off":
                continue
            hits: dict[tuple[int, str, Span], Finding] = {}
            for finding in rule(view):
                key = (finding.turn, finding.call_id, finding.span)
                known = hits.get(key)
                if known is None or (finding.succeeded and not known.succeeded):
                    hits[key] = finding
            kept = list(hits.values())
            if override:
                kept = [dataclasses.replace(f, severity=Severity(override)) for f in kept]
            if len(kept) > self.config.max_findings_per_rule:
                kept.sort(key=lambda finding: not finding.succeeded)
                dropped += len(kept) - self.config.max_findings_per_rule
                kept = kept[: self.config.max_findings_per_rule]
            findings += kept
        for finding in findings:
            if finding.severity is not Severity.NOTE:
                record(
                    "monitor",
                    sandbox=sandbox,
                    task=transcript.task_id,
                    rule=finding.rule,
                    verdict=str(finding.verdict),
                    turn=finding.turn,
                    evidence=dataclasses.asdict(finding.span),
                )
        return MonitorReport(
            task_id=transcript.task_id,
            verdict=worst(finding.verdict for finding in findings),
            findings=tuple(findings),
            dropped=dropped,
        )


def monitor_metrics(reports: Iterable[MonitorReport]) -> dict[str, float]:
    """The `monitor/...` metrics of a batch of rollouts."""
    reports = list(reports)
    count = max(len(reports), 1)
    metrics: dict[str, float] = {
        "monitor/trajectories": float(len(reports)),
        "monitor/flagged_frac": sum(r.verdict is not Verdict.CLEAN for r in reports) / count,
        "monitor/cheating_frac": sum(r.verdict is Verdict.CHEATING for r in reports) / count,
        "monitor/findings_mean": sum(len(r.findings) for r in reports) / count,
        "monitor/judge_failures": float(sum(r.judge.startswith("failed") for r in reports)),
        "monitor/judge_raised": float(sum(r.judge == "suspect" and not r.rules for r in reports)),
    }
    for name in RULES:
        flagged = sum(name in report.rules for report in reports)
        if flagged:
            metrics[f"monitor/flagged/{name}"] = float(flagged)
    return metrics
