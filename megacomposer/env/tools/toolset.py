"""The agent's tools over one sandbox, behind one call.

    tools = await ToolSet(sandbox, task.tools, tests=task.tests, record=audit.record).start()
    observation = await tools.call(ToolCall(id="1", name="read", arguments={"path": "setup.py"}))
    observations = await tools.call_all(turn.calls)

Whatever a model writes as a call, the answer is an Observation. Only a failure of the
infrastructure (SandboxError) is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Self

from msgspec import Meta

from megacomposer.env.audit import Record, discard
from megacomposer.env.sandbox import (
    WORKDIR,
    PatchRejectedError,
    Sandbox,
    SandboxError,
    SandboxFileError,
)
from megacomposer.env.task import TestPlan
from megacomposer.env.tools.files import FileTools
from megacomposer.env.tools.find import FindTools
from megacomposer.env.tools.observation_text import OBSERVATION_BYTES, clip_end, clip_middle
from megacomposer.env.tools.run_tests import TestRunner
from megacomposer.env.tools.schema import Arguments, Tool, ToolError, decode_arguments, nearest
from megacomposer.env.tools.search_index import Embedder, SearchIndex
from megacomposer.env.tools.terminal import Terminal
from megacomposer.env.tools.todo import TodoList
from megacomposer.env.transcript import Observation, ToolCall

TOOL_NAMES = (
    "read",
    "write",
    "edit",
    "apply_patch",
    "list",
    "glob",
    "grep",
    "terminal",
    "run_tests",
    "semantic_search",
    "todo",
    "finish",
)
"""All tools, in the order in which they are shown."""
MIN_OBSERVATION_BYTES = 1000

_FILE_ERRORS = {
    "ENOENT": ("not_found", ""),
    "ENOTDIR": ("not_found", "a part of the path is a file"),
    "EISDIR": ("bad_arguments", "it is a directory; use list"),
    "EFBIG": ("limit", "use a smaller file"),
    "ENOSPC": ("limit", "the disk quota is used up; delete files"),
    "EDQUOT": ("limit", "the disk quota is used up; delete files"),
    "ENAMETOOLONG": ("bad_arguments", "use a shorter name"),
    "EACCES": ("refused", f"only files below {WORKDIR}, HOME and /tmp may be written"),
    "EPERM": ("refused", f"only files below {WORKDIR}, HOME and /tmp may be written"),
    "EROFS": ("refused", f"only files below {WORKDIR}, HOME and /tmp may be written"),
    "ELOOP": ("refused", "it is a loop of links"),
    "EINVAL": ("refused", "only regular files can be read and written"),
}
"""errno -> kind of the observation, and a remedy."""


class Finish(Arguments, frozen=True, kw_only=True):
    message: Annotated[
        str, Meta(max_length=20_000, description="What was done, for the one who asked.")
    ] = ""


class ToolSet:
    """The tools of one rollout. `names` are the allowed ones; () is all that the task can have.

    Raises ValueError where `names` has an unknown one, or run_tests without `tests`.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        names: Sequence[str] = (),
        *,
        tests: TestPlan | None = None,
        record: Record = discard,
        embedder: Embedder | None = None,
        observation_bytes: int = OBSERVATION_BYTES,
    ) -> None:
        _check_names(names, tests)
        if observation_bytes < MIN_OBSERVATION_BYTES:
            raise ValueError(f"observation_bytes must be at least {MIN_OBSERVATION_BYTES}")
        self.sandbox = sandbox
        self.finish_message: str | None = None
        """What the agent said at `finish`; None: it has not called it."""
        self._names, self._tests, self._embedder = tuple(names), tests, embedder
        self._record, self._observation_bytes = record, observation_bytes
        self._todo = TodoList()
        self._order = _Order()
        self._programs_found = False
        self._find = FindTools(sandbox)
        size = observation_bytes
        parts: list[tuple[Tool, ...]] = [
            FileTools(sandbox, observation_bytes=size).tools(),
            self._find.tools(),
            Terminal(sandbox, observation_bytes=size).tools(),
            TestRunner(sandbox, tests, observation_bytes=size).tools() if tests else (),
            SearchIndex(sandbox, embedder=embedder).tools(),
            self._todo.tools(),
            (self._finish_tool(),),
        ]
        every = {tool.name: tool for part in parts for tool in part}
        wanted = set(names or TOOL_NAMES)
        self.tools = {name: every[name] for name in TOOL_NAMES if name in every.keys() & wanted}
        """By name, in the order of TOOL_NAMES."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of every tool: `{"type": "function", "function": {name, description, parameters}}`."""
        return [tool.schema for tool in self.tools.values()]

    @property
    def finished(self) -> bool:
        """The agent has called `finish`; all later calls are refused."""
        return self.finish_message is not None

    def unfinished_todos(self) -> tuple[str, ...]:
        """To-do items that are neither done nor dropped."""
        return self._todo.unfinished

    async def start(self) -> Self:
        """Look for the programs that the tools need, once. SandboxError names a missing one."""
        if self._programs_found:
            return self
        needed: dict[str, str] = {}
        for tool in self.tools.values():
            for program in tool.programs:
                needed.setdefault(program, tool.name)
        found = await asyncio.gather(*(self._has_program(program) for program in needed))
        for (program, tool_name), is_there in zip(needed.items(), found, strict=True):
            if not is_there:
                raise SandboxError(
                    f"the sandbox has no {program}, which the tool {tool_name} needs: install it in"
                    " the image, or leave the tool out of the task's tools"
                )
        self._programs_found = True
        return self

    async def _has_program(self, program: str) -> bool:
        try:
            await self.sandbox.exec([program, "--version"], timeout_s=30.0)
        except SandboxFileError:
            return False
        return True

    def fork(self, sandbox: Sandbox) -> ToolSet:
        """The same tools over a fork of the sandbox, with the to-do list as it is now."""
        twin = ToolSet(
            sandbox,
            self._names,
            tests=self._tests,
            record=self._record,
            embedder=self._embedder,
            observation_bytes=self._observation_bytes,
        )
        twin._todo.items = self._todo.items
        twin.finish_message = self.finish_message
        twin._programs_found = self._programs_found
        return twin

    async def call(self, call: ToolCall) -> Observation:
        """Run one call. Calls that only read run together, others alone, in order of arrival."""
        await self.start()
        tool = self.tools.get(call.name)
        async with self._order.turn(shared=tool is not None and tool.reads_only):
            try:
                text = await self._run(call.name, tool, call.arguments)
            except ToolError as error:
                return self._refusal(call, error.kind, error.text)
            except PatchRejectedError as error:
                text = f"The patch does not apply; nothing was changed. git says: {error}"
                return self._refusal(call, "failed", text)
            except SandboxFileError as error:
                kind, remedy = await self._explain(error)
                text = f"{error}{f' ({remedy})' if remedy else ''}"
                return self._refusal(call, kind, text)
        return Observation(call_id=call.id, text=clip_middle(text, self._observation_bytes))

    async def call_all(self, calls: Sequence[ToolCall]) -> tuple[Observation, ...]:
        """Run the calls of one turn; the answers are in their order, and the effects too."""
        await self.start()
        results = await asyncio.gather(*(self.call(c) for c in calls), return_exceptions=True)
        observations = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            observations.append(result)
        return tuple(observations)

    async def _run(self, name: str, tool: Tool | None, arguments: Mapping[str, Any] | str) -> str:
        if self.finished:
            raise ToolError("refused", "The work was finished before; no more calls are taken.")
        if tool is None:
            meant = nearest(name, self.tools)
            hint = f"did you mean {meant}? " if meant else ""
            text = f"There is no tool {name[:100]!r}: {hint}The tools are {', '.join(self.tools)}."
            raise ToolError("unknown_tool", text)
        return await tool.run(decode_arguments(tool, arguments))

    async def _explain(self, error: SandboxFileError) -> tuple[str, str]:
        kind, remedy = _FILE_ERRORS.get(error.code, ("failed", ""))
        if error.code == "ENOENT" and "rg" in {p for t in self.tools.values() for p in t.programs}:
            remedy = await self._find.suggestion(error.path)
        return kind, remedy

    def _refusal(self, call: ToolCall, kind: str, text: str) -> Observation:
        if kind == "refused":
            self._record(
                "refused", sandbox=self.sandbox.id, tool=call.name[:100], reason=text[:500]
            )
        clip = clip_middle if kind in ("timeout", "limit", "failed") else clip_end
        return Observation(
            call_id=call.id,
            text=clip(text, self._observation_bytes),
            is_error=True,
            error_kind=kind,
        )

    def _finish_tool(self) -> Tool:
        async def run(arguments: Finish) -> str:
            self.finish_message = arguments.message
            left = self.unfinished_todos()
            return f"Finished; {len(left)} to-do items were left open." if left else "Finished."

        return Tool(
            name="finish",
            description="Say that the work is done. It is the last call.",
            arguments=Finish,
            run=run,
        )


class _Order:
    """Turns in order of arrival: shared ones together, others alone."""

    def __init__(self) -> None:
        self._exclusive: asyncio.Future[None] | None = None
        self._shared: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def turn(self, *, shared: bool) -> AsyncIterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = [self._exclusive] if self._exclusive else []
        if shared:
            self._shared = [other for other in self._shared if not other.done()] + [done]
        else:
            before += self._shared
            self._exclusive, self._shared = done, []
        before = [other for other in before if not other.done()]
        try:
            if before:
                await asyncio.wait(before)
            yield
        finally:
            # A turn that is cancelled while it waits passes its place on, not the next one's.
            waiting = [other for other in before if not other.done()]
            if waiting:
                asyncio.gather(*waiting).add_done_callback(lambda _: done.set_result(None))
            else:
                done.set_result(None)


def _check_names(names: Sequence[str], tests: TestPlan | None) -> None:
    for name in names:
        if name not in TOOL_NAMES:
            raise ValueError(f"tools: there is no {name!r}; known: {', '.join(TOOL_NAMES)}")
    if "run_tests" in names and tests is None:
        raise ValueError("tools: run_tests needs the task's TestPlan; pass tests=")
