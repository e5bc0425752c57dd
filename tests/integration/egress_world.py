"""Servers on loopback, a proxy in front of them, and clients: the world of the egress tests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import ssl
import tempfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import h11
import httpx

from megacomposer.env.audit import AuditLog
from megacomposer.env.egress.policy import EgressPolicy
from megacomposer.env.egress.proxy import EgressProxy, ProxyLimits
from megacomposer.env.egress.tls import CertificateAuthority
from megacomposer.env.task import EgressRule

NAMES = {"pkg.test", "api.test", "wrong.test"}
BLOCK = bytes(range(256)) * 256


class Origin:
    """A web server that remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.port = 0
        self.sent_bytes = 0
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await self._one(reader, writer)
        except (OSError, h11.RemoteProtocolError):
            pass  # the proxy hung up: some tests want that
        finally:
            self.open -= 1
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)

        async def event() -> Any:
            while (found := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(65536))
            return found

        async def send(*events: Any) -> None:
            for item in events:
                writer.write(http.send(item) or b"")
            await writer.drain()

        request = await event()
        if not isinstance(request, h11.Request):
            return
        headers = {n.decode(): v.decode("latin-1") for n, v in request.headers}
        target = request.target.decode()
        entry = {"method": request.method.decode(), "target": target, "headers": headers, "body": 0}
        self.seen.append(entry)
        if target == "/early":
            await send(h11.Response(status_code=413, headers=[("content-length", "0")]))
            await send(h11.EndOfMessage())
            while not isinstance(await event(), h11.EndOfMessage | h11.ConnectionClosed):
                pass  # closing on unread bytes would take the answer back
            return
        if http.they_are_waiting_for_100_continue:
            await send(h11.InformationalResponse(status_code=100, headers=[]))
        while not isinstance(part := await event(), h11.EndOfMessage):
            entry["body"] += len(part.data)
        if target.startswith("/stream/"):
            count = int(target.rpartition("/")[2])
            await send(h11.Response(status_code=200, headers=[]))
            for _ in range(count):
                await send(h11.Data(data=BLOCK))
                self.sent_bytes += len(BLOCK)
            await send(h11.EndOfMessage())
        elif target == "/cut":
            await send(h11.Response(status_code=200, headers=[("content-length", "1000")]))
            await send(h11.Data(data=b"x" * 10))
        elif target == "/silent":
            await asyncio.sleep(3600)
        elif target == "/huge-head":
            await send(h11.Response(status_code=200, headers=[("x", "y" * 200_000)]))
            await send(h11.EndOfMessage())
        else:
            body = self.files.get(target) or json.dumps(entry).encode()
            kind = "text/html" if target.endswith("/") else "application/octet-stream"
            length = [("content-length", str(len(body))), ("x-origin", "yes")]
            length.append(("content-type", kind))
            await send(h11.Response(status_code=200, headers=length))
            await send(
                *([h11.Data(data=body)] if request.method != b"HEAD" else []), h11.EndOfMessage()
            )


class World:
    """`http` and `https` are origins; `proxy` stands before them; `tcp_port` leads to it, as the
    agent process inside a sandbox does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.http, self.https = Origin(), Origin()
        self.audit = AuditLog()
        self.proxy: EgressProxy
        self.tcp_port = 0
        self.lookups: list[str] = []
        self.ca_path = folder / "bundle.pem"

    async def resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        if host in NAMES:
            return ["127.0.0.1"]
        raise OSError(f"no such name: {host}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.tcp_port}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.audit.events if event["kind"] == kind]

    async def raw(self, data: bytes) -> bytes:
        """Send bytes to the proxy; all that it answers until it closes."""
        reader, writer = await asyncio.open_unix_connection(str(self.proxy.socket))
        writer.write(data)
        try:
            async with asyncio.timeout(30):
                return await reader.read(-1)
        finally:
            writer.close()


Rules = Callable[[World], Sequence[EgressRule]]


@contextlib.asynccontextmanager
async def world(
    rules: Rules,
    *,
    limits: ProxyLimits | None = None,
    resolve: Callable[[str, int], Awaitable[list[str]]] | None = None,
    allow: Sequence[str] = ("127.0.0.1/32",),
) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as name:
        place = World(Path(name))
        authority = CertificateAuthority()
        (place.folder / "test-ca.pem").write_text(authority.certificate_pem)
        tls = authority.context("pkg.test")
        http = await asyncio.start_server(place.http.serve, "127.0.0.1", 0)
        https = await asyncio.start_server(place.https.serve, "127.0.0.1", 0, ssl=anyname(tls))
        place.http.port = http.sockets[0].getsockname()[1]
        place.https.port = https.sockets[0].getsockname()[1]
        policy = EgressPolicy(rules(place), allow_addresses=allow)
        place.proxy = EgressProxy(
            policy,
            place.folder / "egress.sock",
            sandbox="s1",
            record=place.audit.record,
            limits=limits,
            resolve=resolve or place.resolve,
            upstream_ca_path=str(place.folder / "test-ca.pem"),
        )
        async with place.proxy:
            place.ca_path.write_text(place.proxy.ca_certificate_pem)
            forward = await asyncio.start_server(
                lambda r, w: _forward(r, w, place.proxy.socket), "127.0.0.1", 0
            )
            place.tcp_port = forward.sockets[0].getsockname()[1]
            try:
                yield place
            finally:
                for server in (forward, http, https):
                    server.close()
        assert not place.proxy.socket.exists()


def anyname(context: ssl.SSLContext) -> ssl.SSLContext:
    """A server that shows its one certificate whatever name it is called by."""
    context.sni_callback = lambda *_: None
    return context


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: Path
) -> None:
    back, out = await asyncio.open_unix_connection(str(socket))

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.write_eof()

    with contextlib.suppress(asyncio.CancelledError):  # the test has ended
        await asyncio.gather(copy(reader, out), copy(back, writer))
    out.close()
    writer.close()


def plain(w: World) -> Sequence[EgressRule]:
    return [EgressRule(host="pkg.test", ports=(w.http.port,), methods=("GET", "HEAD", "POST"))]


def both(w: World) -> Sequence[EgressRule]:
    ports = (w.http.port, w.https.port)
    return [EgressRule(host="pkg.test", ports=ports, deny_paths=("/secret/*",))]


def opaque(w: World) -> Sequence[EgressRule]:
    ports = (w.http.port, w.https.port)
    return [EgressRule(host="pkg.test", ports=ports, methods=("*",))]


def client(w: World) -> httpx.AsyncClient:
    trust = ssl.create_default_context(cafile=str(w.ca_path)) if w.ca_path.read_text() else True
    return httpx.AsyncClient(proxy=w.url, verify=trust, timeout=30, trust_env=False)


def tiny_wheel(name: str) -> bytes:
    """A package without code, version 1.0."""
    info = f"{name}-1.0.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return packed.getvalue()
