"""A small reader of shell scripts, for the monitor: which commands would run, on which words.

It knows quoting, operators, subshells, substitutions, here-documents, redirections, assignments and
the usual wrappers (`env`, `timeout`, `xargs`, `find -exec`, `bash -c`, `eval`, a decoded pipe into
a shell). It runs nothing, expands only variables that the same script sets to plain text, and never
raises: what it cannot read is kept as plain words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from megacomposer.env.monitor.shell_command import Command, fill_pipes, known_output

_DEPTH = 5
_MAX_COMMANDS = 20_000
_MAX_VALUE_CHARS = 4096
_MAX_EXPANDED_CHARS = 1 << 20
"""Bounds of one script, against scripts that are made to grow."""
_KEYWORDS = frozenset(
    ("{", "}", "!", "if", "then", "elif", "else", "fi", "do", "done", "while", "until", "for")
    + ("case", "esac", "function", "time", "select", "in")
)
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[;&|()\n]")
_REDIRECT = re.compile(r"(?:\d+|&)?(?:>>|>\||>&|<<<|<<-|<<|<&|<>|<|>)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.S)
_PLAIN = re.compile(r"[^\s'\"\\$`;&|()<>]+")
_SHELLS = frozenset(["sh", "bash", "dash", "zsh", "ksh", "ash"])
_WRAPPERS: Mapping[str, str] = {
    "env": "uCS", "sudo": "ugpC", "nice": "n", "nohup": "", "timeout": "ks", "stdbuf": "ioe",
    "command": "", "builtin": "", "exec": "a", "xargs": "IndPLsEa", "setsid": "", "ionice": "cn",
    "watch": "n", "strace": "eops", "time": "fo", "doas": "u", "busybox": "", "parallel": "jN",
}  # fmt: skip
"""Program that runs the rest of its words -> its one-letter options that take a value."""
_RUNNERS = frozenset({("uv", "run"), ("poetry", "run"), ("pipenv", "run"), ("conda", "run")})


def read_commands(script: str, variables: dict[str, str] | None = None) -> list[Command]:
    """The simple commands of `script`, in order, inner ones after the outer one that holds them.

    `variables` are known from before, and gets those that the script sets.
    """
    return _Reader(script, {} if variables is None else variables, 0, 0).read()


class _Reader:
    def __init__(self, text: str, variables: dict[str, str], base: int, depth: int) -> None:
        self.text, self.variables, self.base, self.depth = text, variables, base, depth
        self.at = 0
        self.words: list[str] = []
        self.start = -1
        self.redirects: list[tuple[str, str]] = []
        self.heredocs: list[tuple[str, bool]] = []
        self.stdin = ""
        self.inner: list[Command] = []
        self.commands: list[Command] = []
        self.before, self.pipeline = "", 0
        self.pending: list[int] = []
        self.outer: list[int] = []
        """Which of `commands` are this text's own, and not a substitution's."""
        self.room = _MAX_EXPANDED_CHARS

    def read(self) -> list[Command]:
        text = self.text
        while self.at < len(text) and len(self.commands) < _MAX_COMMANDS:
            character = text[self.at]
            if character in " \t\r":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif character == "#":
                self.at = _index(text, "\n", self.at)
            elif match := _REDIRECT.match(text, self.at):
                if text.startswith("(", match.end()) and match[0] in "<>":
                    self._word()  # process substitution
                else:
                    self._redirect(match)
            elif match := _OPERATOR.match(text, self.at):
                self._operator(match[0])
            else:
                self._word()
        self._finish("")
        fill_pipes(self.commands, self.outer)
        return [inner for command in self.commands for inner in _unwrap(command, self.depth)]

    def _operator(self, operator: str) -> None:
        self.at += len(operator)
        if operator == "(" and len(self.words) == 1 and self.text[self.at : self.at + 1] == ")":
            self.words = ["function", self.words[0]]
            self.at += 1
        end = self.at - len(operator)
        self._finish(operator, end)
        if operator == "\n" and self.heredocs:
            self._read_heredocs()

    def _finish(self, operator: str, end: int | None = None) -> None:
        end = len(self.text) if end is None else end
        words, env = list(self.words), {}
        while words and words[0] in _KEYWORDS and not (words[0] == "function" and len(words) == 2):
            keyword = words.pop(0)
            if keyword in ("for", "select") and len(words) > 2 and words[1] == "in":
                self._set(words[0], " ".join(words[2:]))
                words = []
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            env[match[1]] = match[2]
            words.pop(0)
        if words and words[0] in ("export", "declare", "local", "readonly"):
            for word in words[1:]:
                if match := _ASSIGNMENT.fullmatch(word):
                    self._set(match[1], match[2])
        if words or self.redirects or env:
            if not words:
                for name, value in env.items():
                    self._set(name, value)
            command = Command(
                words=tuple(words) or (":",),
                start=self.base + max(self.start, 0),
                end=self.base + max(end, 0),
                env=env,
                redirects=tuple(self.redirects),
                stdin=self.stdin,
                before=self.before,
                pipeline=self.pipeline,
            )
            if self.heredocs:
                self.pending.append(len(self.commands))
            self.outer.append(len(self.commands))
            self.commands.append(command)
        self.commands += self.inner
        if operator not in ("|", "|&"):
            self.pipeline += 1
        self.before = "|" if operator == "|&" else operator
        self.words, self.redirects, self.inner, self.stdin, self.start = [], [], [], "", -1

    def _redirect(self, match: re.Match[str]) -> None:
        operator = match[0].lstrip("0123456789")
        if self.start < 0:
            self.start = self.at
        self.at = match.end()
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        raw = self.at
        target = self._read_word() if self.at < len(self.text) else ""
        if operator in ("<<", "<<-"):
            quoted = any(mark in self.text[raw : self.at] for mark in "'\"\\")
            self.heredocs.append((target, quoted))
        elif operator == "<<<":
            self.stdin = target
        else:
            self.redirects.append((operator.lstrip("&"), target))

    def _read_heredocs(self) -> None:
        for index, (mark, _) in enumerate(self.heredocs):
            lines = []
            while self.at < len(self.text):
                stop = _index(self.text, "\n", self.at)
                line = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if line.strip() == mark:
                    break
                lines.append(line)
            if index < len(self.pending):
                place = self.pending[index]
                body = "\n".join(lines)
                self.commands[place] = dataclasses.replace(self.commands[place], stdin=body)
        self.heredocs, self.pending = [], []

    def _word(self) -> None:
        if self.start < 0:
            self.start = self.at
        before = self.at
        word = self._read_word()
        if self.at == before:  # a character that no rule takes: keep it, and go on
            word, self.at = self.text[before], before + 1
        self.words.append(word)

    def _read_word(self) -> str:
        parts, text = [], self.text
        while self.at < len(text):
            if match := _PLAIN.match(text, self.at):
                parts.append(match[0])
                self.at = match.end()
                continue
            character = text[self.at]
            if character == "\\":
                escaped = text[self.at + 1 : self.at + 2]
                parts.append("" if escaped == "\n" else escaped)
                self.at += 2
            elif character == "'":
                stop = _index(text, "'", self.at + 1)
                parts.append(text[self.at + 1 : stop])
                self.at = stop + 1
            elif character == '"':
                self.at += 1
                parts.append(self._read_quoted())
            elif character in "$`" or (
                character in "<>" and text[self.at + 1 : self.at + 2] == "("
            ):
                parts.append(self._read_expansion())
            else:
                break
        return "".join(parts)

    def _read_quoted(self) -> str:
        parts, text = [], self.text
        while self.at < len(text) and text[self.at] != '"':
            if text[self.at] == "\\" and text[self.at + 1 : self.at + 2] in (
                '"',
                "\\",
                "$",
                "`",
                "\n",
            ):
                parts.append(text[self.at + 1 : self.at + 2].replace("\n", ""))
                self.at += 2
            elif text[self.at] in "$`":
                parts.append(self._read_expansion())
            else:
                stop = self.at + 1
                while stop < len(text) and text[stop] not in '"\\$`':
                    stop += 1
                parts.append(text[self.at : stop])
                self.at = stop
        self.at += 1
        return "".join(parts)

    def _read_expansion(self) -> str:
        text, begin = self.text, self.at
        if text[begin] == "`":
            stop = _index(text, "`", begin + 1)
            self.at = stop + 1
            return self._substitute(begin + 1, stop)
        if text.startswith("$((", begin):
            self.at = min(_closing(text, begin + 1) + 1, len(text))
            return text[begin : self.at]
        if text[begin + 1 : begin + 2] == "(":
            stop = _closing(text, begin + 1)
            self.at = stop + 1
            return self._substitute(begin + 2, stop)
        if text.startswith("${", begin):
            self.at = min(_index(text, "}", begin) + 1, len(text))
            raw = text[begin : self.at]
            name = _NAME.match(raw, 2)
            return self._get(name[0], raw) if name else raw
        if text.startswith("$'", begin):
            stop = _index(text, "'", begin + 2)
            self.at = stop + 1
            return _unescape(text[begin + 2 : stop])
        name = _NAME.match(text, begin + 1)
        self.at = name.end() if name else begin + 1
        return self._get(name[0], f"${name[0]}") if name else "$"

    def _set(self, name: str, value: str) -> None:
        self.variables[name] = value[:_MAX_VALUE_CHARS]

    def _get(self, name: str, raw: str) -> str:
        value = self.variables.get(name)
        if value is None or len(value) > self.room:
            return raw
        self.room -= len(value)
        return value

    def _substitute(self, start: int, stop: int) -> str:
        """Read the commands of a substitution; its text where that is known, else as written."""
        raw = self.text[start:stop]
        if self.depth >= _DEPTH:
            return raw
        reader = _Reader(raw, dict(self.variables), self.base + start, self.depth + 1)
        inner = reader.read()
        self.inner += inner
        known = known_output(inner[-1], inner[-1].stdin) if inner else None
        return known.rstrip("\n") if known is not None else f"$({raw})"


def _unwrap(command: Command, depth: int) -> Iterator[Command]:
    """The command, what its wrappers run, and the script that it gives to a shell."""
    yield command
    if depth >= _DEPTH or not command.words[0]:
        return
    inner = _wrapped(command)
    if inner is not None:
        yield from _unwrap(inner, depth + 1)
        return
    script = _shell_script(command)
    if script:
        for nested in _Reader(script, {}, 0, depth + 1).read():
            yield dataclasses.replace(
                nested,
                start=command.start,
                end=command.end,
                via=(*command.via, command.program, *nested.via),
                decoded=nested.decoded or command.decoded,
            )


def _wrapped(command: Command) -> Command | None:
    words = command.words
    if command.program == "find":
        for index, word in enumerate(words):
            if word in ("-exec", "-execdir", "-ok") and index + 1 < len(words):
                inner = tuple(w for w in words[index + 1 :] if w not in (";", "+"))
                if not inner:
                    return None
                return dataclasses.replace(command, words=inner, via=(*command.via, "find"))
        return None
    if words[:2] in _RUNNERS:
        rest = list(words[2:])
        valued = "npm"
    elif command.program in _WRAPPERS:
        rest = list(words[1:])
        valued = _WRAPPERS[command.program]
    else:
        return None
    env = dict(command.env)
    while rest:
        if rest[0] in ("-v", "-V") and command.program == "command":
            return None
        if rest[0] == "--":
            rest.pop(0)
            break
        if match := _ASSIGNMENT.fullmatch(rest[0]):
            env[match[1]] = match[2]
        elif not rest[0].startswith("-"):
            break
        elif len(rest[0]) == 2 and rest[0][1] in valued and len(rest) > 1:
            rest.pop(0)
        rest.pop(0)
    if command.program == "timeout" and rest:
        rest.pop(0)
    if not rest or not rest[0]:
        return None
    return dataclasses.replace(
        command, words=tuple(rest), env=env, via=(*command.via, command.program)
    )


def _shell_script(command: Command) -> str:
    """The text that a shell or `eval` would run, or ""."""
    if command.program == "eval":
        return " ".join(command.arguments)
    if command.program not in _SHELLS:
        return ""
    for index, word in enumerate(command.arguments):
        if re.fullmatch(r"-[a-z]*c", word):
            return command.arguments[index + 1] if index + 1 < len(command.arguments) else ""
        if not word.startswith("-"):
            return ""  # a script file
    return command.stdin


def _unescape(text: str) -> str:
    r"""Escapes of `$'...'`: \xHH, \n, \t, octal."""

    def one(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] == "x":
            return chr(int(code[1:], 16))
        if code[0].isdigit():
            return chr(int(code, 8))
        return {"n": "\n", "t": "\t"}.get(code, code)

    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", one, text, flags=re.S)


def _index(text: str, mark: str, start: int) -> int:
    at = text.find(mark, start)
    return at if at >= 0 else len(text)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, or the end."""
    level, at, quote = 0, start, ""
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "(":
            level += 1
        elif character == ")":
            level -= 1
            if not level:
                return at
        at += 1
    return len(text)
