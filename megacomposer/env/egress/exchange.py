"""Bytes in both directions through the egress proxy: counted, bounded, never held whole."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http

import h11

from megacomposer.config import Config
from megacomposer.env.egress.request import (
    Exchange,
    RefusedError,
    UpstreamError,
    response_headers,
)
from megacomposer.env.egress.stream import HttpPeer, SocketStream

_LINGER_BYTES = 4 << 20
_LINGER_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProxyLimits(Config):
    """What one sandbox may ask of its proxy."""

    connections: int = 128
    """Open at once; more are answered 503."""
    head_bytes: int = 64 << 10
    """Of a request or response without its body."""
    request_body_bytes: int = 16 << 20
    """Of one request."""
    budget_bytes: int | None = None
    """Bodies and tunnels in both directions, over the proxy's whole life; None: no limit."""
    head_s: float = 30.0
    """For a client to send a whole head, and for a TLS handshake."""
    connect_s: float = 10.0
    """For looking up a name, and for each address that is tried."""
    idle_s: float = 60.0
    """Without a byte in either direction."""
    exchange_s: float = 1800.0
    """For one request and its response, or one tunnel."""


class Traffic:
    """What a proxy has let through so far, against its limits."""

    def __init__(self, limits: ProxyLimits) -> None:
        self.limits = limits
        self.used_bytes = 0

    def count(self, size: int) -> None:
        """Raises RefusedError where the budget is used up."""
        self.used_bytes += size
        budget = self.limits.budget_bytes
        if budget is not None and self.used_bytes > budget:
            raise RefusedError("budget", f"this task's {budget} bytes of traffic are used up")

    def check_body(self, request: h11.Request) -> None:
        """Raises RefusedError for a body that is known to be too long."""
        self.check_length(int(dict(request.headers).get(b"content-length", b"0")))
        self.count(0)

    def check_length(self, size: int) -> None:
        limit = self.limits.request_body_bytes
        if size > limit:
            raise RefusedError("body_limit", f"send at most {limit} bytes at once", status=413)


async def exchange(
    client: HttpPeer, stream: SocketStream, head: h11.Request, log: Exchange, traffic: Traffic
) -> None:
    """Both bodies at once: a server may answer before it has read all."""
    upstream = HttpPeer(stream, h11.CLIENT, traffic.limits.head_bytes)
    if client.http.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))
    await _send_upstream(upstream, head)
    upload = asyncio.create_task(_upload(client, upstream, log, traffic))
    download = asyncio.create_task(_download(client, upstream, log, traffic))
    try:
        await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
        if upload.done():
            upload.result()
        await download
    finally:
        upload.cancel()
        download.cancel()
        await asyncio.gather(upload, download, return_exceptions=True)


async def _upload(client: HttpPeer, upstream: HttpPeer, log: Exchange, traffic: Traffic) -> None:
    while True:
        event = await client.event()
        if isinstance(event, h11.Data):
            log.sent_bytes += len(event.data)
            traffic.count(len(event.data))
            traffic.check_length(log.sent_bytes)
            sent = await _send_upstream(upstream, h11.Data(data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await _send_upstream(upstream, h11.EndOfMessage())
            return
        else:
            raise ConnectionResetError("closed in the middle of a request")
        if not sent:
            return  # the server has heard enough; its answer may be there to read


async def _download(client: HttpPeer, upstream: HttpPeer, log: Exchange, traffic: Traffic) -> None:
    response = await _read_upstream(upstream)
    while isinstance(response, h11.InformationalResponse):
        response = await _read_upstream(upstream)
    if not isinstance(response, h11.Response):
        raise UpstreamError("the server closed the connection without an answer")
    log.status = response.status_code
    await client.send(
        h11.Response(
            status_code=response.status_code,
            reason=response.reason,
            headers=response_headers(response),
        )
    )
    while True:
        event = await _read_upstream(upstream)
        if isinstance(event, h11.Data):
            log.received_bytes += len(event.data)
            traffic.count(len(event.data))
            await client.send(h11.Data(data=event.data))
        else:
            assert isinstance(event, h11.EndOfMessage), event
            await client.send(h11.EndOfMessage())
            return


async def pass_tunnel(
    outside: SocketStream, upstream: SocketStream, log: Exchange, traffic: Traffic
) -> None:
    """Both directions, unseen, until both have ended. `log` gets the counts."""

    async def copy(source: SocketStream, sink: SocketStream, field: str) -> None:
        while data := await source.read():
            setattr(log, field, getattr(log, field) + len(data))
            traffic.count(len(data))
            await sink.write(data)
        await sink.end()

    up = asyncio.create_task(copy(outside, upstream, "sent_bytes"))
    down = asyncio.create_task(copy(upstream, outside, "received_bytes"))
    try:
        async with asyncio.timeout(traffic.limits.exchange_s):
            await asyncio.gather(up, down)
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _send_upstream(upstream: HttpPeer, event: h11.Event) -> bool:
    """False: the server takes no more. It may have answered already."""
    try:
        await upstream.send(event)
    except OSError:
        return False
    return True


async def _read_upstream(upstream: HttpPeer) -> h11.Event | type[h11.PAUSED]:
    """The next part of the answer. Raises UpstreamError."""
    try:
        return await upstream.event()
    except (OSError, h11.RemoteProtocolError) as error:
        what = str(error) or "nothing came for too long"
        raise UpstreamError(f"the server broke off: {what}") from error


async def answer(client: HttpPeer, status: int, line: str, reason: str) -> None:
    """One line of text, where an answer is still possible; the connection ends with it."""
    if not client.can_answer():
        return
    text = line.encode("ascii", "replace").translate(None, b"\r\n\0")
    body = text + b"\n"
    headers = [
        ("content-type", "text/plain"),
        ("content-length", str(len(body))),
        ("connection", "close"),
        ("x-egress-reason", reason),
    ]
    # Of the answer to CONNECT, clients show only the status line.
    phrase = text[:400] if client.method == b"CONNECT" else http.HTTPStatus(status).phrase.encode()
    events: list[h11.Event] = [h11.Response(status_code=status, headers=headers, reason=phrase)]
    if client.method != b"HEAD":
        events.append(h11.Data(data=body))
    await client.send(*events, h11.EndOfMessage())


async def linger(stream: SocketStream) -> None:
    """Read what a client still sends: closing on it would take our answer from it."""
    await stream.end()
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (data := await stream.read()):
                left -= len(data)
