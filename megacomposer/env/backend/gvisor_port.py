"""The byte streams of an agent whose process is replaced under it.

A checkpoint ends the container; the restored one goes on with new pipes. `AgentPort` looks to the
link like one pair of streams all along. What the agent wrote before the checkpoint is read to its
end, then what the restored one writes; what the host sends in between is kept, and sent after.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

_BLOCK_BYTES = 64 << 10


class AgentPort:
    """Give `reader` and `writer` to an `AgentLink`, and the processes to `attach`, in turn."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._held: bytearray | None = None
        self._armed = False
        self._closed = False

    @property
    def writer(self) -> asyncio.StreamWriter:
        """Has what a link uses of a StreamWriter: write, drain and close."""
        return cast(asyncio.StreamWriter, self)

    def attach(self, process: asyncio.subprocess.Process) -> None:
        """Speak to this process from now on; its stdin and stdout are pipes."""
        assert process.stdin is not None
        self._process = process
        self._pump = asyncio.create_task(self._copy(process))
        held, self._held, self._armed = self._held, None, False
        if self._closed:
            process.stdin.close()
        elif held:
            process.stdin.write(held)

    def hold_after_next(self) -> None:
        """Keep what is written after the next frame, until `attach` or `release`."""
        self._armed = True

    def release(self) -> None:
        """Nothing was replaced: send what was kept."""
        held, self._held, self._armed = self._held, None, False
        if held:
            self.write(bytes(held))

    async def ended(self) -> None:
        """The process has ended, and all that it wrote is in `reader`."""
        assert self._process is not None
        assert self._pump is not None
        await asyncio.gather(self._process.wait(), self._pump)

    def fail(self) -> None:
        """No process follows: the link sees the end of the stream."""
        self.reader.feed_eof()

    def write(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
        elif not self._closed:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(data)
        if self._armed:
            self._armed, self._held = False, bytearray()

    async def drain(self) -> None:
        if self._held is None and not self._closed:
            assert self._process is not None
            assert self._process.stdin is not None
            await self._process.stdin.drain()

    def close(self) -> None:
        self._closed = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    @property
    def _switching(self) -> bool:
        return self._held is not None

    async def _copy(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            while data := await process.stdout.read(_BLOCK_BYTES):
                self.reader.feed_data(data)
        if not self._switching:
            self.reader.feed_eof()
