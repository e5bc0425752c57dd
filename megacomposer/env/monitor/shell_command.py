"""A shell command as the monitor sees it, and what little of its output follows from its words."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command as it would run."""

    words: tuple[str, ...]
    """The program and its arguments, quotes removed; what is unknown stays as written."""
    start: int
    end: int
    """Where it stands in the script, from the start of its pipeline on; a command inside a quoted
    script has the outer one's place."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Assignments before the program."""
    redirects: tuple[tuple[str, str], ...] = ()
    """(operator without file descriptor, target)."""
    stdin: str = ""
    """A here-document, here-string, or the known output of the command before it in the pipe."""
    before: str = ""
    """The operator before it: "", ";", "&&", "||", "|", "&", newline."""
    pipeline: int = 0
    """Equal for the commands of one pipeline."""
    via: tuple[str, ...] = ()
    """Wrappers that it was run by, outermost first, such as ("timeout", "xargs")."""
    cwd: str = ""
    """The directory that `cd` went to before, relative to the first one or absolute."""
    decoded: bool = False
    """It was hidden in base64 and decoded into a shell."""

    @property
    def program(self) -> str:
        """The program's name without its folder."""
        return self.words[0].rstrip("/").rpartition("/")[2]

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[1:]


def fill_pipes(commands: list[Command], outer: Sequence[int]) -> None:
    """Give each command of `outer` the known output of the one before it in its pipeline."""
    for before, index in zip(outer, outer[1:], strict=False):
        one, two = commands[before], commands[index]
        if two.before != "|" or one.pipeline != two.pipeline:
            continue
        commands[index] = two = dataclasses.replace(two, start=one.start)
        if two.stdin:
            continue
        known = known_output(one, one.stdin)
        if known is not None:
            hidden = one.decoded or _decodes(one)
            commands[index] = dataclasses.replace(two, stdin=known, decoded=hidden)


def known_output(command: Command, stdin: str) -> str | None:
    """What the command writes, where that follows from its words."""
    if command.program in ("echo", "printf"):
        words = [w for w in command.arguments if not re.fullmatch(r"-[neE]+", w)]
        if command.program == "printf" and len(words) > 1 and words[0].strip() in ("%s", "%s\\n"):
            words = words[1:]
        return " ".join(words)
    if command.program == "cat" and stdin and not command.arguments:
        return stdin
    if _decodes(command):
        return decode_base64(stdin)
    return None


def _decodes(command: Command) -> bool:
    options = ("-d", "-D", "--decode", "-di")
    return command.program == "base64" and any(w in options for w in command.arguments)


def decode_base64(text: str) -> str | None:
    """The text behind base64, or None where there is none."""
    packed = re.sub(r"\s+", "", text)
    try:
        return base64.b64decode(packed, validate=True).decode("utf-8") if packed else None
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
