"""The egress proxy against clients and servers that mean ill, or break."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import httpx
import pytest
from egress_world import BLOCK, Rules, World, both, client, opaque, plain, world

from megacomposer.env.egress.proxy import ProxyLimits
from megacomposer.env.task import EgressRule


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "169.254.169.254",
        "[::1]",
        "[fd00:ec2::254]",
        "[::ffff:169.254.169.254]",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "127.1",
        "localhost",
        "metadata.google.internal",
    ],
)
def test_metadata_and_loopback_are_refused_in_every_spelling(host: str) -> None:
    """E14, E15: through requests and through tunnels, also where a rule names the address."""

    def rules(w: World) -> Sequence[EgressRule]:
        named = ("127.0.0.1", "169.254.169.254", "::1", "fd00:ec2::254", "::ffff:169.254.169.254")
        return [EgressRule(host=name, ports=(80,), methods=("*",)) for name in named]

    async def main() -> None:
        async with world(rules, allow=()) as w:
            name = host.encode()
            for head in (
                b"GET http://%s/latest/meta-data HTTP/1.1\r\n",
                b"CONNECT %s:80 HTTP/1.1\r\n",
            ):
                answer = await w.raw(head % name + b"Host: x\r\n\r\n")
                assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), answer
            denied = w.events("egress_denied")
            assert len(denied) == 2
            assert {e["reason"] for e in denied} <= {"address", "host", "malformed"}
            assert w.events("egress_allowed") == []
            assert w.lookups == []

    asyncio.run(main())


def test_a_name_that_is_rebound_to_an_inner_address_is_refused() -> None:
    answers = [
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["10.0.0.1", "::1"],
        ["192.168.1.1", "127.0.0.1"],
    ]

    async def resolve(host: str, port: int) -> list[str]:
        return answers.pop(0)

    async def main() -> None:
        async with world(plain, resolve=resolve) as w, client(w) as http:
            url = f"http://pkg.test:{w.http.port}/"
            statuses = [(await http.get(url)).status_code for _ in range(4)]
            assert statuses == [200, 403, 403, 200]
            assert answers == [], "one look-up a request: what was checked is what is dialled"
            assert [e["reason"] for e in w.events("egress_denied")] == ["address"] * 2

    asyncio.run(main())


def test_the_inside_of_a_tunnel_cannot_name_another_host() -> None:
    async def main() -> None:
        async with world(both) as w, client(w) as http:
            url = f"https://pkg.test:{w.https.port}/open"
            fronted = await http.get(url, headers={"Host": "api.test"})
            assert fronted.status_code == 403
            reader, writer = await asyncio.open_unix_connection(str(w.proxy.socket))
            writer.write(b"CONNECT pkg.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % w.https.port)
            await reader.readuntil(b"\r\n\r\n")
            trust = ssl.create_default_context(cafile=str(w.ca_path))
            with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
                await writer.start_tls(trust, server_hostname="api.test")
            assert w.https.seen == []
            connect = b"CONNECT pkg.test:%d HTTP/1.1\r\nHost: x\r\n\r\n" % w.http.port
            inner = b"GET /secret/x HTTP/1.1\r\nHost: pkg.test:%d\r\n\r\n" % w.http.port
            answer = await w.raw(connect + inner)
            assert b"HTTP/1.1 200" in answer
            assert b"HTTP/1.1 403" in answer, "plain HTTP in a tunnel is decided, too"
            assert w.http.seen == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
        ("Content-Length: 3\r\nContent-Length: 4\r\n", 400),
        ("Content-Length: +3\r\n", 400),
        ("Content-Length: 3, 4\r\n", 400),
        ("Transfer-Encoding: xchunked\r\n", 501),
        ("Transfer-Encoding: chunked, identity\r\n", 501),
        ("Transfer-Encoding : chunked\r\n", 400),
        ("X: a\r\n\tGET /secret\r\n Host : y\r\n\0: z\r\n", 400),
        ("Host: two.test\r\n", 400),
        ("Upgrade: websocket\r\nConnection: upgrade\r\n", 403),
        ("Content-Length: 99999999999\r\n", 413),
        ("X: " + "y" * 100_000 + "\r\n", 431),
        ("".join(f"X-{i}: {i}\r\n" for i in range(10_000)), 431),
    ],
)
def test_requests_that_can_be_read_two_ways_or_are_too_big_do_not_pass(
    lines: str, status: int
) -> None:
    async def main() -> None:
        async with world(plain) as w:
            port = w.http.port
            answer = await w.raw(
                f"POST http://pkg.test:{port}/ HTTP/1.1\r\nHost: pkg.test\r\n{lines}\r\n"
                f"0\r\n\r\nGET http://pkg.test:{port}/smuggled HTTP/1.1\r\n\r\n".encode()
            )
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:200]
            assert answer.count(b"HTTP/1.1") == 1
            assert w.http.seen == []
            assert len(w.events("egress_denied")) == 1

    asyncio.run(main())


def test_bytes_that_are_no_http_are_answered_and_closed() -> None:
    async def main() -> None:
        async with world(plain) as w:
            for junk in (
                b"\x16\x03\x01\x02\x00\x01",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\0" * 99,
            ):
                answer = await w.raw(junk + b"\r\n\r\n")
                assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
            for target in (b"/x", b"*", b"ftp://pkg.test/", b"https://pkg.test/", b"http://@/"):
                answer = await w.raw(b"GET %s HTTP/1.1\r\nHost: \r\n\r\n" % target)
                assert answer.startswith(b"HTTP/1.1 400"), answer
            for line in (b"pkg.test", b"pkg.test:0", b"a@pkg.test:443", b"http://pkg.test:443"):
                answer = await w.raw(b"CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n" % line)
                assert answer.startswith(b"HTTP/1.1 400"), answer

    asyncio.run(main())


def test_a_client_that_vanishes_ends_the_download_and_is_logged() -> None:
    async def main() -> None:
        async with world(plain) as w:
            _, writer = await asyncio.open_unix_connection(str(w.proxy.socket))
            url = b"http://pkg.test:%d/stream/100000" % w.http.port
            writer.write(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % url)
            while not w.http.sent_bytes:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while w.http.open or not w.events("egress_allowed"):
                await asyncio.sleep(0.01)
            assert "client went away" in w.events("egress_allowed")[0]["error"]

    asyncio.run(main())


def test_slow_clients_and_silent_servers_are_cut_off() -> None:
    async def main() -> None:
        limits = ProxyLimits(head_s=0.5, idle_s=0.5)
        async with world(plain, limits=limits) as w, client(w) as http:
            assert await w.raw(b"GET http://pkg.test/ HTTP/1.1\r\nHo") == b""
            silent = await http.get(f"http://pkg.test:{w.http.port}/silent")
            assert silent.status_code == 502
            assert "nothing came" in silent.text

    asyncio.run(main())


def test_an_answer_that_breaks_off_does_not_look_complete() -> None:
    async def main() -> None:
        async with world(plain) as w, client(w) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get(f"http://pkg.test:{w.http.port}/cut")
            huge = await http.get(f"http://pkg.test:{w.http.port}/huge-head")
            assert huge.status_code == 502
            errors = [e["error"] for e in w.events("egress_allowed")]
            assert all("broke off" in error for error in errors)

    asyncio.run(main())


def test_connections_beyond_the_cap_are_turned_away_and_room_is_made_again() -> None:
    async def main() -> None:
        async with world(plain, limits=ProxyLimits(connections=4)) as w, client(w) as http:
            held = [await asyncio.open_unix_connection(str(w.proxy.socket)) for _ in range(4)]
            await asyncio.sleep(0)
            url = b"http://pkg.test:%d/" % w.http.port
            over = await w.raw(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % url)
            assert over.startswith(b"HTTP/1.1 503")
            for _, writer in held:
                writer.close()
                await writer.wait_closed()
            while (await http.get(url.decode())).status_code != 200:
                await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.parametrize("rules", [both, opaque])
def test_a_tasks_byte_budget_ends_its_traffic(rules: Rules) -> None:
    async def main() -> None:
        limits = ProxyLimits(budget_bytes=10 * len(BLOCK))
        async with world(rules, limits=limits) as w:
            w.ca_path.write_text(w.ca_path.read_text() + (w.folder / "test-ca.pem").read_text())
            async with client(w) as http:
                url = f"https://pkg.test:{w.https.port}"
                first = await http.get(url + "/stream/5", headers={"Connection": "close"})
                assert first.status_code == 200
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    await http.get(url + "/stream/1000")
                plain = await http.get(f"http://pkg.test:{w.http.port}/")
                assert (plain.status_code, "traffic" in plain.text) == (403, True)
            while w.https.open:
                await asyncio.sleep(0.01)
            assert {e["reason"] for e in w.events("egress_denied")} == {"budget"}
            assert w.https.sent_bytes < 500 * len(BLOCK)

    asyncio.run(main())
