"""What all sandboxes with an agent process share: commands, files, patches, limits, the end.

A backend derives from `AgentSandbox`, gives it a link to the agent that it started, and adds
`snapshot`, `fork`, `restore`, `stats` and `_destroy`.
"""

from __future__ import annotations

import abc
import asyncio
import posixpath
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from megacomposer.env.audit import Record
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.sandbox import (
    HOME,
    TEMPORARY,
    WORKDIR,
    BackendUnavailableError,
    ExecResult,
    OnOutput,
    PatchRejectedError,
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
    Snapshot,
    Stats,
    Status,
)

PATH = "/usr/local/bin:/usr/bin:/bin"
PATCH_TIMEOUT_S = 120.0
_COMMAND_CHARACTERS = 500
_AGENT = Path(__file__).with_name("_sandbox_agent")


def agent_program() -> Path:
    """The static program that runs inside. BackendUnavailableError says how to build it."""
    if not _AGENT.exists():
        raise BackendUnavailableError(
            f"{_AGENT} is missing: install a C++ compiler (g++, with its static libraries) and "
            "reinstall with `pip install -e .` (setup.py builds it from csrc/sandbox_agent.cpp)"
        )
    return _AGENT


def new_sandbox_id(backend: str) -> str:
    """A name that no other sandbox has; letters, digits and dashes."""
    return f"{backend}-{uuid.uuid4().hex[:16]}"


class AgentSandbox(abc.ABC):
    """See `megacomposer.env.sandbox.Sandbox` for what the methods promise."""

    def __init__(self, *, sandbox_id: str, spec: SandboxSpec, link: AgentLink, record: Record):
        """`link` is open. The sandbox's life (`Limits.wall_s`) begins here."""
        self._id, self._spec, self._link, self._record = sandbox_id, spec, link, record
        self._ended = ""
        self._closing: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._life = loop.call_later(spec.limits.wall_s, self._end_of_life)

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        self._require_open()
        command = [argv] if isinstance(argv, str) else list(argv)
        variables = {**self._base_env(), **self._spec.env, **(env or {})}
        _check_command(command, variables)
        kills_before = await self._memory_kills()
        result = await self._link.exec(
            command,
            cwd=self._inside(cwd or ""),
            env=variables,
            stdin=stdin,
            timeout_s=timeout_s,
            output_bytes=self._spec.limits.output_bytes,
            on_output=on_output,
        )
        # A child may have been killed, and a shell have passed that on as its own exit.
        if result.exit_code == 137 and result.status in (Status.EXITED, Status.SIGNALED):
            kills = await self._memory_kills()
            if kills is not None and kills_before is not None and kills > kills_before:
                result = _replaced(result, Status.MEMORY_LIMIT)
        field = _LIMIT_FIELDS.get(result.status)
        if field:
            text = " ".join(command)[:_COMMAND_CHARACTERS]
            self._record("limit", sandbox=self._id, field=field, command=text)
        return result

    async def read_file(self, path: str, *, max_bytes: int = 32 << 20) -> bytes:
        self._require_open()
        return await self._link.read_file(self._inside(path), max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._require_open()
        await self._link.write_file(self._inside(path), data, mode=mode)

    async def patch(self, diff: bytes) -> None:
        """`git apply` decides: it refuses paths that leave WORKDIR, or enter .git, by itself.

        It checks the whole diff before it writes. WORKDIR need not be a repository.
        """
        self._require_open()
        if not diff:
            return
        workdir = self._inside("")
        # Outside a repository git must not find one above.
        variables = {"GIT_CEILING_DIRECTORIES": posixpath.dirname(workdir), "LC_ALL": "C.UTF-8"}
        command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
        try:
            result = await self.exec(command, env=variables, stdin=diff, timeout_s=PATCH_TIMEOUT_S)
        except SandboxFileError as error:
            raise SandboxError(f"patch needs git inside the sandbox: {error}") from error
        if result.ok:
            return
        message = result.stderr.decode(errors="replace").strip()
        if "invalid path" in message or "beyond a symbolic link" in message:
            self._record("refused", sandbox=self._id, what="patch", why=message[:1000])
        if result.status is not Status.EXITED:
            message = f"git apply ended with {result.status} {result.exit_code}. {message}"
        raise PatchRejectedError(message)

    @abc.abstractmethod
    async def snapshot(self) -> Snapshot: ...

    @abc.abstractmethod
    async def fork(self) -> Self: ...

    @abc.abstractmethod
    async def restore(self, snapshot: Snapshot) -> None: ...

    @abc.abstractmethod
    async def stats(self) -> Stats: ...

    async def _stats_of_link(self, enforced: Mapping[str, str]) -> Stats:
        """What the agent sees of its processes, for backends that have nothing better."""
        self._require_open()
        seen = await self._link.stats()
        return Stats(
            memory_bytes=seen.memory_bytes,
            memory_peak_bytes=None,
            processes=seen.threads,
            cpu_s=None,
            disk_bytes=None,
            inodes=None,
            enforced=enforced,
        )

    async def close(self) -> None:
        self._life.cancel()
        self._ended = self._ended or "it was closed"
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # A caller that is cancelled does not stop the removal.
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @abc.abstractmethod
    async def _destroy(self) -> None:
        """Kill and remove everything of this sandbox. Called once, after the link is closed."""

    async def _memory_kills(self) -> int | None:
        """How many processes the kernel has killed at `Limits.memory_bytes`; None: unknown."""
        return None

    def _base_env(self) -> dict[str, str]:
        """Variables that `spec.env` may replace."""
        return {
            "PATH": PATH,
            "HOME": str(HOME),
            "TMPDIR": str(TEMPORARY),
            "USER": "agent",
            "LANG": "C.UTF-8",
        }

    def _inside(self, path: str) -> str:
        """The absolute path that the agent is given; relative ones are from WORKDIR."""
        if "\0" in path:
            raise SandboxFileError(path, "EINVAL", "a path cannot hold a NUL character")
        return posixpath.join(WORKDIR, path) if path else str(WORKDIR)

    def _require_open(self) -> None:
        if self._ended or self._link.lost:
            raise SandboxClosedError(f"sandbox {self._id}: {self._ended or self._link.lost}")

    def _end_of_life(self) -> None:
        self._ended = f"its life of {self._spec.limits.wall_s:g} s is over"
        self._record("limit", sandbox=self._id, field="wall_s", command="")
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        await self._link.close()
        await self._destroy()
        self._record("sandbox_closed", sandbox=self._id, why=self._ended)


_LIMIT_FIELDS = {
    Status.TIMEOUT: "timeout_s",
    Status.MEMORY_LIMIT: "memory_bytes",
    Status.OUTPUT_LIMIT: "output_bytes",
}


def _check_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    if not argv:
        raise ValueError("argv is empty: name a program")
    for text in (*argv, *env, *env.values()):
        if "\0" in text:
            raise ValueError(f"argv and env cannot hold a NUL character: {text[:80]!r}")
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"env: {name!r} is no name of a variable")


def _replaced(result: ExecResult, status: Status) -> ExecResult:
    return ExecResult(
        status=status,
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        wall_s=result.wall_s,
    )
