"""A job: one call of an async function somewhere in a fleet, and what came of it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
import importlib
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from megacomposer.env.sandbox import SandboxError

Function = Callable[..., Awaitable[Any]]
_ERROR_CHARACTERS = 4000


class WorkerLostError(SandboxError):
    """The process or machine that ran a job is gone, or answers no more."""


class Outcome(enum.StrEnum):
    """How a job ended."""

    DONE = "done"
    """`value` is what the function returned."""
    FAILED = "failed"
    """The function raised: a defect of the job, which another try would repeat."""
    TIMEOUT = "timeout"
    """It took longer than its `timeout_s`."""
    INFRASTRUCTURE = "infrastructure"
    """Sandboxes or workers failed on every attempt. This says nothing about the task."""
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to run."""

    id: str
    """Unique in a run, and the same when it is started again."""
    function: str | Function
    """`package.module:name` of an async function, or the function itself, which must be picklable
    for workers in other processes."""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments. They arrive as JSON holds them: dataclasses as dicts, tuples as lists."""
    timeout_s: float = 3600.0

    def encoded_arguments(self) -> bytes:
        """Raises ValueError where they cannot be JSON."""
        try:
            return msgspec.json.encode(dict(self.arguments), order="deterministic")
        except (TypeError, ValueError) as error:
            raise ValueError(f"job {self.id!r}: arguments: {error}") from error

    def fingerprint(self) -> str:
        """Tells whether a journal is of this job: the function's name and the arguments."""
        digest = hashlib.sha256(f"{function_name(self.function)}\0".encode())
        digest.update(self.encoded_arguments())
        return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobResult:
    """What came of a job: one of these for each, however often it was tried."""

    id: str
    outcome: Outcome
    value: Any = None
    """As JSON holds it."""
    error: str = ""
    attempts: int = 1
    worker: str = ""
    """Of the last attempt."""
    wall_s: float = 0.0
    """Of the last attempt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a worker says of one attempt."""

    outcome: Outcome
    value: bytes = b"null"
    """JSON."""
    error: str = ""


def function_name(function: str | Function) -> str:
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__qualname__}"


def find_function(function: str | Function) -> Function:
    """Raises ValueError where a name leads to no function."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"function {function!r} (package.module:name): {error}") from error
    if not callable(found):
        raise ValueError(f"function {function!r} is not a function")
    return found  # type: ignore[no-any-return]


async def run_attempt(
    load: Callable[[], str | Function], arguments: bytes, timeout_s: float
) -> Report:
    """Run a job's function here. Only cancellation is raised; all else is in the report.

    `load` gives the function, or its name: importing it is a part of the attempt.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        call = find_function(load())
        async with limit:
            value = await call(**msgspec.json.decode(arguments))
        return Report(outcome=Outcome.DONE, value=msgspec.json.encode(value))
    except SandboxError as error:
        return Report(outcome=Outcome.INFRASTRUCTURE, error=_described(error))
    except Exception as error:  # noqa: BLE001  # a job is foreign code: whatever it raises is data
        outcome = Outcome.FAILED
        if isinstance(error, TimeoutError) and limit.expired():
            outcome = Outcome.TIMEOUT
        return Report(outcome=outcome, error=_described(error))


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_ERROR_CHARACTERS:]
