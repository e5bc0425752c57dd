"""Runs pytest inside a sandbox and reports which functions each test calls.

The host passes this file's text to `python -c`; it needs only the standard library and pytest.
Arguments: the workspace, then pytest's own. The last line of stdout is one JSON object,
`{"functions": [[path, first line], ...], "tests": {id: [index, ...]}}`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any


class Probe:
    """A pytest plugin. `sys.setprofile` sees every call; setup and teardown count as the test's."""

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") + "/"
        self._seen: set[CodeType] = set()
        self._functions: dict[CodeType, int] = {}
        self.tests: dict[str, list[int]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        seen = self._seen = set()

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call":
                seen.add(frame.f_code)

        threading.setprofile(profile)
        sys.setprofile(profile)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        own = [code for code in list(self._seen) if self._path(code).startswith(self._root)]
        self.tests[nodeid] = sorted(
            self._functions.setdefault(code, len(self._functions)) for code in own
        )

    def _path(self, code: CodeType) -> str:
        return os.path.abspath(code.co_filename)

    def report(self) -> dict[str, Any]:
        functions = [
            [self._path(code)[len(self._root) :], code.co_firstlineno] for code in self._functions
        ]
        return {"functions": functions, "tests": self.tests}


def main() -> None:
    channel = os.dup(1)
    os.dup2(2, 1)
    root, *arguments = sys.argv[1:]
    import pytest

    # `python -c` puts "" first: the workspace. Tests find the package as the runner does.
    probe = Probe(os.path.abspath(root))
    pytest.main(arguments, plugins=[probe])
    with os.fdopen(channel, "w") as out:
        out.write("\n" + json.dumps(probe.report()) + "\n")


if __name__ == "__main__":
    main()
