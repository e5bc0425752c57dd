"""A worker process of `ProcessFleet`: `python -m megacomposer.env.fleet.job_worker`.

Frames on stdin and stdout: a length of 8 bytes, and a pickle. In: the module search path, once;
then (number, function, arguments, timeout_s), or (number,) to stop it. Out: (number, Report).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
from typing import Any

from megacomposer.env.fleet.job import Report, run_attempt


def frame(value: object) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(8, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Raises asyncio.IncompleteReadError at the end."""
    size = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(size))


async def _serve(in_fd: int, out_fd: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(in_fd, "rb")
    )
    tasks: dict[int, asyncio.Task[None]] = {}

    def answer(number: int, report: Report) -> None:
        data = memoryview(frame((number, report)))
        while data:
            data = data[os.write(out_fd, data) :]

    async def attempt(number: int, function: bytes, arguments: bytes, timeout_s: float) -> None:
        try:
            report = await run_attempt(lambda: pickle.loads(function), arguments, timeout_s)
            answer(number, report)
        finally:
            del tasks[number]

    try:
        sys.path[:] = await read_frame(reader)
        while True:
            number, *call = await read_frame(reader)
            if call:
                tasks[number] = asyncio.create_task(attempt(number, *call))
            elif number in tasks:
                tasks[number].cancel()
    except asyncio.IncompleteReadError:
        pass  # the executor has closed, or died: stop what runs, so that sandboxes end
    for task in list(tasks.values()):
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


def main() -> None:
    in_fd, out_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what jobs print must not get between the frames
    with contextlib.suppress(BrokenPipeError):  # the executor died; a result was on its way
        asyncio.run(_serve(in_fd, out_fd))


if __name__ == "__main__":
    main()
