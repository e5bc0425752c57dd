"""A task: a starting state, what is asked, what may be used, and how the answer is judged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megacomposer.env.sandbox import Limits, Mount, Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class EgressRule:
    """Requests that the proxy lets through; everything else is refused."""

    host: str
    """An exact name, or `*.example.org` for any name below it."""
    ports: tuple[int, ...] = (443,)
    methods: tuple[str, ...] = ("GET", "HEAD")
    """HTTP methods; ("*",) is any, and a tunnel that the proxy does not look into."""
    paths: tuple[str, ...] = ("*",)
    """Shell patterns of the URL's path."""
    deny_paths: tuple[str, ...] = ()
    """Patterns that are refused even so, such as the task's own package on an index."""
    drop_headers: tuple[str, ...] = ("authorization", "cookie", "proxy-authorization")
    """Request headers that do not leave."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BehaviourCheck:
    """A command whose result says that an answer does the right thing; run beside the tests, in
    processes of its own. The agent does not see it."""

    name: str
    command: tuple[str, ...]
    """`{python}` in it is the interpreter."""
    stdin: str = ""
    exit_code: int = 0
    stdout: str | None = None
    """Exactly; None: not looked at."""
    timeout_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestPlan:
    """How tests are run and which must pass. Ids are as the runner reports them."""

    __test__ = False

    runner: str = "pytest"
    """"pytest", or "junit" for a command that writes JUnit XML."""
    command: tuple[str, ...] = ()
    """For "junit": the command; `{report}` in it is the XML file to write. For "pytest": more
    arguments after our own."""
    fail_to_pass: tuple[str, ...] = ()
    """Fail in the starting state, and pass in a solution."""
    pass_to_pass: tuple[str, ...] = ()
    """Pass in both."""
    protected_paths: tuple[str, ...] = ()
    """Shell patterns, relative to the workspace: tests and runner configuration. Graded from
    `pristine`, whatever the agent made of them."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout_s: float = 600.0
    behaviour: tuple[BehaviourCheck, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. Everything that the agent may see is in `instruction` and `base`."""

    id: str
    instruction: str
    base: Snapshot
    """The starting state."""
    pristine: Snapshot
    """A state whose `protected_paths` are the true tests and runner configuration. Not the
    solution: the verifier has it, the agent never."""
    tests: TestPlan
    tools: tuple[str, ...] = ()
    """Names of the tools; () is all."""
    egress: tuple[EgressRule, ...] = ()
    mounts: tuple[Mount, ...] = ()
    """Read-only dependencies, such as a site-packages without the task's own package."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Limits = Limits()
    gold_patch: str = ""
    """A solution as a `git diff --binary` (base64 inside is ASCII); "" where none is known."""
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Where it comes from: kind ("feature_deletion", "commit", "swe_bench", ...), repository,
    version, licence, what was deleted."""
    difficulty: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Estimates at making: deleted_lines, target_tests, files, ..."""

    def to_json(self) -> str:
        return json.dumps(msgspec.to_builtins(self), indent=1, sort_keys=True)


def task_from_json(text: str) -> Task:
    """ValueError names the field that is wrong."""
    try:
        return msgspec.convert(json.loads(text), Task, strict=False)
    except (msgspec.ValidationError, json.JSONDecodeError) as error:
        raise ValueError(f"not a task: {error}") from error


def load_task(path: Path) -> Task:
    """A `task.json`. ValueError names the file and the field."""
    try:
        return task_from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
