"""One microVM of an E2B-compatible service, as a sandbox; `e2b` starts them."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import posixpath
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megacomposer.env.backend.e2b_protocol import Exit, Machine, PausedError
from megacomposer.env.backend.tree_stream import layer_from_tar, pack_command
from megacomposer.env.sandbox import (
    HOME,
    TEMPORARY,
    WORKDIR,
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

if TYPE_CHECKING:
    from megacomposer.env.backend.e2b import E2bBackend

_LONGEST_TIMEOUT_S = 86_400.0
MEMORY_PREFIX = "e2b:"
_MARK = "MEGACOMPOSER_COMMAND"
_SETUP_TIMEOUT_S = 300.0
# $1 token, $2 file for stdin, $3 directory; then the command. What does not exist is told by a line
# that begins with the token, which the command never sees.
_LAUNCH = """
token=$1 input=$2 directory=$3
shift 3
exec 0<"$input" || exit 126
[ "$input" = /dev/null ] || rm -f "$input"
cd "$directory" 2>/dev/null || { echo "$token cwd" >&2; exit 125; }
command -v "$1" >/dev/null 2>&1 || { echo "$token program" >&2; exit 125; }
exec "$@"
"""
# Whatever a command started has its mark in the environment, sessions and double forks included.
_KILL = """
while :; do
  found=
  for process in /proc/[0-9]*; do
    if tr '\\000' '\\n' <$process/environ 2>/dev/null | grep -qx "$1"; then
      kill -KILL "${process#/proc/}" 2>/dev/null && found=1
    fi
  done
  [ -n "$found" ] || exit 0
done
"""
# $1 uploaded file, $2 where it belongs, $3 mode of a new file.
_PLACE = """
target=$(readlink -f "$2") || exit 40
[ ! -d "$target" ] || exit 21
[ ! -e "$target" ] || [ -f "$target" ] || exit 22
mode=$3
[ ! -e "$target" ] || mode=$(stat -c %a "$target")
chmod "$mode" "$1" && mv -f "$1" "$target" || exit 13
"""
_PLACE_CODES = {
    40: ("ELOOP", "its directory cannot be found"),
    21: ("EISDIR", "is a directory"),
    22: ("EINVAL", "no regular file"),
    13: ("EACCES", "cannot be replaced"),
}
_READ_CODES = {
    400: ("EINVAL", "no regular file"),
    403: ("EACCES", "permission denied"),
    404: ("ENOENT", "no such file"),
    413: ("EFBIG", "longer than max_bytes"),
    500: ("EIO", "cannot be read"),
}
ENFORCED = {
    "memory_bytes": "template",
    "processes": "none",
    "cpus": "template",
    "disk_bytes": "template",
    "inodes": "none",
    "output_bytes": "client",
    "wall_s": "service",
}


class E2bSandbox:
    """One microVM, which is another one after `restore`."""

    def __init__(
        self, *, backend: E2bBackend, sandbox_id: str, spec: SandboxSpec, machine: Machine
    ) -> None:
        self._backend, self._client = backend, backend.client
        self._id, self._spec, self._machine = sandbox_id, spec, machine
        self._ended = ""
        self._end_s = time.monotonic() + spec.limits.wall_s

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
        if not argv:
            raise ValueError("argv is empty: name a program")
        token, directory = uuid.uuid4().hex, posixpath.join(WORKDIR, cwd or "")
        variables = {
            "HOME": str(HOME),
            "TMPDIR": str(TEMPORARY),
            "LANG": "C.UTF-8",
            **self._spec.env,
            **(env or {}),
            _MARK: token,
        }
        source = "/dev/null"
        if stdin:
            source = f"{TEMPORARY}/.stdin-{token}"
            await self.upload(source, stdin)
        process = {
            "cmd": "/bin/sh",
            "args": ["-c", _LAUNCH, "sh", token, source, directory, *argv],
            "envs": variables,
            "cwd": "/",
        }
        result = await self._run(process, token, timeout_s, on_output)
        if result.exit_code == 125 and token.encode() in result.stderr:
            program = f"{token} program".encode() in result.stderr
            raise SandboxFileError(argv[0] if program else directory, "ENOENT", "does not exist")
        if result.status in (Status.TIMEOUT, Status.OUTPUT_LIMIT):
            field = "timeout_s" if result.status is Status.TIMEOUT else "output_bytes"
            self._backend.record(
                "limit", sandbox=self._id, field=field, command=" ".join(argv)[:500]
            )
        return result

    async def read_file(self, path: str, *, max_bytes: int = 32 << 20) -> bytes:
        self._require_open()
        full = posixpath.join(WORKDIR, path)
        found = await self._client.read_file(
            self._machine, full, user=self._backend.user, max_bytes=max_bytes
        )
        if isinstance(found, int):
            raise SandboxFileError(full, *_READ_CODES[found])
        return found

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._require_open()
        full = posixpath.join(WORKDIR, path)
        beside = f"{posixpath.dirname(full)}/.~{uuid.uuid4().hex}"
        await self.upload(beside, data)
        result = await self.script(_PLACE, beside, full, f"{mode & 0o777:o}")
        if not result.ok:
            await self.script('rm -f "$1"', beside)
            code, reason = _PLACE_CODES.get(result.exit_code, ("EIO", "cannot be written"))
            raise SandboxFileError(full, code, reason)

    async def patch(self, diff: bytes) -> None:
        if not diff:
            return
        result = await self.exec(
            ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"],
            env={"GIT_CEILING_DIRECTORIES": "/", "LC_ALL": "C.UTF-8"},
            stdin=diff,
        )
        if not result.ok:
            raise PatchRejectedError(result.stderr.decode(errors="replace").strip())

    async def snapshot(self) -> Snapshot:
        """Kept by the service until it is deleted there; the files are packed from a fork."""
        self._require_open()
        answer = await self._control("POST", "snapshots", {})
        name = answer.get("snapshotID") if isinstance(answer, dict) else None
        if not name:
            raise SandboxError(f"the service sent no snapshot: {answer!r}"[:300])
        memory = MEMORY_PREFIX + str(name)
        spec = dataclasses.replace(self._spec, base=Snapshot(layers=(), memory=memory))
        async with await self._backend.start(spec) as fork:
            layer = await fork.pack()
        snapshot = Snapshot(layers=(layer,), memory=memory)
        self._backend.record("snapshot", sandbox=self._id, snapshot=snapshot.id)
        return snapshot

    async def fork(self) -> Self:
        self._require_open()
        body = {"count": 1, "timeout": lease_s(self._spec)}
        try:
            machine = await self._client.fork(self._machine, body)
        except PausedError:
            await self._resume()
            machine = await self._client.fork(self._machine, body)
        child = self._backend.adopt(machine, self._spec)
        assert isinstance(child, type(self))
        return child

    async def restore(self, snapshot: Snapshot) -> None:
        self._require_open()
        spec = dataclasses.replace(self._spec, base=snapshot)
        machine = await self._backend.boot(spec)
        old, self._machine = self._machine, machine
        await self._client.delete(old)

    async def stats(self) -> Stats:
        """The service tells sizes, not use."""
        self._require_open()
        await self._client.call("GET", f"/sandboxes/{self._machine.id}")
        return Stats(
            memory_bytes=None,
            memory_peak_bytes=None,
            processes=None,
            cpu_s=None,
            disk_bytes=None,
            inodes=None,
            enforced=ENFORCED,
        )

    async def close(self) -> None:
        if self._ended:
            return
        self._ended = "it was closed"
        await self._client.delete(self._machine)
        self._backend.forget(self)
        self._backend.record("sandbox_closed", sandbox=self._id, why=self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(
        self,
        process: Mapping[str, Any],
        token: str,
        timeout_s: float,
        on_output: OnOutput | None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        left = self._spec.limits.output_bytes if output_bytes is None else output_bytes
        output = {"stdout": bytearray(), "stderr": bytearray()}
        ended: Exit | None = None
        status: Status | None = None
        started_s = time.monotonic()
        events = self._client.start_process(self._machine, process, user=self._backend.user)
        try:
            async with asyncio.timeout(timeout_s):
                async for event in self._resuming(events, process):
                    if isinstance(event, Exit):
                        ended = event
                        continue
                    stream, data = event
                    kept, too_long = data[:left], len(data) > left
                    left -= len(kept)
                    output[stream] += kept
                    if on_output and kept:
                        on_output(stream, kept)
                    if too_long:
                        status = Status.OUTPUT_LIMIT
                        break
        except TimeoutError:
            status = Status.TIMEOUT
        if ended is None:
            assert status is not None
            await self._kill(token)
            ended = Exit(code=137, signaled=True)
        return ExecResult(
            status=status or (Status.SIGNALED if ended.signaled else Status.EXITED),
            exit_code=ended.code,
            stdout=bytes(output["stdout"]),
            stderr=bytes(output["stderr"]),
            wall_s=time.monotonic() - started_s,
        )

    async def _resuming(self, events: Any, process: Mapping[str, Any]) -> Any:
        """The events; a machine that the service has paused is resumed first."""
        try:
            async for event in events:
                yield event
        except PausedError:
            await self._resume()
            again = self._client.start_process(self._machine, process, user=self._backend.user)
            async for event in again:
                yield event

    async def _kill(self, token: str) -> None:
        result = await self.script(_KILL, f"{_MARK}={token}")
        if not result.ok:
            raise SandboxError(f"a command could not be killed: {result.stderr[-300:]!r}")

    async def script(self, script: str, *arguments: str) -> ExecResult:
        """Run a shell script of ours."""
        process = {"cmd": "/bin/sh", "args": ["-c", script, "sh", *arguments], "cwd": "/"}
        return await self._run(process, "", _SETUP_TIMEOUT_S, None)

    async def pack(self) -> str:
        """The files as they are now, stored as one layer; its digest."""
        process = {"cmd": pack_command()[0], "args": pack_command()[1:], "cwd": "/"}
        limit_bytes = 2 * self._spec.limits.disk_bytes
        result = await self._run(process, "", _SETUP_TIMEOUT_S, None, limit_bytes)
        if not result.ok:
            raise SandboxError(
                f"tar inside ended with {result.exit_code}: {result.stderr[-300:]!r}"
            )
        return await asyncio.to_thread(
            layer_from_tar,
            self._backend.store,
            io.BytesIO(result.stdout),
            generation=len(self._spec.base.layers),
        )

    async def upload(self, path: str, data: bytes) -> None:
        """Write a file, parents included; a reader may see half of it. SandboxFileError."""
        status = await self._client.write_file(self._machine, path, data, user=self._backend.user)
        if status == 507:
            raise SandboxFileError(path, "ENOSPC", "no space left")
        if status >= 400:
            raise SandboxFileError(path, "EACCES", "cannot be written")

    async def _control(self, method: str, action: str, body: Mapping[str, Any]) -> Any:
        path = f"/sandboxes/{self._machine.id}/{action}"
        try:
            return await self._client.call(method, path, body)
        except PausedError:
            await self._resume()
            return await self._client.call(method, path, body)

    async def _resume(self) -> None:
        left_s = max(1, round(self._end_s - time.monotonic()))
        await self._client.call(
            "POST", f"/sandboxes/{self._machine.id}/connect", {"timeout": left_s}
        )

    def _require_open(self) -> None:
        if not self._ended and time.monotonic() > self._end_s:
            self._ended = f"its life of {self._spec.limits.wall_s:g} s is over"
            self._backend.forget(self)
        if self._ended:
            raise SandboxClosedError(f"sandbox {self._id}: {self._ended}")


def lease_s(spec: SandboxSpec) -> int:
    """How long the service is to keep a machine of this spec."""
    return max(1, round(min(spec.limits.wall_s, _LONGEST_TIMEOUT_S)))
