"""Licence and secret filters. Keys are put together here so that this file has none."""

from __future__ import annotations

import pytest

from megacomposer.data.config import FilterConfig
from megacomposer.data.filters import (
    LicenseFinder,
    entropy_bits,
    find_secrets,
    is_allowed,
    make_filter,
    redact,
    spdx_of_text,
)

MIT = (
    b"MIT License\n\nPermission is hereby granted, free of charge, to any\nperson obtaining a copy"
)
GPL = b"          GNU GENERAL PUBLIC LICENSE\n             Version 3, 29 June 2007\n"
RANDOM = "q8Zr2LxV5tYw9KpB3nGd7HsJ4fMcX6aE1uTvRyQo"
SECRETS = {
    "aws_access_key_id": "key = AK" + "IA" + "Q3EGRIT7ZK5XMPLW",
    "github_token": "url = https://gh" + f"p_{RANDOM[:36]}@host",
    "gitlab_token": "glp" + f"at-{RANDOM[:20]}",
    "slack_token": "xo" + f"xb-{RANDOM[:24]}",
    "google_api_key": "AI" + f"za{RANDOM[:35]}",
    "stripe_key": "sk_" + f"live_{RANDOM[:24]}",
    "llm_api_key": "sk-" + f"proj-{RANDOM}",
    "json_web_token": "ey" + f"J{RANDOM[:20]}.ey" + f"J{RANDOM[:30]}.{RANDOM}",
    "private_key": (
        "-----BEGIN RSA " + "PRIVATE KEY-----\n" + f"{RANDOM}{RANDOM}\n" * 3
        + "-----END RSA " + "PRIVATE KEY-----"
    ),
    "high_entropy_assignment": f'DB_PASSWORD = "{RANDOM[:24]}"',
}  # fmt: skip


def kinds(text: bytes) -> list[str]:
    return [kind for _, _, kind in find_secrets(text, min_entropy_bits=3.5)]


@pytest.mark.parametrize("kind", SECRETS)
def test_known_secrets_are_found_and_redacted_without_a_trace(kind):
    text = f"before\n{SECRETS[kind]}\nafter\n".encode()
    secrets = find_secrets(text, min_entropy_bits=3.5)
    assert [found for _, _, found in secrets] == [kind]
    clean = redact(text, secrets)
    assert clean.startswith(b"before\n")
    assert clean.endswith(b"\nafter\n")
    assert f"REDACTED_{kind}".encode() in clean
    assert RANDOM[:16].encode() not in clean
    assert kinds(clean) == []


@pytest.mark.parametrize(
    "text",
    [
        b'token = "the quick brown fox jumps"',
        b'password = "passwordpasswordpassword"',
        b'API_KEY_HEADER = "X-Authorization-Header"',
        b'secret = "your-secret-key-0123456789abcdef"',
        b"AK" + b"IAIOSFODNN7EXAMPLE",
        b'if line == "-----BEGIN RSA '
        + b'PRIVATE KEY-----":\n    state = 1\n    return parse(line)',
        b"token = tokenizer.next_token(position_of_the_token_1234)",
        b'sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"',
    ],
)
def test_ordinary_code_is_not_a_secret(text):
    assert kinds(text) == []


def test_a_private_key_whose_end_was_cut_off_is_still_found():
    text = ("-----BEGIN " + "PRIVATE KEY-----\n" + f"{RANDOM}{RANDOM[:24]}\n" * 4).encode()
    assert kinds(text) == ["private_key"]


def test_a_known_key_inside_of_an_assignment_is_one_secret():
    text = f'token = "gh{"p"}_{RANDOM[:36]}"'.encode()
    assert len(kinds(text)) == 1
    assert RANDOM[:16].encode() not in redact(text, find_secrets(text, min_entropy_bits=3.5))


def test_entropy_of_known_distributions():
    assert entropy_bits(b"aaaa") == 0
    assert entropy_bits(b"abcd") == 2


@pytest.mark.parametrize(
    ("config", "reason", "note"),
    [
        (FilterConfig(secrets="drop"), "secret:gitlab_token", None),
        (FilterConfig(secrets="redact"), None, "redacted:gitlab_token"),
        (FilterConfig(secrets="off"), None, None),
    ],
)
def test_secret_actions(tmp_path, config, reason, note):
    text = SECRETS["gitlab_token"].encode()
    found = make_filter(config, tmp_path)("a.py", text)
    assert (found[0], found[2]) == (reason, note)
    assert (found[1] == text) == (config.secrets != "redact")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("mit", True),
        ("GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT AND Apache-2.0", True),
        ("(MIT OR GPL-3.0-only) AND Apache-2.0", True),
        ("MIT OR GPL-3.0-only AND GPL-2.0-only", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("", False),
        ("MIT OR", False),
        ("(MIT", False),
        ("MIT Apache-2.0", False),
        ("AND", False),
    ],
)
def test_spdx_expressions(expression, expected):
    assert is_allowed(expression, frozenset({"mit", "apache-2.0"})) is expected


def test_licence_texts_are_told_apart():
    bsd2 = b"Redistributions in binary form must reproduce the above copyright\n   notice, this"
    assert spdx_of_text(MIT) == "MIT"
    assert spdx_of_text(GPL) == "GPL-3.0"
    assert spdx_of_text(b"Apache License\n  Version 2.0, January 2004") == "Apache-2.0"
    assert spdx_of_text(b"GNU LESSER GENERAL PUBLIC LICENSE\n Version 3, 29 June") == "LGPL-3.0"
    assert spdx_of_text(bsd2) == "BSD-2-Clause"
    assert spdx_of_text(bsd2 + b" Neither the name of the holder") == "BSD-3-Clause"
    assert spdx_of_text(b"All rights reserved") == "NOASSERTION"


def test_a_file_header_wins_over_the_nearest_licence_file(tmp_path):
    (tmp_path / "vendored/deep").mkdir(parents=True)
    (tmp_path / "LICENSE").write_bytes(MIT)
    (tmp_path / "vendored/COPYING").write_bytes(GPL)
    (tmp_path / "license.py").write_bytes(b"x = 1\n")
    finder = LicenseFinder(tmp_path)
    assert finder.license_of("a.py", b"x = 1\n") == "MIT"
    assert finder.license_of("vendored/deep/b.py", b"x = 1\n") == "GPL-3.0"
    header = b"/* SPDX-License-Identifier: Apache-2.0 OR MIT */\n"
    assert finder.license_of("vendored/c.c", header) == "Apache-2.0 OR MIT"


def test_licence_filter_drops_with_the_licence_as_reason(tmp_path):
    unknown = make_filter(FilterConfig(licenses=("MIT",)), tmp_path)
    assert unknown("a.py", b"x")[0] == "license:NOASSERTION"
    lenient = make_filter(FilterConfig(licenses=("MIT", "NOASSERTION")), tmp_path)
    assert lenient("a.py", b"x")[0] is None
    (tmp_path / "LICENSE-MIT").write_bytes(MIT)
    (tmp_path / "LICENSE-GPL").write_bytes(GPL)
    both = make_filter(FilterConfig(licenses=("MIT",)), tmp_path)
    assert both("a.py", b"x")[0] == "license:GPL-3.0 AND MIT"
    assert both("b.py", b"# SPDX-License-Identifier: MIT\n")[0] is None
