"""Tests with known outcomes that run beside the real ones.

Code that makes every test pass makes these pass too, whatever way it goes about it: most of them
must fail. Their names and numbers are new in each run.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from pathlib import PurePosixPath

_SOURCE = '''"""Arithmetic."""

import unittest

import pytest


def test_sum_{tag}():
    assert {left} + {right} == {wrong}


def test_raises_{tag}():
    with pytest.raises(ZeroDivisionError):
        int("{left}")


def test_error_{tag}():
    raise RuntimeError("{tag}")


def test_true_{tag}():
    assert {left} + {right} == {sum}


def test_skip_{tag}():
    pytest.skip("{tag}")


class Test{tag}(unittest.TestCase):
    def test_equal(self):
        self.assertEqual({left} + {right}, {wrong})

    def test_true(self):
        self.assertTrue({left} > {sum})
'''


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlTests:
    """One test file and what must come of it."""

    path: str
    """In the workspace."""
    source: bytes
    expected: Mapping[str, str]
    """Test id -> outcome."""

    @classmethod
    def beside(cls, file: str) -> ControlTests:
        """A new file in the directory of `file`, so that the same fixtures and hooks see it."""
        tag = "n" + secrets.token_hex(4)
        left, right = 2 + secrets.randbelow(1000), 2 + secrets.randbelow(1000)
        directory = PurePosixPath(file).parent
        path = str(directory / f"test_{tag}.py")
        source = _SOURCE.format(
            tag=tag, left=left, right=right, sum=left + right, wrong=left + right + 1
        )
        expected = {
            f"test_sum_{tag}": "failed",
            f"test_raises_{tag}": "failed",
            f"test_error_{tag}": "failed",
            f"test_true_{tag}": "passed",
            f"test_skip_{tag}": "skipped",
            f"Test{tag}::test_equal": "failed",
            f"Test{tag}::test_true": "failed",
        }
        return cls(
            path=path,
            source=source.encode("ascii"),
            expected={f"{path}::{name}": outcome for name, outcome in expected.items()},
        )

    def problems(self, outcomes: Mapping[str, str], complete: bool) -> list[str]:
        """What contradicts `expected`, as "control: ..." or, where the tests could not even be
        set up, "runner_failed: ...". `complete`: the run came to its end."""
        found = []
        for name, expected in self.expected.items():
            outcome = outcomes.get(name, "absent")
            if outcome == expected or (outcome == "absent" and not complete):
                continue
            # A broken fixture makes errors of all of them; only forgery makes one pass.
            kind = "runner_failed" if outcome in ("error", "failed") else "control"
            found.append(f"{kind}: {name} must be {expected}, was {outcome}")
        return found
