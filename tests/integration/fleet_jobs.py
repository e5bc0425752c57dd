"""Jobs of the executor tests. Each start leaves a line in `folder`: starts can be counted."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from megacomposer.env.sandbox import SandboxError


def start(folder: str, name: str) -> int:
    """How many times this job has started, this time included."""
    path = Path(folder) / f"{name}.starts"
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return starts(folder, name)


def starts(folder: str | Path, name: str) -> int:
    path = Path(folder) / f"{name}.starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def square(x: int, folder: str, pause_s: float = 0.0) -> dict[str, Any]:
    start(folder, f"square-{x}")
    await asyncio.sleep(pause_s)
    return {"square": x * x, "pid": os.getpid()}


async def no_sandbox(folder: str, name: str, times: int) -> str:
    if start(folder, name) <= times:
        raise SandboxError("the node has no memory left")
    return "at last"


async def die(folder: str, name: str, times: int) -> str:
    if start(folder, name) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "at last"


async def block(folder: str, name: str, times: int) -> str:
    """Deaf to cancellation: it stops the event loop of its process."""
    if start(folder, name) <= times:
        time.sleep(3600)
    return "at last"


async def wait_forever(folder: str, name: str) -> None:
    start(folder, name)
    try:
        await asyncio.sleep(3600)
    finally:
        (Path(folder) / f"{name}.stopped").touch()


async def defect() -> None:
    print("what a job prints does not matter")
    raise KeyError("no such thing")


async def own_timeout() -> None:
    raise TimeoutError("of something inside")


async def no_json() -> object:
    return object()
