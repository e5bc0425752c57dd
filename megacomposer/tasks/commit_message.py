"""What is left of a commit's message as a task: no revisions, addresses, people, or the answer."""

from __future__ import annotations

import re

_TRAILER = re.compile(
    r"^(?:[A-Z][\w-]*-(?:by|[Ii]d|for|on|url|link)|cc|bug|issue|issues|refs?|see(?: also)?|closes?"
    r"|fix(?:es|ed)?|resolves?|link|pr|merge|part of|related(?: to)?|backport(?: of)?|reverts?)"
    r"\s*:?\s*(?:#?\d+\b.*|.*@.*|https?:.*|gh-\d+.*|[0-9a-f]{7,40}.*|[\w./-]+#\d+.*|[\w-]{20,}.*)$",
    re.I,
)
_PEOPLE = re.compile(r"^[A-Z][\w-]*-(?:by|id):.*$", re.I)
_ADDRESS = re.compile(
    r"\b(?:https?|ssh|git|ftp)://\S+|\bgit@\S+|\bwww\.\S+|<?[\w.+-]+@[\w-]+\.\w[\w.]*>?"
)
_REVISION = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b|\b[0-9a-f]{40}\b")
_NUMBER = re.compile(
    r"\s*\((?:closes |fixes |resolves |see |issue |pr |gh-)*#?\d+\)"
    r"|(?:\b(?:closes|fixes|fix|resolves|see|issue|pr|gh)[ -])?(?:[\w.-]+/[\w.-]+)?#\d+\b"
    r"|\bgh-\d+\b",
    re.I,
)
_HUNK = re.compile(r"^(?:diff --git |@@ -\d|index [0-9a-f]{7}|--- a/|\+\+\+ b/)")
_MIN_LINE_CHARS = 12
"""Shorter lines of the answer are nobody's in particular."""


def scrub_message(message: str, patch: str) -> str:
    """The message without trailers, people, numbers of issues, revisions, addresses and diffs, and
    without lines that hold a line of the answer (`patch`, a diff)."""
    answer = {
        _squeezed(line[1:])
        for line in patch.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    }
    answer = {line for line in answer if len(line) >= _MIN_LINE_CHARS}
    kept: list[str] = []
    for line in message.replace("\r\n", "\n").split("\n"):
        squeezed = _squeezed(line.strip().removeprefix("+").strip("`> "))
        tells = any(part in squeezed for part in answer) if squeezed else False
        if tells or _HUNK.match(line) or _PEOPLE.match(line) or _TRAILER.match(line.strip()):
            continue
        text = _ADDRESS.sub("", line)
        text = _REVISION.sub("", _NUMBER.sub("", text))
        text = re.sub(r"\(\s*\)|\[\s*\]|<\s*>", "", text)
        text = re.sub(r"(?<=\S)[ \t]{2,}", " ", text).rstrip()
        if line.strip() and not re.search(r"\w", text) and not line.strip().startswith("```"):
            continue
        kept.append(text)
    joined = "\n".join(kept)
    joined = re.sub(r"```\w*\n\s*```", "", joined)
    return re.sub(r"\n{3,}", "\n\n", joined).strip()


def _squeezed(line: str) -> str:
    return re.sub(r"\s+", "", line)
