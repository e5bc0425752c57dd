"""The tools that look over many files: list, glob, grep. All run inside the sandbox."""

from __future__ import annotations

import posixpath
from typing import Annotated, Literal

from msgspec import Meta

from megacomposer.env.sandbox import WORKDIR, ExecResult, Sandbox, Status
from megacomposer.env.tools.files import Path, check_path
from megacomposer.env.tools.observation_text import ending
from megacomposer.env.tools.schema import Arguments, Tool, ToolError

RIPGREP = ("rg", "--no-config", "--no-messages", "--hidden", "--color=never", "--sort=path")
"""Hidden files are part of a repository; .git is left out by the last --glob."""
NO_GIT = "--glob=!.git"
_TIMEOUT_S = 60.0
_MAX_COLUMNS = 400

Ignored = Annotated[bool, Meta(description="Also files that .gitignore leaves out.")]


class ListFiles(Arguments, frozen=True, kw_only=True):
    path: Path = "."
    depth: Annotated[int, Meta(ge=1, le=8, description="Levels of directories.")] = 1
    limit: Annotated[int, Meta(ge=1, le=2000, description="Entries at most.")] = 500


class Glob(Arguments, frozen=True, kw_only=True):
    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=1000,
            description="As in .gitignore: `*.py` at any depth, `src/**/test_*.py`, `{a,b}.md`.",
        ),
    ]
    path: Path = "."
    ignored: Ignored = False
    limit: Annotated[int, Meta(ge=1, le=2000, description="Files at most.")] = 500


class Grep(Arguments, frozen=True, kw_only=True):
    pattern: Annotated[
        str, Meta(min_length=1, max_length=10_000, description="A regular expression (ripgrep).")
    ]
    path: Path = "."
    glob: Annotated[
        str, Meta(max_length=1000, description="Only files that match, such as `*.py`.")
    ] = ""
    file_type: Annotated[
        str,
        Meta(max_length=40, pattern="^[a-z0-9+-]*$", description="Such as `py`, `js`, `cpp`."),
    ] = ""
    context: Annotated[int, Meta(ge=0, le=20, description="Lines around each match.")] = 0
    literal: Annotated[bool, Meta(description="The pattern is plain text.")] = False
    ignore_case: bool = False
    multiline: Annotated[bool, Meta(description="A match may span lines.")] = False
    output: Annotated[
        Literal["lines", "files", "counts"],
        Meta(description="The lines, the files' names, or the number of matching lines a file."),
    ] = "lines"
    ignored: Ignored = False
    limit: Annotated[int, Meta(ge=1, le=2000, description="Lines of output at most.")] = 200


class FindTools:
    """The three tools over one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                name="list",
                description="List a directory: directories end with /, files have their size in"
                " bytes, links show their target. The inside of .git is left out.",
                arguments=ListFiles,
                run=self._list,
                reads_only=True,
                programs=("find",),
            ),
            Tool(
                name="glob",
                description="Find files by name, sorted by path. Directories are not listed.",
                arguments=Glob,
                run=self._glob,
                reads_only=True,
                programs=("rg", "stat"),
            ),
            Tool(
                name="grep",
                description="Search the content of files with ripgrep. Lines come as"
                " path:line:text, context as path-line-text.",
                arguments=Grep,
                run=self._grep,
                reads_only=True,
                programs=("rg", "stat"),
            ),
        )

    async def _list(self, arguments: ListFiles) -> str:
        path = operand(arguments.path)
        # -H: a link that is named is followed, links inside are not.
        command = ["find", "-H", path, "-maxdepth", str(arguments.depth)]
        command += ["-printf", r"%y\0%s\0%P\0%l\0", "-name", ".git", "-prune"]
        result = await self._run(command)
        if result.exit_code and not result.stdout:
            raise await self._missing(arguments.path, result)
        fields = _text(result.stdout).split("\0")
        rows = list(zip(*(fields[column::4] for column in range(4)), strict=False))
        if rows and rows[0][0] == "l":
            raise ToolError("not_found", f"{arguments.path} is a link to nothing.")
        if rows and rows[0][0] != "d":
            raise ToolError("bad_arguments", f"{arguments.path} is a file; use read.")
        entries = sorted((row for row in rows if row[2]), key=lambda row: row[2].split("/"))
        if not entries:
            return f"[{arguments.path} is empty]"
        shown = "\n".join(_entry(row) for row in entries[: arguments.limit])
        return shown + _rest(len(entries), arguments.limit, "entries")

    async def _glob(self, arguments: Glob) -> str:
        command = [*RIPGREP, "--files", f"--glob={arguments.pattern}", NO_GIT]
        command += ["--no-ignore"] if arguments.ignored else []
        result = await self._run([*command, "--", operand(arguments.path)])
        names = [posixpath.normpath(name) for name in _text(result.stdout).splitlines()]
        if not names:
            await self._check(arguments.path, result)
            return f"No file matches {arguments.pattern}."
        shown = "\n".join(names[: arguments.limit])
        return shown + _rest(len(names), arguments.limit, "files")

    async def _grep(self, arguments: Grep) -> str:
        command = [*RIPGREP, "--line-number", "--with-filename", "--no-heading"]
        command += [f"--max-columns={_MAX_COLUMNS}", "--max-columns-preview"]
        command += [f"--context={arguments.context}"] if arguments.context else []
        command += [f"--type={arguments.file_type}"] if arguments.file_type else []
        command += [f"--glob={arguments.glob}"] if arguments.glob else []
        flags = {
            "--fixed-strings": arguments.literal,
            "--ignore-case": arguments.ignore_case,
            "--multiline": arguments.multiline,
            "--no-ignore": arguments.ignored,
            "--files-with-matches": arguments.output == "files",
            "--count": arguments.output == "counts",
        }
        command += [flag for flag, is_set in flags.items() if is_set]
        command += [NO_GIT, f"--regexp={arguments.pattern}", "--", operand(arguments.path)]
        result = await self._run(command)
        lines = _text(result.stdout).splitlines()
        if not lines:
            await self._check(arguments.path, result)
            return "No match."
        lines = [line.removeprefix("./") for line in lines]
        cut = (
            "\n[ripgrep was stopped: too much output]" if result.status is not Status.EXITED else ""
        )
        rest = _rest(len(lines), arguments.limit, "lines")
        return "\n".join(lines[: arguments.limit]) + rest + cut

    async def _run(self, command: list[str]) -> ExecResult:
        if any("\0" in word for word in command):
            raise ToolError("bad_arguments", "An argument cannot hold a NUL character.")
        result = await self._sandbox.exec(command, timeout_s=_TIMEOUT_S)
        if result.status is Status.TIMEOUT:
            how = ending(result, _TIMEOUT_S, self._sandbox.spec.limits)
            raise ToolError("timeout", f"{command[0]}: {how} Look in a smaller directory.")
        return result

    async def _check(self, path: str, result: ExecResult) -> None:
        """Nothing was found: raise ToolError where that is an error."""
        if result.status is not Status.EXITED:
            how = ending(result, _TIMEOUT_S, self._sandbox.spec.limits)
            raise ToolError("limit", f"{how} Look in a smaller directory.")
        exists = await self._sandbox.exec(["stat", "-L", "--", operand(path)])
        if not exists.ok:
            raise await self._missing(path, exists)
        message = _text(result.stderr).strip()
        # --no-messages keeps unreadable files out of it; what is left is the pattern or the type.
        if result.exit_code == 2 and message:
            raise ToolError("bad_arguments", f"ripgrep refuses the arguments: {message[:1000]}")

    async def _missing(self, path: str, result: ExecResult) -> ToolError:
        message = _text(result.stderr)
        if "Permission denied" in message:
            return ToolError("refused", f"{path}: permission denied.")
        return ToolError("not_found", f"{path} is not there; {await self.suggestion(path)}")

    async def suggestion(self, path: str) -> str:
        """A sentence about files of that name elsewhere in the workspace, for an error."""
        name = posixpath.basename(path.rstrip("/"))
        remedy = f"paths are relative to {WORKDIR} or absolute; use list or glob."
        if not name or "\\" in name or "\0" in name:
            return remedy
        plain = "".join(f"[{char}]" if char in "*?[]{}" else char for char in name)
        command = [*RIPGREP, "--files", f"--iglob=**/{plain}", NO_GIT]
        result = await self._sandbox.exec(command, timeout_s=10.0)
        names = _text(result.stdout).splitlines()[:5]
        return f"did you mean {' or '.join(names)}?" if names else remedy


def operand(path: str) -> str:
    """A path that no program takes for an option."""
    check_path(path)
    return f"./{path}" if path.startswith("-") else path


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _entry(row: tuple[str, ...]) -> str:
    kind, size, name, target = (field.replace("\n", "\\n") for field in row)
    if kind == "d":
        return f"{name}/"
    if kind == "l":
        return f"{name} -> {target}"
    return f"{name}  {size}"


def _rest(count: int, limit: int, what: str) -> str:
    if count <= limit:
        return ""
    return f"\n[{limit} of {count} {what}; narrow it down, or raise limit]"
