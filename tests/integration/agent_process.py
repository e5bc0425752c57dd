"""The sandbox agent as a plain process of this machine, for tests of its link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_sandbox import agent_program
from megacomposer.env.sandbox import ExecResult

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


@contextlib.asynccontextmanager
async def agent(*options: str) -> AsyncIterator[tuple[AgentLink, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        agent_program(),
        *options,
        env={"SECRET": "canary"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    link = await AgentLink.open(process.stdout, process.stdin)
    try:
        yield link, process
    finally:
        await link.close()
        await asyncio.wait_for(process.wait(), 30)


async def shell(link: AgentLink, script: str, **options: Any) -> ExecResult:
    settings = {"cwd": "/", "env": ENV, "stdin": b"", "timeout_s": 60.0, "output_bytes": 8 << 20}
    return await link.exec(["sh", "-c", script], **{**settings, **options})


def with_agent(test: Callable[[AgentLink], Awaitable[None]]) -> None:
    async def run() -> None:
        async with agent() as (link, _):
            await test(link)

    asyncio.run(run())


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
