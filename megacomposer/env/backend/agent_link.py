"""The host's end of the agent process inside a sandbox (csrc/sandbox_agent.cpp is the other).

One pair of byte streams carries many requests at once. What comes back is not trusted, since a
task may have taken the agent over: frames and buffers are bounded, and an answer that fits no
request ends the link with SandboxClosedError.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import struct
import time
from collections.abc import Mapping, Sequence

from megacomposer.env.backend.agent_protocol import (
    CANCEL,
    EXEC,
    HEADER,
    HELLO,
    KILL_ALL,
    PAUSE,
    READ,
    RESUME,
    STATS,
    STDIN,
    STDIN_END,
    VERSION,
    WRITE,
    WRITE_DATA,
    WRITE_END,
    AgentError,
    Answer,
    Command,
    ProtocolError,
    command_result,
    file_error,
)
from megacomposer.env.sandbox import (
    ExecResult,
    OnOutput,
    SandboxClosedError,
    SandboxError,
    SandboxFileError,
    Status,
)

FRAME_LIMIT_BYTES = 256 << 10
"""Of what the agent may send; it sends at most 64 KiB."""
COMMAND_LIMIT_BYTES = 16 << 20
"""Of arguments and variables together; the kernel takes less."""
CHUNK_BYTES = 64 << 10
STDIN_WINDOW_BYTES = 256 << 10
"""Standard input that is under way and not yet taken by the command."""
HELLO_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0
"""Of everything but commands: an agent that is silent for longer is lost."""
KILL_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentStats:
    """What the agent can see of the processes inside."""

    threads: int
    cpu_s: float
    """Of those that live now."""
    memory_bytes: int
    """Resident, shared pages counted for each."""


class AgentLink:
    """Requests to one agent. Made by `open`; every method may run many times at once."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        first_request: int,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._first_request = first_request
        self._next_request = first_request
        self._calls: dict[int, Answer | Command] = {}
        self._lost = ""
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        first_request: int = 0,
    ) -> AgentLink:
        """Wait until the agent has said hello, and check its version.

        `first_request` is 0 for a fresh agent. For one that was frozen while paused and restored
        elsewhere it is `next_request` of the link that it had: there is no second hello, and what
        it still says about older requests is dropped.

        Raises SandboxClosedError where no agent answers.
        """
        link = cls(reader, writer, first_request=first_request or 1)
        if first_request:
            return link
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await link._hello
        except TimeoutError:
            await link.close()
            raise SandboxClosedError(
                f"the sandbox agent did not start in {HELLO_TIMEOUT_S:.0f} s"
            ) from None
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def next_request(self) -> int:
        """See `open`."""
        return self._next_request

    @property
    def lost(self) -> str:
        """Why the agent cannot be reached any more; "" while it can."""
        return self._lost

    async def close(self) -> None:
        """End the stream: the agent kills everything and exits. Waiting calls fail."""
        self._fail("the sandbox was closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes,
        timeout_s: float,
        output_bytes: int,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a command to its end; `Sandbox.exec` says what that means.

        The time limit and the output limit are kept here: at either, everything that the command
        started is killed, and what it had written is returned.
        """
        strings = [cwd, *argv, *(f"{name}={value}" for name, value in env.items())]
        payload = struct.pack("<BII", bool(stdin), len(argv), len(env))
        payload += b"".join(text.encode(errors="surrogateescape") + b"\0" for text in strings)
        if len(payload) > COMMAND_LIMIT_BYTES:
            raise file_error(argv[0], errno.E2BIG)
        command = Command(output_bytes)
        started_s = time.monotonic()
        request = await self._send_new(command, EXEC, payload)
        feeder = asyncio.create_task(self._feed(command, request, stdin)) if stdin else None
        status: Status | None = None
        try:
            deadline = asyncio.timeout(timeout_s)
            try:
                async with deadline:
                    await _drain(command, on_output)
            except TimeoutError:
                if not deadline.expired():
                    raise  # the caller's own, from on_output
                status = Status.TIMEOUT
            if command.too_long:
                status = Status.OUTPUT_LIMIT
            if status and not command.finished:
                await self._kill(command, request, on_output)
        finally:
            if not command.finished:  # cancelled: its last words find it among the calls
                self._post(CANCEL, request)
            if feeder:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
        wall_s = time.monotonic() - started_s
        return command_result(command, status, argv[0], cwd, wall_s)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """SandboxFileError where it is missing, no regular file, or too long (EFBIG)."""
        answer = Answer(most=max_bytes)
        request = await self._send_new(answer, READ, struct.pack("<Q", max_bytes) + _text(path))
        await self._wait(answer, request, path)
        return bytes(answer.data)

    async def write_file(self, path: str, data: bytes, *, mode: int) -> None:
        """Write beside and rename; parents are made. SandboxFileError."""
        answer = Answer()
        request = await self._send_new(answer, WRITE, struct.pack("<I", mode) + _text(path))
        try:
            for at in range(0, len(data), CHUNK_BYTES):
                if answer.done.done():  # refused
                    break
                await self._send(WRITE_DATA, request, data[at : at + CHUNK_BYTES])
            self._post(WRITE_END, request)
        except asyncio.CancelledError:
            self._post(CANCEL, request)
            raise
        await self._wait(answer, request, path)

    async def pause(self) -> None:
        """Stop every process but the agent, and wait until all have stopped.

        Until `resume` or `kill_all` the agent sends nothing of commands and files. SandboxError
        where some process does not stop within 5 s: all go on then.
        """
        await self._control(PAUSE, "stop all processes")

    async def resume(self) -> None:
        """Let every process go on."""
        await self._control(RESUME, "let all processes go on")

    async def kill_all(self) -> None:
        """Kill every process but the agent (and process 1), and wait until they are gone."""
        await self._control(KILL_ALL, "kill all processes")

    async def stats(self) -> AgentStats:
        """What the agent sees in /proc."""
        payload = await self._control(STATS, "count the processes")
        if len(payload) != 24:
            self._fail("the sandbox agent broke the protocol (statistics)")
            raise SandboxClosedError(self._lost)
        threads, cpu_ms, memory_bytes = struct.unpack("<QQQ", payload)
        return AgentStats(threads=threads, cpu_s=cpu_ms / 1000, memory_bytes=memory_bytes)

    async def _control(self, kind: int, what: str) -> bytes:
        answer = Answer()
        request = await self._send_new(answer, kind)
        try:
            return await self._wait(answer, request, what)
        except SandboxFileError as error:
            raise SandboxError(f"the sandbox agent could not {what}: {error.reason}") from error

    async def _wait(self, answer: Answer, request: int, path: str) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(answer.done)
        except TimeoutError:
            self._fail(f"the sandbox agent did not answer in {ANSWER_TIMEOUT_S:.0f} s")
            raise SandboxClosedError(self._lost) from None
        except AgentError as error:
            raise file_error(path, error.number) from None
        finally:
            if not answer.done.done():
                self._post(CANCEL, request)

    async def _kill(self, command: Command, request: int, on_output: OnOutput | None) -> None:
        self._post(CANCEL, request)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while not command.finished:
                    await _drain(command, on_output)
        except TimeoutError:
            self._fail("the sandbox agent could not end a command")
            raise SandboxClosedError(self._lost) from None

    async def _feed(self, command: Command, request: int, stdin: bytes) -> None:
        for at in range(0, len(stdin), CHUNK_BYTES):
            while command.under_way_bytes > STDIN_WINDOW_BYTES - CHUNK_BYTES:
                command.room.clear()
                await command.room.wait()
            chunk = stdin[at : at + CHUNK_BYTES]
            command.under_way_bytes += len(chunk)
            await self._send(STDIN, request, chunk)
        await self._send(STDIN_END, request)

    async def _send_new(self, call: Answer | Command, kind: int, payload: bytes = b"") -> int:
        request = self._next_request
        self._next_request += 1
        self._calls[request] = call
        await self._send(kind, request, payload)
        return request

    async def _send(self, kind: int, request: int, payload: bytes = b"") -> None:
        self._post(kind, request, payload)
        if self._lost:
            raise SandboxClosedError(self._lost)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            self._fail("the sandbox agent is gone")
            raise SandboxClosedError(self._lost) from error

    def _post(self, kind: int, request: int, payload: bytes = b"") -> None:
        if not self._lost:
            self._writer.write(HEADER.pack(len(payload), kind, request) + payload)

    async def _read(self) -> None:
        try:
            while True:
                length, kind, request = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > FRAME_LIMIT_BYTES:
                    raise ProtocolError(f"a frame of {length} bytes")
                self._receive(kind, request, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail("the sandbox agent is gone")
        except ProtocolError as error:
            self._fail(f"the sandbox agent broke the protocol ({error})")

    def _receive(self, kind: int, request: int, payload: bytes) -> None:
        if kind == HELLO and request == 0 and not self._hello.done():
            if payload != VERSION.to_bytes(4, "little"):
                raise ProtocolError(
                    f"its version is {payload.hex()}, not {VERSION}: build it again"
                )
            self._hello.set_result(None)
        elif (call := self._calls.get(request)) is not None:
            if call.receive(kind, payload):
                del self._calls[request]
        elif not 0 < request < self._first_request:
            raise ProtocolError(f"answer {kind} to request {request}, which does not wait")

    def _fail(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = reason
        if not self._hello.done():
            self._hello.set_exception(SandboxClosedError(reason))
            self._hello.exception()
        for call in self._calls.values():
            call.fail(SandboxClosedError(reason))
        self._calls.clear()
        self._writer.close()


async def _drain(command: Command, on_output: OnOutput | None) -> None:
    """Hand output on, until the command has finished or wrote too much."""
    handled_too_long = command.too_long
    while True:
        command.changed.clear()
        while command.fresh:
            stream, data = command.fresh.popleft()
            if on_output:
                on_output(stream, data)
        if command.finished or command.too_long != handled_too_long:
            return
        await command.changed.wait()


def _text(path: str) -> bytes:
    return path.encode(errors="surrogateescape") + b"\0"
