"""The two ends of the link against each other, and each against a hostile other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_process import agent, shell
from megacomposer.env.backend import agent_protocol
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_protocol import HEADER
from megacomposer.env.backend.agent_sandbox import agent_program
from megacomposer.env.sandbox import SandboxClosedError

HELLO = HEADER.pack(4, agent_protocol.HELLO, 0) + struct.pack("<I", agent_protocol.VERSION)


@pytest.mark.parametrize(
    "answer",
    [
        HEADER.pack(1 << 31, agent_protocol.STDOUT, 1),
        HEADER.pack(3, agent_protocol.STDOUT, 7) + b"abc",
        HEADER.pack(3, agent_protocol.STDOUT, 0) + b"abc",
        HEADER.pack(4, agent_protocol.STDIN_TAKEN, 1) + b"\xff\xff\xff\x7f",
        HEADER.pack(0, agent_protocol.ENDED, 1),
        HEADER.pack(0, agent_protocol.DONE, 1),
        HEADER.pack(1, agent_protocol.ERROR, 1) + b"\0",
        HEADER.pack(5, agent_protocol.ERROR, 1) + b"\xff\0\0\0\0",
        HEADER.pack(5, 200, 1) + b"\xff\0\0\0\0",
        HELLO,
        b"\0\0",
        b"",
    ],
)
def test_an_agent_that_breaks_the_protocol_closes_the_link(answer: bytes) -> None:
    async def run() -> None:
        async with hostile(HELLO) as (link, side):
            task = asyncio.create_task(shell(link, "true"))
            await asyncio.sleep(0)
            side.sendall(answer)
            side.shutdown(socket.SHUT_WR)
            with pytest.raises(SandboxClosedError):
                await asyncio.wait_for(task, 10)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def hostile(says: bytes) -> AsyncIterator[tuple[AgentLink, socket.socket]]:
    """A link whose other side says what the test says."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(says)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        link = await AgentLink.open(reader, writer)
        try:
            yield link, theirs
        finally:
            await link.close()


def test_an_agent_of_another_version_is_refused() -> None:
    async def run() -> None:
        hello = HEADER.pack(4, agent_protocol.HELLO, 0) + struct.pack(
            "<I", agent_protocol.VERSION + 1
        )
        with pytest.raises(SandboxClosedError, match="build it again"):
            async with hostile(hello):
                pass

    asyncio.run(run())


def test_more_data_than_was_asked_for_is_not_kept() -> None:
    async def run() -> None:
        async with hostile(HELLO) as (link, side):
            task = asyncio.create_task(link.read_file("/x", max_bytes=10))
            await asyncio.sleep(0)
            side.sendall(HEADER.pack(11, agent_protocol.DATA, 1) + b"x" * 11)
            with pytest.raises(SandboxClosedError, match="protocol"):
                await asyncio.wait_for(task, 10)

    asyncio.run(run())


def test_a_restored_agent_may_still_speak_of_older_requests() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            link = await AgentLink.open(reader, writer, first_request=9)
            task = asyncio.create_task(link.resume())
            theirs.sendall(HEADER.pack(3, agent_protocol.STDOUT, 4) + b"old")
            theirs.sendall(HEADER.pack(0, agent_protocol.DONE, 9))
            await asyncio.wait_for(task, 10)
            assert link.next_request == 10
            await link.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEADER.pack((64 << 20) + 1, agent_protocol.EXEC, 1),
        HEADER.pack(3, agent_protocol.EXEC, 1) + b"abc",
        HEADER.pack(9, agent_protocol.EXEC, 1) + struct.pack("<BII", 0, 1 << 31, 1 << 31),
        HEADER.pack(2, agent_protocol.READ, 1) + b"ab",
        HEADER.pack(0, 99, 1),
    ],
)
def test_the_agent_ends_at_a_malformed_request(request_bytes: bytes) -> None:
    result = subprocess.run([agent_program()], input=request_bytes, capture_output=True, timeout=30)
    assert result.returncode == 70
    assert result.stderr.startswith(b"sandbox agent: ")


def test_the_agent_keeps_no_environment_and_cannot_be_read_by_its_user() -> None:
    async def run() -> None:
        async with agent() as (_, process):
            environ = Path(f"/proc/{process.pid}/environ")
            assert environ.stat().st_uid == 0  # not dumpable
            with contextlib.suppress(PermissionError):
                assert b"canary" not in environ.read_bytes()

    asyncio.run(run())


# Forwarder ---------------------------------------------------------------------------------------


def test_the_forwarder_carries_both_directions_and_comes_back_when_killed(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(2_000_000)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Answers only after the client's end: half-closed streams must work.
        writer.write(await reader.read())
        await writer.drain()
        writer.close()

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def run() -> None:
        server = await asyncio.start_unix_server(echo, tmp_path / "proxy.sock")
        async with server, agent("--forward", f"{port}:{tmp_path}/proxy.sock") as (link, process):
            answers = await asyncio.gather(*(ask() for _ in range(20)))
            assert all(answer == data for answer in answers)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
            assert await asyncio.wait_for(ask(), 30) == data
            await link.kill_all()
            assert await asyncio.wait_for(ask(), 30) == data

    asyncio.run(run())
