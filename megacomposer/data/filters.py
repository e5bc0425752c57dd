"""Licence and secret filters: what may be trained on, and a counted reason for what may not."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from megacomposer.data.config import FilterConfig

UNKNOWN = "NOASSERTION"
"""SPDX's word for a licence that is not known."""

SPDX_HEADER = re.compile(rb"SPDX-License-Identifier:[ \t]*([A-Za-z0-9.+() \t-]+)")
SPDX_HEAD_BYTES = 4096

LICENSE_FILE = re.compile(
    r"(?:licen[cs]e|copying|unlicense)(?:-[a-z]+(?:[.-]?\d+)*)?"
    r"(?:\.(?:txt|md|rst|lesser|mit|apache|bsd))?",
    re.I,
)
"""Names of licence files; `license.py` is code."""

LICENSE_TEXTS = (
    ("AGPL-3.0", "gnu affero general public license version 3"),
    ("LGPL-3.0", "gnu lesser general public license version 3"),
    ("LGPL-2.1", "gnu lesser general public license version 2.1"),
    ("GPL-3.0", "gnu general public license version 3"),
    ("GPL-2.0", "gnu general public license version 2"),
    ("MPL-2.0", "mozilla public license version 2.0"),
    ("EPL-2.0", "eclipse public license - v 2.0"),
    ("Apache-2.0", "apache license version 2.0"),
    ("BSL-1.0", "boost software license - version 1.0"),
    ("PSF-2.0", "python software foundation license version 2"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("ISC", "permission to use, copy, modify, and/or distribute this software for any purpose"),
    ("ISC", "permission to use, copy, modify, and distribute this software for any purpose"),
    ("Zlib", "altered source versions must be plainly marked as such"),
    ("BSD-3-Clause", "neither the name of"),
    ("BSD-2-Clause", "redistributions in binary form must reproduce the above copyright notice"),
    ("MIT", "permission is hereby granted, free of charge, to any person obtaining a copy"),
)
"""(SPDX identifier, phrase of its text in lower case with single spaces); the first hit wins."""

SECRET_PATTERNS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    (
        "private_key",
        re.compile(
            rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            rb"(?:[\s\S]{64,16384}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            rb"|\s*(?:[A-Za-z0-9+/=]{40,}\s*)+)"
        ),
    ),
    ("aws_access_key_id", re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("github_token", re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_\w{40,251})\b")),
    ("gitlab_token", re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}")),
    ("slack_token", re.compile(rb"\bxox[abeprs]-[A-Za-z0-9-]{20,}")),
    ("google_api_key", re.compile(rb"\bAIza[A-Za-z0-9_-]{35}")),
    ("stripe_key", re.compile(rb"\b[sr]k_live_[A-Za-z0-9]{20,}\b")),
    ("llm_api_key", re.compile(rb"\bsk-(?:proj-|ant-)[A-Za-z0-9_-]{32,}|\bsk-[A-Za-z0-9]{40,}\b")),
    ("json_web_token", re.compile(rb"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}")),
)
"""(kind, pattern) of well-known key formats."""

ASSIGNMENT = re.compile(
    rb"(?i)\b\w{0,40}"
    rb"(?:secret|token|passw(?:or)?d|api_?key|access_?key|auth_?key|private_?key)"
    rb"\w{0,40}[\"']?\s{0,4}(?::=|=>|[:=])\s{0,4}"
    rb"(?P<quote>[\"'])(?P<value>[A-Za-z0-9+/_.=~-]{16,256})(?P=quote)"
)
"""A quoted value given to a name that says it is a secret; its entropy decides."""

EXAMPLE = re.compile(rb"(?i)example|dummy|placeholder|changeme|your[_-]|xxxx|1234567890")
"""A match that says it is an example is no secret."""


def entropy_bits(value: bytes) -> float:
    """Shannon entropy of the bytes of `value`, in bits per byte."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


def find_secrets(text: bytes, *, min_entropy_bits: float) -> list[tuple[int, int, str]]:
    """Non-overlapping (start, end, kind) of the secrets in `text`, in order."""
    found = [
        (match.start(), match.end(), kind)
        for kind, pattern in SECRET_PATTERNS
        for match in pattern.finditer(text)
        if not EXAMPLE.search(match.group())
    ]
    for match in ASSIGNMENT.finditer(text):
        value = match.group("value")
        mixed = re.search(rb"\d", value) and re.search(rb"[A-Za-z]", value)
        if mixed and entropy_bits(value) >= min_entropy_bits and not EXAMPLE.search(value):
            found.append((match.start("value"), match.end("value"), "high_entropy_assignment"))
    kept: list[tuple[int, int, str]] = []
    # a known format inside of an assignment is reported once, as the longer span
    for span in sorted(found, key=lambda span: (span[0], -span[1])):
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return kept


def redact(text: bytes, secrets: list[tuple[int, int, str]]) -> bytes:
    """`text` with each span replaced by `REDACTED_<kind>`."""
    pieces, position = [], 0
    for start, end, kind in secrets:
        pieces += [text[position:start], b"REDACTED_" + kind.encode()]
        position = end
    return b"".join([*pieces, text[position:]])


def spdx_of_text(text: bytes) -> str:
    """SPDX identifier of a licence text, by a phrase of it; `NOASSERTION` for any other."""
    flat = " ".join(text.decode("utf-8", "replace").lower().replace(",", " ").split())
    for identifier, phrase in LICENSE_TEXTS:
        if " ".join(phrase.replace(",", " ").split()) in flat:
            return identifier
    return UNKNOWN


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Whether an SPDX expression can be met with licences from `allowed` (lower case).

    OR needs one side, AND both; `X WITH exception` is X. False for a malformed expression.
    """
    words = re.findall(r"[()]|[^\s()]+", expression)
    position = 0

    def peek() -> str:
        return words[position].upper() if position < len(words) else ""

    def term() -> bool:
        nonlocal position
        if not words[position:] or peek() in ("AND", "OR", "WITH", ")"):
            raise ValueError(expression)
        word = words[position]
        position += 1
        if word != "(":
            if peek() == "WITH":
                position += 2
            return word.lower() in allowed
        inside = alternatives()
        if peek() != ")":
            raise ValueError(expression)
        position += 1
        return inside

    def conjunction() -> bool:
        nonlocal position
        result = term()
        while peek() == "AND":
            position += 1
            result = term() and result
        return result

    def alternatives() -> bool:
        nonlocal position
        result = conjunction()
        while peek() == "OR":
            position += 1
            result = conjunction() or result
        return result

    try:
        return alternatives() and position >= len(words)
    except ValueError:
        return False


class LicenseFinder:
    """The licence of each file of one tree: its SPDX header, else the licence file above."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root)
        self._by_directory: dict[PurePosixPath, str] = {}

    def license_of(self, path: str, text: bytes) -> str:
        """SPDX expression for the file `path` (inside the tree) of content `text`."""
        match = SPDX_HEADER.search(text[:SPDX_HEAD_BYTES])
        if match:
            return match.group(1).decode("ascii").strip()
        return self._of_directory(PurePosixPath(path).parent)

    def _of_directory(self, directory: PurePosixPath) -> str:
        if directory not in self._by_directory:
            here = self._root / directory
            names = sorted(e.name for e in os.scandir(here) if e.is_file(follow_symlinks=False))
            files = [here / name for name in names if LICENSE_FILE.fullmatch(name)]
            if files:
                # several files may be a choice or parts with terms of their own: all have to pass
                known = dict.fromkeys(spdx_of_text(file.read_bytes()) for file in files)
                found = " AND ".join(known)
            elif directory == PurePosixPath("."):
                found = UNKNOWN
            else:
                found = self._of_directory(directory.parent)
            self._by_directory[directory] = found
        return self._by_directory[directory]


Filter = Callable[[str, bytes], tuple[str | None, bytes, str | None]]
"""(path, text) -> (reason to drop it or None, the text to keep, a note to count or None)."""


def make_filter(config: FilterConfig, root: str | os.PathLike[str]) -> Filter:
    """The licence filter and then the secret filter, for the files of the tree `root`."""
    finder = LicenseFinder(root)
    allowed = frozenset(name.lower() for name in config.licenses)

    def apply(path: str, text: bytes) -> tuple[str | None, bytes, str | None]:
        if allowed:
            license_name = finder.license_of(path, text)
            if not is_allowed(license_name, allowed):
                return f"license:{license_name}", text, None
        if config.secrets == "off":
            return None, text, None
        secrets = find_secrets(text, min_entropy_bits=config.min_entropy_bits)
        if not secrets:
            return None, text, None
        kind = secrets[0][2]
        if config.secrets == "drop":
            return f"secret:{kind}", text, None
        return None, redact(text, secrets), f"redacted:{kind}"

    return apply
