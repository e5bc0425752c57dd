"""The tools that read and change one file: read, write, edit, apply_patch."""

from __future__ import annotations

import difflib
import re
from typing import Annotated

from msgspec import Meta

from megacomposer.env.sandbox import WORKDIR, Sandbox, SandboxFileError
from megacomposer.env.tools.observation_text import OBSERVATION_BYTES
from megacomposer.env.tools.schema import Arguments, Tool, ToolError

MAX_FILE_BYTES = 8 << 20
"""Of a file that read and edit take."""
MAX_LINE_CHARS = 2000
"""Of a line that is shown."""
_NEAR_MISS_BYTES = 400_000
"""Of a file in which near misses are looked for: the comparison is quadratic."""
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}

Path = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=4096,
        description=f"Relative to {WORKDIR}, or absolute.",
    ),
]


class Read(Arguments, frozen=True, kw_only=True):
    path: Path
    offset: Annotated[int, Meta(ge=1, le=10_000_000, description="First line, counted from 1.")] = 1
    limit: Annotated[int, Meta(ge=1, le=5000, description="Number of lines.")] = 1000


class Write(Arguments, frozen=True, kw_only=True):
    path: Path
    content: Annotated[str, Meta(description="The whole new content.")]


class Edit(Arguments, frozen=True, kw_only=True):
    path: Path
    old_text: Annotated[
        str,
        Meta(min_length=1, description="Text of the file, exactly, with its indentation."),
    ]
    new_text: Annotated[str, Meta(description="What replaces it.")]
    replace_all: Annotated[
        bool, Meta(description="Replace every occurrence; else there must be exactly one.")
    ] = False


class ApplyPatch(Arguments, frozen=True, kw_only=True):
    diff: Annotated[
        str,
        Meta(
            min_length=1,
            description=f"A unified diff as `git diff` writes it, with paths from {WORKDIR}.",
        ),
    ]


class FileTools:
    """The four tools over one sandbox."""

    def __init__(self, sandbox: Sandbox, *, observation_bytes: int = OBSERVATION_BYTES) -> None:
        self._sandbox = sandbox
        self._observation_bytes = observation_bytes

    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                name="read",
                description="Show a text file with line numbers. A line number and a tab go before"
                " each line and are not part of the file.",
                arguments=Read,
                run=self._read,
                reads_only=True,
            ),
            Tool(
                name="write",
                description="Create a file, or replace all of it; directories are made. To change"
                " a part, use edit.",
                arguments=Write,
                run=self._write,
            ),
            Tool(
                name="edit",
                description="Replace old_text in a file by new_text. old_text must be exactly as"
                " in the file and there once, or replace_all true.",
                arguments=Edit,
                run=self._edit,
            ),
            Tool(
                name="apply_patch",
                description="Apply a unified diff to one or more files, whole or not at all.",
                arguments=ApplyPatch,
                run=self._apply_patch,
            ),
        )

    async def _load(self, path: str) -> bytes:
        check_path(path)
        try:
            return await self._sandbox.read_file(path, max_bytes=MAX_FILE_BYTES)
        except SandboxFileError as error:
            if error.code != "EFBIG":
                raise
            text = f"{path} is longer than {MAX_FILE_BYTES >> 20} MiB"
            raise ToolError("limit", f"{text}; use grep, or sed in the terminal.") from error

    async def _read(self, arguments: Read) -> str:
        data = await self._load(arguments.path)
        text, notes = _as_text(arguments.path, data)
        if not data:
            return f"[{arguments.path} is empty]"
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        else:
            notes.append("no newline at the end of the file")
        if arguments.offset > len(lines):
            raise ToolError(
                "bad_arguments",
                f"{arguments.path} has {len(lines)} lines; offset {arguments.offset} is past them.",
            )
        last = min(len(lines), arguments.offset + arguments.limit - 1)
        shown, shown_to = self._numbered(lines, arguments.offset, last)
        if arguments.offset > 1 or shown_to < len(lines):
            span = f"lines {arguments.offset}-{shown_to} of {len(lines)}"
            more = f"; continue with offset {shown_to + 1}" if shown_to < len(lines) else ""
            notes.insert(0, span + more)
        return f"{shown}[{'; '.join(notes)}]" if notes else shown.rstrip("\n")

    def _numbered(self, lines: list[str], first: int, last: int) -> tuple[str, int]:
        """The text of as many whole lines as an answer holds, and the last one's number."""
        room = self._observation_bytes - 300  # the notes at the end
        shown: list[str] = []
        for number in range(first, last + 1):
            row = f"{number:6}\t{_short(lines[number - 1])}\n"
            room -= len(row.encode())
            if room < 0 and shown:
                return "".join(shown), number - 1
            shown.append(row)
        return "".join(shown), last

    async def _write(self, arguments: Write) -> str:
        check_path(arguments.path)
        data = arguments.content.encode()
        await self._sandbox.write_file(arguments.path, data)
        lines = arguments.content.count("\n") + (not arguments.content.endswith("\n"))
        return f"Wrote {arguments.path}: bytes {len(data)}, lines {lines if data else 0}."

    async def _edit(self, arguments: Edit) -> str:
        path, old, new = arguments.path, arguments.old_text, arguments.new_text
        if old == new:
            raise ToolError("bad_arguments", "edit: old_text and new_text are the same text.")
        data = await self._load(path)
        _as_text(path, data)
        # Bytes that are no UTF-8 survive an edit elsewhere in the file.
        content = data.decode("utf-8", "surrogateescape")
        count = content.count(old)
        if count == 0:
            raise ToolError(
                "not_found", f"{path}: old_text is not there. {_near_miss(content, old)}"
            )
        if count > 1 and not arguments.replace_all:
            numbers = ", ".join(map(str, _line_numbers(content, old)[:10]))
            raise ToolError(
                "bad_arguments",
                f"{path}: old_text is there {count} times (lines {numbers}): add lines around it"
                " until it is unique, or set replace_all.",
            )
        changed = content.replace(old, new)
        await self._sandbox.write_file(path, changed.encode("utf-8", "surrogateescape"))
        start = content[: content.index(old)].count("\n") + 1
        lines = changed.encode("utf-8", "surrogateescape").decode("utf-8", "replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        last = min(len(lines), start + new.count("\n") + 3, start + 40)
        shown, _ = self._numbered(lines, max(1, start - 3), last)
        times = "1 occurrence" if count == 1 else f"{count} occurrences; the first"
        return f"Replaced {times} in {path}:\n{shown}".rstrip("\n")

    async def _apply_patch(self, arguments: ApplyPatch) -> str:
        # git calls a diff without its last newline corrupt.
        diff = arguments.diff if arguments.diff.endswith("\n") else arguments.diff + "\n"
        await self._sandbox.patch(diff.encode())
        names = re.findall(r"^\+\+\+ (?:b/)?(.+?)\t?$", diff, re.MULTILINE)
        removed = re.findall(r"^--- (?:a/)?(.+?)\t?\n\+\+\+ /dev/null$", diff, re.MULTILINE)
        changed = [name for name in names if name != "/dev/null"]
        parts = [f"changed {', '.join(changed)}"] if changed else []
        parts += [f"removed {', '.join(removed)}"] if removed else []
        return f"Applied: {'; '.join(parts) or 'no change of content'}."


def check_path(path: str) -> None:
    """Raises ToolError for what no file can be called."""
    if "\0" in path:
        raise ToolError("bad_arguments", "A path cannot hold a NUL character.")


def _as_text(path: str, data: bytes) -> tuple[str, list[str]]:
    """The text and remarks on it; ToolError for what is no text."""
    for magic, kind in _IMAGES.items():
        if data.startswith(magic) and not (magic == b"BM" and b"\0" not in data[:64]):
            raise ToolError(
                "refused",
                f"{path} is a {kind} image of {len(data)} bytes; answers hold text only.",
            )
    start = data[:8192]
    odd = sum(byte < 32 and byte not in (8, 9, 10, 12, 13, 27) for byte in start)
    if b"\0" in start or odd > len(start) * 0.1:
        raise ToolError(
            "refused",
            f"{path} is a binary file of {len(data)} bytes; look at it with `xxd`, `file` or"
            " `strings` in the terminal.",
        )
    notes = []
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        notes.append(f"not UTF-8 from byte {error.start} on")
    if b"\r\n" in start:
        notes.append("lines end with \\r\\n")
    return text, notes


def _short(line: str) -> str:
    line = line.removesuffix("\r")
    if len(line) <= MAX_LINE_CHARS:
        return line
    return f"{line[:MAX_LINE_CHARS]}[... {len(line) - MAX_LINE_CHARS} more characters]"


def _line_numbers(content: str, old: str) -> list[int]:
    numbers = []
    at = content.find(old)
    while at >= 0:
        numbers.append(content.count("\n", 0, at) + 1)
        at = content.find(old, at + len(old))
    return numbers


def _near_miss(content: str, old: str) -> str:
    """Where the file has nearly that text, and how it differs."""
    if "\r\n" in content and content.replace("\r\n", "\n").count(old.replace("\r\n", "\n")):
        return "It would be with \\r\\n at the ends of lines, as this file has."
    wanted = old.strip("\n").split("\n")
    lines = content.split("\n")
    loose = [" ".join(line.split()) for line in lines]
    loosely = [" ".join(line.split()) for line in wanted]
    starts = [
        at
        for at in range(len(lines) - len(wanted) + 1)
        if loose[at : at + len(wanted)] == loosely and any(loosely)
    ]
    if starts:
        numbers = ", ".join(str(at + 1) for at in starts[:10])
        first = lines[starts[0] : starts[0] + min(len(wanted), 10)]
        text = "\n".join(_short(line) for line in first)
        return f"Only white space differs at line {numbers}; the file has:\n{text}"
    if len(content) > _NEAR_MISS_BYTES:
        return "Read the part again and copy it."
    # The text may be a part of its line, so each line is compared at the text's length as well.
    key = max(loosely, key=len)[:500]
    parts = [line[:500] for line in loose] + [line[: len(key)] for line in loose]
    close = difflib.get_close_matches(key, parts, n=1, cutoff=0.6)
    if not close:
        return "Nothing in the file is near it: read the file, or look for the text with grep."
    number = parts.index(close[0]) % len(lines)
    return f"The nearest line is {number + 1}:\n{_short(lines[number])}"
