"""Byte streams of the egress proxy: plain, TLS that we terminate, and HTTP/1.1 on top of either."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from typing import Protocol

import h11

CHUNK_BYTES = 64 << 10


class Activity:
    """When one of the streams of an exchange last moved bytes; a download keeps its idle upload
    side alive."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()


class ByteStream(Protocol):
    """One connection. Both methods raise OSError (TimeoutError included) when it breaks."""

    activity: Activity

    async def read(self) -> bytes:
        """Up to CHUNK_BYTES, as they come; b"" at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Returns when the other side has taken enough: memory use stays bounded."""
        ...


class SocketStream:
    """A connection that raises TimeoutError when nothing moves for `idle_s`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        idle_s: float,
        activity: Activity,
    ) -> None:
        self._reader, self._writer, self._idle_s = reader, writer, idle_s
        self.activity = activity
        self._pushed_back = b""

    async def read(self) -> bytes:
        if self._pushed_back:
            data, self._pushed_back = self._pushed_back, b""
            return data
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    data = await self._reader.read(CHUNK_BYTES)
            except TimeoutError:
                if time.monotonic() - self.activity.last_s >= self._idle_s:
                    raise
            else:
                self.activity.last_s = time.monotonic()
                return data

    def push_back(self, data: bytes) -> None:
        """The next `read` returns these bytes."""
        self._pushed_back = data + self._pushed_back

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(self._idle_s):
            await self._writer.drain()
        self.activity.last_s = time.monotonic()

    async def end(self) -> None:
        """No more will be written; reading goes on."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def abort(self) -> None:
        """Close at once; what was not sent yet is dropped."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is left, for a while, and close."""
        self._writer.close()
        try:
            async with asyncio.timeout(2.0):
                await self._writer.wait_closed()
        except OSError:  # the other side is gone already, or takes nothing
            self.abort()


class TlsStream:
    """The server's side of TLS over another stream.

    Not `StreamWriter.start_tls`: Python 3.11 leaves the reader with the old transport, and bytes
    that came early are lost.
    """

    def __init__(self, below: ByteStream, context: ssl.SSLContext) -> None:
        self._below, self.activity = below, below.activity
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._flushing = asyncio.Lock()

    async def handshake(self) -> None:
        """Raises ssl.SSLError or OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()  # the alert that tells the client why
                raise
            else:
                await self._flush()
                return

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLEOFError as error:
                raise ConnectionResetError("the TLS connection was cut off") from error

    async def write(self, data: bytes) -> None:
        self._tls.write(data)
        await self._flush()

    async def end(self) -> None:
        """Say that no more will be written."""
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()  # writes our half of the goodbye, then wants to read the other
        await self._flush()

    async def _fill(self) -> None:
        data = await self._below.read()
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def _flush(self) -> None:
        async with self._flushing:
            if data := self._out.read():
                await self._below.write(data)


class HttpPeer:
    """One side of HTTP/1.1: h11 events over a stream. Raises h11.ProtocolError and OSError."""

    def __init__(
        self, stream: ByteStream, role: type[h11.CLIENT | h11.SERVER], head_bytes: int
    ) -> None:
        self.stream = stream
        self.method = b""
        """Of the latest request that was read."""
        self._head_bytes = head_bytes
        self.http = h11.Connection(role, max_incomplete_event_size=head_bytes)

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                if isinstance(event, h11.Request | h11.Response):
                    self._check_size(event)
                if isinstance(event, h11.Request):
                    self.method = event.method
                return event  # type: ignore[return-value]
            self.http.receive_data(await self.stream.read())

    def _check_size(self, head: h11.Request | h11.Response) -> None:
        # h11 counts only what is incomplete: a long head that came in one piece passes it.
        size = sum(len(name) + len(value) + 4 for name, value in head.headers)
        if isinstance(head, h11.Request):
            size += len(head.target)
        if size > self._head_bytes:
            raise h11.RemoteProtocolError(f"a head of {size} bytes is too long", 431)

    async def send(self, *events: h11.Event) -> None:
        """Several events in one write."""
        data = b"".join(self.http.send(event) or b"" for event in events)
        if data:
            await self.stream.write(data)

    def can_answer(self) -> bool:
        return self.http.our_state in (h11.IDLE, h11.SEND_RESPONSE)
