"""The words of the link to a sandbox agent, and what is known of each request under way.

csrc/sandbox_agent.cpp has the same numbers. Whatever the agent says is checked here.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import os
import struct

from megacomposer.env.sandbox import ExecResult, SandboxFileError, Status

VERSION = 1
HEADER = struct.Struct("<IBI")  # length, type, request

EXEC, STDIN, STDIN_END, CANCEL, READ, WRITE, WRITE_DATA, WRITE_END = range(1, 9)
PAUSE, RESUME, KILL_ALL, STATS = range(9, 13)
HELLO, STDOUT, STDERR, ENDED, ERROR, STDIN_TAKEN, DATA, DONE = range(64, 72)
STAGE_FILE, STAGE_CWD, STAGE_PROGRAM, STAGE_FORK = range(4)


class ProtocolError(Exception):
    """The agent sent what it never sends."""


class AgentError(Exception):
    """The agent refused: where, and the errno."""

    def __init__(self, stage: int, number: int) -> None:
        super().__init__(stage, number)
        self.stage, self.number = stage, number


class Answer:
    """A request that ends with DONE or ERROR, with at most `most` bytes of data before."""

    def __init__(self, most: int = 0) -> None:
        self.data = bytearray()
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._most = most

    def receive(self, kind: int, payload: bytes) -> bool:
        """True at the end."""
        if kind == DATA and len(self.data) + len(payload) <= self._most:
            self.data += payload
            return False
        if kind == DONE:
            self._end(payload)
        elif kind == ERROR:
            self._end(parse_error(payload))
        else:
            raise ProtocolError(f"answer {kind} to a request that has none such")
        return True

    def fail(self, error: Exception) -> None:
        self._end(error)

    def _end(self, result: bytes | Exception) -> None:
        if self.done.done():  # given up
            return
        if isinstance(result, Exception):
            self.done.set_exception(result)
            self.done.exception()  # the caller may be gone: no warning then
        else:
            self.done.set_result(result)


class Command:
    """A running command, as the reader fills it and `AgentLink.exec` drains it."""

    def __init__(self, output_bytes: int) -> None:
        self.output = {STDOUT: bytearray(), STDERR: bytearray()}
        self.fresh: collections.deque[tuple[str, bytes]] = collections.deque()
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.under_way_bytes = 0
        self.too_long = False
        self.exit: tuple[bool, int] | None = None
        """Whether a signal ended it; the exit code or the signal."""
        self.error: Exception | None = None
        self._left_bytes = output_bytes

    @property
    def finished(self) -> bool:
        return self.exit is not None or self.error is not None

    def receive(self, kind: int, payload: bytes) -> bool:
        """True at the end."""
        if kind in self.output:
            kept = payload[: self._left_bytes]
            self._left_bytes -= len(kept)
            self.too_long = self.too_long or len(kept) < len(payload)
            if kept:
                self.output[kind] += kept
                self.fresh.append(("stdout" if kind == STDOUT else "stderr", kept))
        elif kind == STDIN_TAKEN and len(payload) == 4:
            self.under_way_bytes -= int.from_bytes(payload, "little")
            if self.under_way_bytes < 0:
                raise ProtocolError("more standard input taken than sent")
            self.room.set()
        elif kind == ENDED and len(payload) == 5:
            self.exit = (payload[0] != 0, int.from_bytes(payload[1:], "little") & 0xFF)
        elif kind == ERROR:
            self.error = parse_error(payload)
        else:
            raise ProtocolError(f"answer {kind} to a command")
        self.changed.set()
        return self.finished

    def fail(self, error: Exception) -> None:
        self.error = error
        self.changed.set()


def command_result(
    command: Command, status: Status | None, program: str, cwd: str, wall_s: float
) -> ExecResult:
    stderr = bytes(command.output[STDERR])
    if isinstance(command.error, AgentError):
        stage, number = command.error.stage, command.error.number
        if stage in (STAGE_CWD, STAGE_PROGRAM) and number not in (errno.EAGAIN, errno.ENOMEM):
            raise file_error(cwd if stage == STAGE_CWD else program, number)
        # The task has used its processes or memory up: as a shell says it.
        stderr += f"cannot start {program}: {os.strerror(number)}\n".encode()
        signaled, code = False, 126
    elif command.error is not None:
        raise command.error
    else:
        assert command.exit is not None
        signaled, code = command.exit
    if signaled:
        code += 128
    if status is None:
        status = Status.SIGNALED if signaled else Status.EXITED
    elif status is Status.TIMEOUT:
        code = 137
    return ExecResult(
        status=status,
        exit_code=code,
        stdout=bytes(command.output[STDOUT]),
        stderr=stderr,
        wall_s=wall_s,
    )


def parse_error(payload: bytes) -> AgentError:
    if len(payload) != 5 or payload[0] > STAGE_FORK:
        raise ProtocolError("an error without its fields")
    return AgentError(payload[0], int.from_bytes(payload[1:], "little") & 0xFFFF)


def file_error(path: str, number: int) -> SandboxFileError:
    code = errno.errorcode.get(number, str(number))
    reason = "no regular file" if number == errno.EINVAL else os.strerror(number)
    return SandboxFileError(path, code, reason)
