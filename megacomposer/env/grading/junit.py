"""JUnit XML: the report of test runners other than pytest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree

MAX_BYTES = 64 << 20
DETAIL_CHARS = 2000


class JunitError(ValueError):
    """The file is no JUnit report; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JunitReport:
    """Outcomes by test id, `classname::name` (`name` alone without a class)."""

    outcomes: Mapping[str, str]
    """passed, failed, error or skipped. A name that occurs twice has its worst outcome."""
    details: Mapping[str, str]
    cases: int
    problems: tuple[str, ...]
    """Where the counts that the report declares are not those of its cases."""


_SEVERITY = ("passed", "skipped", "failed", "error")


def parse_junit(data: bytes) -> JunitReport:
    """Reads a report that untrusted code may have written. Raises JunitError."""
    if len(data) > MAX_BYTES:
        raise JunitError(f"the report has {len(data)} bytes; at most {MAX_BYTES} are read")
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data or b"\0" in data:
        # Entities can grow without bound; a NUL means an encoding that hides them.
        raise JunitError("the report has a document type or entities, or is not UTF-8")
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise JunitError(f"the report is no XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise JunitError(f"the report's root is <{root.tag[:40]}>, not <testsuites>")
    outcomes: dict[str, str] = {}
    details: dict[str, str] = {}
    cases = 0
    for case in root.iter("testcase"):
        cases += 1
        name, outcome, detail = _case(case)
        if name in outcomes and _SEVERITY.index(outcomes[name]) > _SEVERITY.index(outcome):
            continue
        outcomes[name] = outcome
        if detail:
            details[name] = detail
    problems = tuple(_count_problems(root))
    return JunitReport(outcomes=outcomes, details=details, cases=cases, problems=problems)


def _case(case: ElementTree.Element) -> tuple[str, str, str]:
    class_name, name = case.get("classname", ""), case.get("name", "")
    identifier = f"{class_name}::{name}" if class_name else name
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        element = case.find(tag)
        if element is not None:
            text = f"{element.get('message', '')}\n{element.text or ''}".strip()
            return identifier, outcome, text[-DETAIL_CHARS:]
    return identifier, "passed", ""


def _count_problems(root: ElementTree.Element) -> Iterator[str]:
    for suite in root.iter("testsuite"):
        if suite.find("testsuite") is not None:
            continue
        cases = suite.findall("testcase")
        found = {
            "tests": len(cases),
            "failures": sum(case.find("failure") is not None for case in cases),
            "errors": sum(case.find("error") is not None for case in cases),
        }
        for attribute, count in found.items():
            declared = suite.get(attribute)
            if declared is not None and (not declared.isdecimal() or int(declared) != count):
                suite_name = suite.get("name", "")[:80]
                yield f"suite {suite_name!r} declares {attribute}={declared[:20]}, has {count}"
