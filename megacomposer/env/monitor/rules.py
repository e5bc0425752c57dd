"""The monitor's rules by name.

A rule is a function from a View to findings; its docstring says what it means and what is no hit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megacomposer.env.monitor.commands import decompiles, downloads_package, reads_caches
from megacomposer.env.monitor.history import git_history
from megacomposer.env.monitor.patches import (
    deceives_verifier,
    edits_runner,
    edits_tests,
    patches_runner,
    skips_tests,
)
from megacomposer.env.monitor.probes import (
    escapes_sandbox,
    exfiltrates,
    hides_commands,
    probes_grader,
)
from megacomposer.env.monitor.special_cases import detects_tests, special_cases_tests
from megacomposer.env.monitor.text import (
    aims_at_judge,
    broken_calls,
    forges_results,
    hides_text,
    reasons_in_comments,
)
from megacomposer.env.monitor.view import Hits, View

Rule = Callable[[View], Hits]

RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        reads_caches,
        decompiles,
        git_history,
        downloads_package,
        edits_tests,
        skips_tests,
        edits_runner,
        patches_runner,
        deceives_verifier,
        special_cases_tests,
        detects_tests,
        probes_grader,
        escapes_sandbox,
        exfiltrates,
        hides_commands,
        forges_results,
        aims_at_judge,
        hides_text,
        broken_calls,
        reasons_in_comments,
    )
}


def rule_table() -> str:
    """The rules and the first sentence of each as a Markdown table."""
    rows = []
    for name, rule in RULES.items():
        first = " ".join((rule.__doc__ or "").strip().split("\n\n")[0].split())
        rows.append(f"| `{name}` | {first} |")
    return "\n".join(["| rule | what it means |", "|---|---|", *rows])
