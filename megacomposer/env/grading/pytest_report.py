"""Runs pytest inside the grading sandbox and reports what its own report objects say.

The verifier passes this file's text to `python -c`; it needs only the standard library and pytest.
Stdin is one JSON object (see `main`). Stdout becomes the event channel: one line an event,
`sequence mac json`, so what was reported once cannot be taken back, and a line that the code
under test writes is no event. Nothing here is a wall: that code runs in the same process and
may find the key. Hence the fingerprints here, and the control tests of `test_run`.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import hmac
import importlib
import json
import os
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

DETAIL_CHARS = 2000
"""The tail of a failure's text that is reported."""
DETAILS_CHARS = 400_000
"""Of all failures together; afterwards only outcomes."""
SEARCH_S = 0.5
"""Spent on looking for classes that equal everything after single tests; then only at the end."""
CRITICAL = ("_pytest.runner", "_pytest.reports", "_pytest.outcomes", "pluggy._callers")
"""Modules whose functions are checked while a test's own patches may still be in place."""
GUARDED = (
    *CRITICAL,
    "_pytest.assertion",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.util",
    "_pytest.config",
    "_pytest.fixtures",
    "_pytest.main",
    "_pytest.mark.structures",
    "_pytest.nodes",
    "_pytest.python",
    "_pytest.skipping",
    "_pytest.unittest",
    "pluggy._hooks",
    "pluggy._manager",
    "unittest.case",
)
WATCHED_HOOKS = (
    *("pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call"),
    *("pytest_pyfunc_call", "pytest_runtest_makereport", "pytest_runtest_logreport"),
)
HEAP_TYPE = 1 << 9
"""Of `__flags__`: a class made by a class statement."""
CODE_TYPES = (types.FunctionType, type, staticmethod, classmethod, property)


def make_emit(channel: int, key: bytes) -> Callable[[list[Any]], None]:
    """The key lives in this closure only. A forked copy of the process reports nothing."""
    write, new_mac, dumps, getpid = os.write, hmac.new, json.dumps, os.getpid
    sha256, owner = hashlib.sha256, os.getpid()
    sequence = 0

    def emit(event: list[Any]) -> None:
        nonlocal sequence
        if getpid() != owner:
            return
        body = dumps(event, separators=(",", ":")).encode("ascii")
        mac = new_mac(key, b"%d %b" % (sequence, body), sha256).hexdigest()[:20]
        line = b"%d %b %b\n" % (sequence, mac.encode("ascii"), body)
        sequence += 1
        while line:
            line = line[write(channel, line) :]

    return emit


def namespaces(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A module's names, and those of each class that it defines."""
    module = importlib.import_module(name)
    yield name, vars(module)
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == name:
            yield f"{name}.{value.__qualname__}", vars(value)


def function_of(value: Any) -> Any:
    """The Python function behind a method, property or function; None where there is none."""
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def code_of(value: Any) -> object:
    return getattr(function_of(value), "__code__", None)


def make_check(modules: tuple[str, ...]) -> Callable[[], list[str]]:
    """A function that names what has been replaced since, in pytest, unittest and builtins."""
    kept: list[tuple[str, Mapping[str, Any], str, Any]] = []
    codes: list[tuple[str, Any, object]] = []
    for module in modules:
        for label, namespace in namespaces(module):
            for name, value in list(namespace.items()):
                if isinstance(value, CODE_TYPES):
                    kept.append((f"{label}.{name}", namespace, name, value))
                    function = function_of(value)
                    if function is not None:
                        codes.append((f"{label}.{name}", function, function.__code__))
    for name, value in list(vars(builtins).items()):
        if name != "_" and not name.startswith("__"):
            kept.append((f"builtins.{name}", vars(builtins), name, value))
    for name in ("_exit", "abort", "fork", "kill", "write"):
        kept.append((f"os.{name}", vars(os), name, getattr(os, name)))
    kept.append(("sys.exit", vars(sys), "exit", sys.exit))
    loaded = [(name, sys.modules[name]) for name in (*modules, "pytest", "unittest")]
    modules_now = sys.modules

    def check() -> list[str]:
        # Runs after every test, so nothing is looked up twice.
        changed = [label for label, space, name, value in kept if space.get(name) is not value]
        changed += [label for label, function, code in codes if function.__code__ is not code]
        changed += [name for name, module in loaded if modules_now.get(name) is not module]
        return changed[:20]

    return check


class Report:
    """The plugin: registered by object, so nothing in the workspace can stand in for it."""

    def __init__(self, emit: Callable[[list[Any]], None], seed: int | None) -> None:
        self._emit = emit
        self._seed = seed
        self._check_all: Callable[[], list[str]] = list
        self._check_critical: Callable[[], list[str]] = list
        self._collecting = False
        self._plugins: list[Any] = []
        self._code: dict[str, tuple[Any, object]] = {}
        self._index: dict[str, int] = {}
        self._phases: dict[str, list[tuple[str, str, bool]]] = {}
        self._detail: dict[str, str] = {}
        self._duration_s: dict[str, float] = {}
        self._details_left = DETAILS_CHARS
        self._clock_s, self._searched_s = time.perf_counter, 0.0
        self._told: set[str] = set()

    def _tell_changes(self, changed: list[str], where: str) -> None:
        fresh = [label for label in changed if label not in self._told]
        if fresh:
            self._told.update(fresh)
            self._emit(["tampered", where, fresh])

    def _tell_always_equal(self) -> None:
        began_s = self._clock_s()
        fresh = [name for name in always_equal() if name not in self._told]
        self._searched_s += self._clock_s() - began_s
        if fresh:
            self._told.update(fresh)
            self._emit(["always_equal", fresh])

    def _text(self, report: Any) -> str:
        if not self._details_left:
            return ""
        text = str(report.longreprtext)[-min(DETAIL_CHARS, self._details_left) :]
        self._details_left -= len(text)
        return text

    def pytest_load_initial_conftests(self) -> None:
        # Before any file of the workspace is loaded, and after pytest's own `legacypath` has
        # changed classes of pytest.
        self._check_all, self._check_critical = make_check(GUARDED), make_check(CRITICAL)

    def pytest_plugin_registered(self, plugin: Any) -> None:
        self._plugins.append(plugin)
        file = getattr(plugin, "__file__", None) if isinstance(plugin, types.ModuleType) else None
        if self._collecting and os.path.basename(file or "") != "conftest.py":
            self._tell_changes([f"plugin {plugin!r:.80}"], "registration")

    def pytest_collection(self, session: Any) -> None:
        self._collecting = True
        self._hooks: Any = session.config.hook

    def _unregistered(self) -> list[str]:
        """Implementations of hooks that came in past the plugin manager."""
        known = {id(plugin) for plugin in self._plugins}
        return [
            f"hook {name} of {implementation.plugin_name}"
            for name in WATCHED_HOOKS
            for implementation in getattr(self._hooks, name).get_hookimpls()
            if id(implementation.plugin) not in known
        ]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._seed is None:
            return
        # Files in another order, and tests within a file: fixtures of a module stay cheap.
        shuffler = random.Random(self._seed)
        files: dict[str, list[Any]] = {}
        for item in items:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        order = list(files)
        shuffler.shuffle(order)
        for name in order:
            shuffler.shuffle(files[name])
        items[:] = [item for name in order for item in files[name]]

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._emit(["collect", report.nodeid, report.outcome, self._text(report)])

    def pytest_deselected(self, items: list[Any]) -> None:
        self._emit(["deselected", [item.nodeid for item in items][:1000]])

    def pytest_collection_finish(self, session: Any) -> None:
        names = [item.nodeid for item in session.items]
        for position, name in enumerate(names):
            self._index.setdefault(name, position)
        for item in session.items:
            function = getattr(item, "obj", None)
            self._code.setdefault(item.nodeid, (function, code_of(function)))
        self._emit(["collected", names])
        self._tell_changes(self._check_all(), "collection")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._emit(["start", self._index.get(nodeid, nodeid)])

    def pytest_runtest_logreport(self, report: Any) -> None:
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append((report.when, report.outcome, hasattr(report, "wasxfail")))
        taken_s = self._duration_s.get(report.nodeid, 0.0) + float(report.duration)
        self._duration_s[report.nodeid] = taken_s
        if report.outcome == "failed" and report.nodeid not in self._detail:
            self._detail[report.nodeid] = self._text(report)
        if report.when == "call":
            self._tell_changes(self._check_critical(), report.nodeid)
            if self._searched_s < SEARCH_S:
                # A class made in a function is soon gone.
                self._tell_always_equal()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = combined_outcome(self._phases.pop(nodeid, []))
        duration_ms = round(1000 * self._duration_s.pop(nodeid, 0.0))
        detail = self._detail.pop(nodeid, "")
        self._emit(["end", self._index.get(nodeid, nodeid), outcome, duration_ms, detail])
        function, code = self._code.get(nodeid, (None, None))
        changed = [f"code of {nodeid}"] if code_of(function) is not code else []
        self._tell_changes(changed + self._check_all() + self._unregistered(), nodeid)

    def pytest_sessionfinish(self) -> None:
        # Afterwards `legacypath` takes its changes back.
        self._tell_changes(self._check_all() + self._unregistered(), "end")
        self._tell_always_equal()

    def finish(self, status: int) -> None:
        self._emit(["finish", status, len(self._index)])


def always_equal() -> list[str]:
    """Classes of the workspace whose instances say that they equal an object they never saw."""
    here = os.getcwd() + os.sep
    found: list[str] = []
    kind: Any
    waiting: list[Any] = [object]
    seen: set[int] = set()
    while waiting:
        for kind in type.__subclasses__(waiting.pop()):
            if id(kind) in seen:
                continue
            seen.add(id(kind))
            waiting.append(kind)
            if "__eq__" not in vars(kind):
                continue
            file = str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
            name = os.path.basename(file)
            tests = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
            if not file.startswith(here) or tests:
                continue
            # It may raise anything: an instance without its fields is no honest question.
            with contextlib.suppress(BaseException):
                # Not by its own __new__, which may count or keep what it makes.
                native = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
                if vars(kind)["__eq__"](native.__new__(kind), object()) is True:
                    found.append(f"{kind.__module__}.{kind.__qualname__}")
    return found[:20]


def combined_outcome(phases: list[tuple[str, str, bool]]) -> str:
    """One word for setup, call and teardown; anything incomplete is an error."""
    for when, outcome, expected in phases:
        if outcome == "failed":
            return "failed" if when == "call" else "error"
        if outcome == "skipped":
            return "xfailed" if expected else "skipped"
    if [when for when, _, _ in phases if when != "call"] != ["setup", "teardown"]:
        return "error"
    calls = [expected for when, _, expected in phases if when == "call"]
    if not calls:
        return "error"
    return "xpassed" if any(calls) else "passed"


def main() -> None:
    """Stdin: {"key", "args", "paths", "site", "seed", "environ"}.

    `key` is hexadecimal; `args` are pytest's; `site` is where pytest is, or ""; `paths` go before
    the standard library once pytest is loaded; `environ` is for the tests and what they start.
    """
    import fcntl

    config = json.loads(sys.stdin.buffer.read())
    leave = os._exit
    channel = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    emit = make_emit(channel, bytes.fromhex(config.pop("key")))
    os.environ.update(config["environ"])
    if config["site"]:
        sys.path.append(config["site"])

    import pytest

    # Loaded now, so that no file of the workspace can take their names.
    for name in (*GUARDED, "pytest", "unittest", "unittest.mock", "doctest", "pdb", "difflib"):
        importlib.import_module(name)
    paths = [os.path.abspath(path) for path in config["paths"]]
    sys.path[:0] = paths
    # For what the tests start; this process ignores it.
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [config["site"]])])
    sys.argv = ["pytest", *config["args"]]
    report = Report(emit, config["seed"])
    emit(["begin", pytest.__version__, sys.version.split()[0]])
    status = int(pytest.main(config["args"], plugins=[report]))
    report.finish(status)
    # Exit handlers belong to the code under test.
    sys.stderr.flush()
    leave(status)


if __name__ == "__main__":
    main()
