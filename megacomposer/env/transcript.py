"""What an agent did, turn by turn, as the tools saw it: the input of the monitor and of rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str
    """The parsed object, or the text itself where it was not a JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The answer to one call, in the words that the model reads."""

    call_id: str
    text: str
    is_error: bool = False
    """The call was malformed or refused, or the tool failed; the text says what to do instead."""
    error_kind: str = ""
    """"" or one of: unknown_tool, bad_json, bad_arguments, not_found, refused, timeout, limit,
    failed, infrastructure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of the model and what came back."""

    text: str = ""
    """Visible message, reasoning included where it is known."""
    calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    """In the order of `calls`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
    """A whole rollout."""

    task_id: str
    turns: tuple[Turn, ...]
    patch: bytes = b""
    """`git diff --binary` of the workspace against the task's base at the end."""
    finished: bool = True
    """The agent called `finish`, rather than running out of turns or time."""
