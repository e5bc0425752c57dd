"""A git diff as the monitor reads it: files, and the lines that were added and removed."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a hunk."""

    kind: str
    """"+", "-" or " "."""
    text: str
    start: int
    """Offset of `text` in the diff."""
    hunk: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileDiff:
    """Changes of one file."""

    old_path: str
    """"" for a new file."""
    path: str
    """"" for a deleted file."""
    start: int
    end: int
    """Of the file's header in the diff."""
    lines: tuple[Line, ...] = ()
    binary: bool = False

    @property
    def name(self) -> str:
        return self.path or self.old_path

    @property
    def is_new(self) -> bool:
        return not self.old_path

    @property
    def is_deleted(self) -> bool:
        return not self.path

    @functools.cached_property
    def added(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == "+")

    @functools.cached_property
    def removed(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == "-")

    def new_sides(self) -> Iterator[tuple[Line, ...]]:
        """For each hunk, its lines as they are after the change."""
        hunks: dict[int, list[Line]] = {}
        for line in self.lines:
            if line.kind != "-":
                hunks.setdefault(line.hunk, []).append(line)
        yield from (tuple(lines) for lines in hunks.values())


Diff = tuple[FileDiff, ...]


def read_diff(text: str) -> Diff:
    """The files of a `git diff`, or of a plain unified diff; what is no diff is passed over."""
    files: list[FileDiff] = []
    old = path = ""
    header = (0, 0)
    lines: list[Line] = []
    binary = opened = False
    left = [0, 0]
    hunk = at = 0

    def close() -> None:
        if opened and (old or path):
            files.append(
                FileDiff(
                    old_path=old,
                    path=path,
                    start=header[0],
                    end=header[1],
                    lines=tuple(lines),
                    binary=binary,
                )
            )

    for raw in text.split("\n"):
        start, at = at, at + len(raw) + 1
        if left[0] > 0 or left[1] > 0:  # inside a hunk nothing is a header
            kind = raw[:1] or " "
            if kind in "+- ":
                lines.append(Line(kind=kind, text=raw[1:].rstrip("\r"), start=start + 1, hunk=hunk))
                left[0] -= kind != "+"
                left[1] -= kind != "-"
            continue
        if raw.startswith("diff --git "):
            close()
            opened, binary, lines = True, False, []
            old, path = _header_paths(raw[11:])
            header = (start, start + len(raw))
        elif raw.startswith("--- ") and (name := _side(raw[4:])) is not None:
            if not opened or lines:
                close()
                opened, binary, lines, path = True, False, [], ""
                header = (start, start + len(raw))
            old = name
        elif raw.startswith("+++ ") and opened and (name := _side(raw[4:])) is not None:
            path = name
        elif raw.startswith("new file mode"):
            old = ""
        elif raw.startswith("deleted file mode"):
            path = ""
        elif raw.startswith(("GIT binary patch", "Binary files ")):
            binary = True
        elif opened and (match := _HUNK.match(raw)):
            hunk += 1
            left = [int(match[2] or 1), int(match[4] or 1)]
    close()
    return tuple(files)


def _header_paths(rest: str) -> tuple[str, str]:
    quoted = _QUOTED.findall(rest)
    if len(quoted) == 2:
        return _unquote(quoted[0])[2:], _unquote(quoted[1])[2:]
    if rest.startswith("a/"):
        middle = len(rest) // 2
        if rest[middle : middle + 3] == " b/" and rest[2:middle] == rest[middle + 3 :]:
            return rest[2:middle], rest[2:middle]
        one, _, two = rest.partition(" b/")
        return one[2:], two
    return "", ""


def _side(text: str) -> str | None:
    """A path of a `---` or `+++` line; "" is /dev/null."""
    text = text.split("\t")[0].strip()
    if text.startswith('"') and text.endswith('"'):
        text = _unquote(text[1:-1])
    if text == "/dev/null":
        return ""
    return text[2:] if text[:2] in ("a/", "b/") else text


def _unquote(text: str) -> str:
    """Undo git's quoting of unusual names."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code, 8)) if code[0].isdigit() else {"n": "\n", "t": "\t"}.get(code, code)

    plain = re.sub(r"\\([0-7]{3}|.)", one, text)
    return plain.encode("latin-1", "replace").decode("utf-8", "replace")
