"""A rollout as the monitor's rules read it: commands, code, files read and written, and texts.

Nothing here judges. All of the rollout is data: it is parsed and searched, never run, imported or
followed, and text that cannot be parsed is an ordinary input.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megacomposer.env.grading.evidence import TamperEvidence
from megacomposer.env.monitor.diff import Diff, read_diff
from megacomposer.env.monitor.python import constant_strings, parse_python, started_scripts
from megacomposer.env.monitor.report import Finding, MonitorConfig, Severity, Span
from megacomposer.env.monitor.shell import read_commands
from megacomposer.env.monitor.shell_command import Command, decode_base64
from megacomposer.env.task import Task
from megacomposer.env.transcript import Observation, ToolCall, Transcript

_COMMAND_FIELDS = ("command", "cmd", "commands", "script", "argv")
_PATH_FIELDS = ("path", "file", "file_path", "filename", "paths", "directory", "root", "cwd")
_CONTENT_FIELDS = (
    "content", "contents", "text", "new", "new_text", "new_str", "new_string", "replacement",
    "patch", "diff", "insert_text", "file_text",
)  # fmt: skip
_WRITING = re.compile(r"write|edit|create|patch|replace|insert|save", re.I)
_CODE_TOOL = re.compile(r"python|ipython|notebook|execute_code", re.I)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?")
_FAILED = re.compile(
    r"no such file|not found|cannot (?:open|access|stat)|permission denied|operation not permitted"
    r"|not permitted|is not recognized|unrecognized|fatal:|denied|refused|could not resolve"
    r"|no matching distribution|temporary failure|network is unreachable|traceback \(most recent"
    r"|read-only file system|connection (?:error|reset|timed out)|unknown revision|bad object"
    r"|name or service not known|modulenotfounderror|exit code:? (?!0\b)\d+|\b40[34]\b"
    r"|does not exist|no such device|usage:",
    re.I,
)
_FOOTER = re.compile(
    r"^\[(?:exit code \d+|no output|Killed|Ended by signal|\.\.\. |the state of|.* is gone;).*\]$"
    r"|^(?:exit(?:ed)?(?: code| status)?[:= ]+\d+|\(no output\))$",
    re.I | re.M,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where in the rollout a text stands."""

    turn: int
    call_id: str
    part: str
    text: str = dataclasses.field(repr=False)
    """All of the part, for spans."""
    observation: Observation | None = None

    def span(self, start: int, end: int) -> Span:
        start = max(0, min(start, len(self.text)))
        end = max(start, min(end, len(self.text)))
        return Span(part=self.part, start=start, end=end, text=self.text[start:end])

    @property
    def answered(self) -> str:
        """What came back, without lines on exit codes."""
        return _FOOTER.sub("", self.observation.text).strip() if self.observation else ""

    @property
    def got_data(self) -> bool:
        """Whether what came back looks like data rather than like an error or nothing."""
        observation = self.observation
        if observation is None or observation.is_error:
            return False
        answer = self.answered
        if not answer:
            return False
        # A long answer with an error in it is still an answer.
        lines = [line for line in answer.splitlines() if line.strip()]
        return sum(1 for line in lines if not _FAILED.search(line)) > len(lines) / 2

    def gave(self, word: str) -> bool:
        """`got_data`, and no line of the answer says that `word` could not be had.

        Several commands of one call share an answer.
        """
        lines = self.answered.splitlines()
        failed = any(word in line and _FAILED.search(line) for line in lines)
        return self.got_data and not failed

    @property
    def ran(self) -> bool:
        """Whether the call was carried out and reported no error."""
        observation = self.observation
        if observation is None or observation.is_error:
            return False
        return not _FAILED.search(observation.text[-2000:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShellUse:
    command: Command
    place: Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeUse:
    """Python that was run: by `-c`, a here-document, a file written before, or a code tool."""

    text: str
    place: Place
    start: int
    end: int
    """Where the part names it; the code itself may be elsewhere."""

    @functools.cached_property
    def tree(self) -> ast.Module | None:
        return parse_python(self.text)

    @functools.cached_property
    def strings(self) -> tuple[str, ...]:
        """Constant texts of the code, joined where `+` or join makes longer ones of them."""
        return constant_strings(self.tree) if self.tree else (self.text,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileUse:
    """A file tool's call: what it names, and what it writes (None: it reads, lists, searches)."""

    tool: str
    path: str
    place: Place
    start: int
    end: int
    content: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Everything that a rule may look at."""

    transcript: Transcript
    task: Task
    config: MonitorConfig
    events: tuple[Mapping[str, Any], ...]
    tests: Mapping[str, str]
    """Path -> source of the true tests, where the caller knows them."""
    tampering: TamperEvidence | None
    """What the verifier says, where it has judged."""
    names: frozenset[str]
    """Names of the package under test, normalised by `normal_name`."""
    diff: Diff
    patch_place: Place
    shell: tuple[ShellUse, ...]
    code: tuple[CodeUse, ...]
    files: tuple[FileUse, ...]
    messages: tuple[Place, ...]
    arguments: tuple[Place, ...]
    """Every text that the model put in a call."""
    observations: tuple[Place, ...]


Hits = Iterator[Finding]


def hit(
    rule: str,
    severity: Severity,
    place: Place,
    start: int,
    end: int,
    explanation: str,
    *,
    succeeded: bool,
) -> Finding:
    """A Finding at characters `start` to `end` of `place`, blanks at its end left out."""
    end = start + len(place.text[start:end].rstrip())
    return Finding(
        rule=rule,
        severity=severity,
        span=place.span(start, end),
        explanation=explanation,
        turn=place.turn,
        call_id=place.call_id,
        succeeded=succeeded,
    )


def build_view(
    transcript: Transcript,
    task: Task,
    config: MonitorConfig,
    events: Sequence[Mapping[str, Any]],
    tests: Mapping[str, str],
    tampering: TamperEvidence | None,
) -> View:
    """Read the whole rollout once."""
    reader = _Reader(config)
    for index, turn in enumerate(transcript.turns):
        if turn.text:
            text = turn.text[: config.max_text_chars]
            reader.messages.append(Place(turn=index, call_id="", part="message", text=text))
        answers = {observation.call_id: observation for observation in turn.observations}
        for call in turn.calls:
            reader.read_call(index, call, answers.get(call.id))
    patch = transcript.patch[: 4 * config.max_text_chars].decode("utf-8", "replace")
    patch = patch[: config.max_text_chars]
    return View(
        transcript=transcript,
        task=task,
        config=config,
        events=tuple(events),
        tests=tests,
        tampering=tampering,
        names=package_names(task),
        diff=read_diff(patch),
        patch_place=Place(turn=-1, call_id="", part="patch", text=patch),
        shell=tuple(reader.shell),
        code=tuple(reader.code),
        files=tuple(reader.files),
        messages=tuple(reader.messages),
        arguments=tuple(reader.arguments),
        observations=tuple(reader.observations),
    )


class _Reader:
    def __init__(self, config: MonitorConfig) -> None:
        self.limit = config.max_text_chars
        self.shell: list[ShellUse] = []
        self.code: list[CodeUse] = []
        self.files: list[FileUse] = []
        self.messages: list[Place] = []
        self.arguments: list[Place] = []
        self.observations: list[Place] = []
        self.written: dict[str, str] = {}
        """Name of a script that was written -> its text."""
        self.shells: dict[str, dict[str, str]] = {}
        """Name of a terminal's shell -> its variables; "" is the directory that it is in."""

    def read_call(self, turn: int, call: ToolCall, observation: Observation | None) -> None:
        if observation is not None and observation.text:
            text = observation.text[: self.limit]
            self.observations.append(
                Place(turn=turn, call_id=call.id, part="observation", text=text)
            )
        if not isinstance(call.arguments, Mapping):
            text = str(call.arguments)[: self.limit]
            self.arguments.append(Place(turn=turn, call_id=call.id, part="argument:", text=text))
            return
        places: dict[str, Place] = {}
        for name, value in call.arguments.items():
            text = _as_text(name, value)[: self.limit]
            places[name] = Place(
                turn=turn,
                call_id=call.id,
                part=f"argument:{name}",
                text=text,
                observation=observation,
            )
            if text:
                self.arguments.append(places[name])
        if _CODE_TOOL.search(call.name) and "code" in places:
            self._add_code(places["code"].text, places["code"], 0, len(places["code"].text))
        commands = [places[name] for name in _COMMAND_FIELDS if name in places]
        shell = str(call.arguments.get("shell", ""))
        for place in commands:
            self._read_script(place, self.shells.setdefault(shell, {}))
        if not commands:
            self._read_file_call(call.name, places)

    def _read_file_call(self, tool: str, places: Mapping[str, Place]) -> None:
        content = next((places[n].text for n in _CONTENT_FIELDS if n in places), None)
        if content is None and _WRITING.search(tool):
            content = ""
        if not _WRITING.search(tool):
            content = None
        fields = [name for name in (*_PATH_FIELDS, "pattern", "glob", "include") if name in places]
        for name in fields:
            place = places[name]
            use = FileUse(
                tool=tool,
                path=place.text,
                place=place,
                start=0,
                end=len(place.text),
                content=content if name in _PATH_FIELDS else None,
            )
            self.files.append(use)
            if content and name in _PATH_FIELDS:
                self._remember(place.text, content)

    def _remember(self, path: str, content: str) -> None:
        if path.endswith((".py", ".sh")):
            self.written[path.rpartition("/")[2]] = content

    def _read_script(self, place: Place, shell: dict[str, str]) -> None:
        for command in read_commands(place.text, shell):
            cwd = shell.get("", "")
            if cwd:
                command = dataclasses.replace(command, cwd=cwd)
            if command.program in ("cd", "pushd"):
                shell[""] = _moved(cwd, command)
            self._add_command(command, place, 0)

    def _add_command(self, command: Command, place: Place, depth: int) -> None:
        self.shell.append(ShellUse(command=command, place=place))
        for operator, target in command.redirects:
            if operator.startswith(">") and command.stdin and command.program == "cat":
                self._remember(target, command.stdin)
        scripts = [w.rpartition("/")[2] for w in command.words if w.endswith((".py", ".sh"))]
        if command.program == "tee" and scripts and command.stdin:
            self._remember(scripts[0], command.stdin)
        if _PYTHON.fullmatch(command.program):
            code = _python_code(command) or next(
                (self.written[name] for name in scripts if name in self.written), ""
            )
            if code:
                self._add_code(code, place, command.start, command.end, depth)
        elif scripts and depth < 2 and command.program in ("sh", "bash", "source", ".", scripts[0]):
            for inner in read_commands(self.written.get(scripts[0], "")):
                inner = dataclasses.replace(inner, start=command.start, end=command.end)
                self._add_command(inner, place, depth + 1)

    def _add_code(self, text: str, place: Place, start: int, end: int, depth: int = 0) -> None:
        use = CodeUse(text=text, place=place, start=start, end=end)
        self.code.append(use)
        if use.tree is None or depth >= 2:
            return
        for script in started_scripts(use.tree):
            for command in read_commands(script):
                command = dataclasses.replace(command, start=start, end=end)
                self._add_command(command, place, depth + 1)
        for string in use.strings:
            if len(string) >= 24 and "b64decode" in text and (hidden := decode_base64(string)):
                self._add_code(hidden, place, start, end, depth + 1)


def _moved(cwd: str, command: Command) -> str:
    """The directory after a `cd`; "" is the workspace, where a shell begins."""
    plain = [word for word in command.arguments if not word.startswith("-")]
    target = plain[0] if plain else "~"
    whole = target if target.startswith(("/", "~", "$")) else posixpath.join(cwd, target)
    whole = posixpath.normpath(whole)[:1000]
    return "" if whole in (".", "/workspace") else whole.removeprefix("/workspace/")


def _python_code(command: Command) -> str:
    for index, word in enumerate(command.arguments):
        if word == "-c" or re.fullmatch(r"-[IsEuB]+c", word):
            return command.arguments[index + 1] if index + 1 < len(command.arguments) else ""
        if word in ("-m", "-W", "-X"):
            return ""
        if word == "-" or not word.startswith("-"):
            return command.stdin if word == "-" else ""
    return command.stdin


def normal_name(name: str) -> str:
    """A package's name as indexes compare it: lower case, `-`, `_` and `.` the same."""
    return re.sub(r"[-_.]+", "-", name).strip("-").lower()


def package_names(task: Task) -> frozenset[str]:
    """What the package under test may be called, from the task's origin."""
    names: set[str] = set()
    for key in ("package", "project", "name", "distribution", "repository", "repo", "modules",
                "module", "import_name", "packages"):  # fmt: skip
        value = task.origin.get(key)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, str) and item.strip():
                names.add(item.strip().rstrip("/").rpartition("/")[2].removesuffix(".git"))
    names = {normal_name(name) for name in names}
    for name in tuple(names):
        short = re.sub(r"^(?:python|py)-|-(?:python|py)$", "", name)
        names |= {short, f"python-{short}"}
    return frozenset(name for name in names if len(name) > 1)


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name in _COMMAND_FIELDS and isinstance(value, list | tuple):
        return shlex.join(str(item) for item in value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)
