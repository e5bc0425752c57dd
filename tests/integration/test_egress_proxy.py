"""The egress proxy against real servers on loopback, by real clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
import sys
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest
from egress_world import BLOCK, World, both, client, opaque, plain, tiny_wheel, world

from megacomposer.env.egress.policy import package_index_rules, proxy_environment
from megacomposer.env.egress.proxy import EgressProxy, ProxyLimits
from megacomposer.env.task import EgressRule


def test_plain_http_is_allowed_denied_and_logged() -> None:
    async def main() -> None:
        async with world(plain) as w, client(w) as http:
            url = f"http://pkg.test:{w.http.port}"
            good = await http.get(url + "/a?token=x", headers={"Authorization": "canary"})
            assert (good.status_code, good.headers["x-origin"]) == (200, "yes")
            assert good.json()["target"] == "/a?token=x"
            bad = await http.get("http://other.test/a")
            assert bad.status_code == 403
            assert bad.text.count("\n") == 1
            assert "only these hosts can be reached: pkg.test" in bad.text
            assert (await http.put(url, content=b"x")).status_code == 403
            assert len(w.http.seen) == 1
            assert w.lookups == ["pkg.test"], "a denied name must not even be looked up"
            [allowed] = w.events("egress_allowed")
            assert allowed["sandbox"] == "s1"
            assert (allowed["method"], allowed["host"], allowed["path"]) == (
                "GET",
                "pkg.test",
                "/a",
            )
            assert allowed["received_bytes"] == len(good.content)
            assert allowed["rule"] == f"pkg.test:{w.http.port}/GET,HEAD,POST"
            assert [e["reason"] for e in w.events("egress_denied")] == ["host", "method"]
            assert "token" not in json.dumps(w.audit.events)

    asyncio.run(main())


def test_credentials_and_hop_headers_do_not_leave() -> None:
    async def main() -> None:
        async with world(plain) as w:
            port = w.http.port
            answer = await w.raw(
                b"GET http://pkg.test:%d/ HTTP/1.1\r\nHost: evil.test\r\nAuthorization: canary\r\n"
                b"Cookie: canary\r\nProxy-Authorization: canary\r\nX-Secret: canary\r\n"
                b"Connection: close, X-Secret\r\nKeep-Alive: 9\r\nVia: canary\r\n"
                b"Upgrade: h2c\r\nX-Kept: yes\r\n\r\n" % port
            )
            assert answer.startswith(b"HTTP/1.1 200")
            headers = w.http.seen[0]["headers"]
            assert headers == {
                "host": f"pkg.test:{port}",
                "x-kept": "yes",
                "connection": "close",
            }

    asyncio.run(main())


def test_https_is_held_to_paths_and_methods_and_headers() -> None:
    async def main() -> None:
        async with world(both) as w, client(w) as http:
            url = f"https://pkg.test:{w.https.port}"
            good = await http.get(url + "/open", headers={"Cookie": "canary"})
            assert good.status_code == 200
            assert "cookie" not in w.https.seen[0]["headers"]
            denied = await http.get(url + "/secret/x")
            assert denied.status_code == 403
            assert "withheld from this task" in denied.text
            assert (await http.post(url + "/open", content=b"x")).status_code == 403
            assert (await http.head(url + "/open")).status_code == 200
            assert [e["method"] for e in w.https.seen] == ["GET", "HEAD"]
            assert [e["reason"] for e in w.events("egress_denied")] == ["denied_path", "method"]

    asyncio.run(main())


def test_a_client_that_does_not_trust_the_authority_is_logged_not_served() -> None:
    async def main() -> None:
        async with world(both) as w:
            async with httpx.AsyncClient(proxy=w.url, trust_env=False) as http:
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"https://pkg.test:{w.https.port}/open")
            while not w.events("egress_denied"):
                await asyncio.sleep(0.01)
            assert w.events("egress_denied")[0]["reason"] == "tls"
            assert w.https.seen == []

    asyncio.run(main())


def test_a_server_with_the_wrong_certificate_is_never_trusted() -> None:
    def rules(w: World) -> Sequence[EgressRule]:
        return [EgressRule(host="wrong.test", ports=(w.https.port,))]

    async def main() -> None:
        async with world(rules) as w, client(w) as http:
            answer = await http.get(f"https://wrong.test:{w.https.port}/")
            assert answer.status_code == 502
            assert "certificate is not valid" in answer.text
            assert w.https.seen == []
            assert "certificate" in w.events("egress_allowed")[0]["error"]

    asyncio.run(main())


def test_a_rule_without_conditions_passes_the_servers_own_certificate() -> None:
    async def main() -> None:
        async with world(opaque) as w:
            assert w.proxy.ca_certificate_pem == ""
            trust = ssl.create_default_context(cafile=str(w.folder / "test-ca.pem"))
            async with httpx.AsyncClient(proxy=w.url, verify=trust, trust_env=False) as http:
                url = f"https://pkg.test:{w.https.port}/x"
                answer = await http.delete(url, headers={"Authorization": "mine"})
                assert answer.status_code == 200
            assert w.https.seen[0]["headers"]["authorization"] == "mine"
            while not w.events("egress_allowed"):
                await asyncio.sleep(0.01)
            [event] = w.events("egress_allowed")
            assert (event["method"], event["path"]) == ("CONNECT", "")
            assert event["received_bytes"] > len(answer.content)

    asyncio.run(main())


def test_a_denied_tunnel_says_why_in_its_status_line() -> None:
    async def main() -> None:
        async with world(both) as w:
            answer = await w.raw(b"CONNECT other.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n")
            first = answer.partition(b"\r\n")[0]
            assert first.startswith(b"HTTP/1.1 403 egress denied: CONNECT other.test:443: only")

    asyncio.run(main())


def test_a_client_that_sends_only_a_host_header_is_served() -> None:
    async def main() -> None:
        async with world(plain) as w:
            host = b"pkg.test:%d" % w.http.port
            answer = await w.raw(b"GET /x HTTP/1.0\r\nHost: %s\r\n\r\n" % host)
            assert b" 200 " in answer.partition(b"\r\n")[0]
            assert w.http.seen[0]["target"] == "/x"

    asyncio.run(main())


def test_uploads_chunked_and_counted_pass_and_endless_ones_are_cut() -> None:
    async def body(blocks: int) -> AsyncIterator[bytes]:
        for _ in range(blocks):
            yield BLOCK

    async def main() -> None:
        limits = ProxyLimits(request_body_bytes=4 * len(BLOCK))
        async with world(plain, limits=limits) as w, client(w) as http:
            url = f"http://pkg.test:{w.http.port}/"
            for content in (BLOCK * 3, body(4)):
                assert (await http.post(url, content=content)).status_code == 200
            assert [e["body"] for e in w.http.seen] == [3 * len(BLOCK), 4 * len(BLOCK)]
            assert (await http.post(url, content=body(5))).status_code == 413
            assert (await http.post(url + "early", content=body(4))).status_code == 413
            waits = await w.raw(
                b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n"
                b"Content-Length: 2\r\n\r\nhi" % url.encode()
            )
            assert b"200 " in waits

    asyncio.run(main())


def test_a_long_answer_is_streamed_not_stored() -> None:
    async def main() -> None:
        async with world(plain) as w:
            reader, writer = await asyncio.open_unix_connection(str(w.proxy.socket), limit=4096)
            url = b"http://pkg.test:%d/stream/2000" % w.http.port
            writer.write(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % url)
            await reader.readline()
            seen = -1
            while seen != w.http.sent_bytes or not seen:  # until the server is held back
                seen = w.http.sent_bytes
                await asyncio.sleep(0.3)
            total = 2000 * len(BLOCK)
            assert seen < total / 4
            got = 0
            while got < total and (data := await reader.read(1 << 20)):
                got += len(data)
            assert w.http.sent_bytes == total
            writer.close()

    asyncio.run(main())


def test_many_requests_at_once_are_each_answered_and_logged_once() -> None:
    async def main() -> None:
        async with world(both) as w, client(w) as http:

            async def ask(i: int) -> tuple[int, int]:
                scheme, port = ("http", w.http.port) if i % 2 else ("https", w.https.port)
                path = f"/secret/{i}" if i % 3 == 0 else f"/open/{i}"
                answer = await http.get(f"{scheme}://pkg.test:{port}{path}")
                if answer.status_code == 200:
                    assert answer.json()["target"] == path
                return i, answer.status_code

            answers = await asyncio.gather(*(ask(i) for i in range(300)))
            assert all(status == (403 if i % 3 == 0 else 200) for i, status in answers)
            assert len(w.events("egress_allowed")) == 200
            assert len(w.events("egress_denied")) == 100

    asyncio.run(main())


def test_closing_the_proxy_cuts_connections_and_logs_them() -> None:
    async def main() -> None:
        async with world(plain) as w:
            _, writer = await asyncio.open_unix_connection(str(w.proxy.socket))
            url = b"http://pkg.test:%d/silent" % w.http.port
            writer.write(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % url)
            while not w.http.seen:
                await asyncio.sleep(0.01)
            await w.proxy.close()
            assert w.events("egress_allowed")[0]["error"] == "the proxy was closed"
            writer.close()

    asyncio.run(main())


def test_a_socket_path_that_the_kernel_cannot_take_is_refused_by_name() -> None:
    async def main() -> None:
        async with world(plain) as w:
            with pytest.raises(ValueError, match="socket"):
                EgressProxy(w.proxy.policy, w.folder / ("x" * 108))

    asyncio.run(main())


def test_pip_and_curl_install_other_packages_but_not_the_tasks_own() -> None:
    """H4: real clients, by nothing but the environment variables."""

    def rules(w: World) -> Sequence[EgressRule]:
        made = package_index_rules(
            deny_packages=("my-pkg",), index_host="pkg.test", files_host="pkg.test"
        )
        return [dataclasses.replace(rule, ports=(w.https.port,)) for rule in made]

    async def run(w: World, *argv: str) -> tuple[int, str]:
        env = proxy_environment(w.tcp_port, str(w.ca_path)) | {"PATH": "/usr/bin:/bin"}
        pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=pipe, stderr=out)
        text, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, text.decode(errors="replace")

    async def main() -> None:
        async with world(rules) as w:
            base = f"https://pkg.test:{w.https.port}"
            for name in ("other", "my_pkg"):
                wheel = f"/packages/a/b/c/{name}-1.0-py3-none-any.whl"
                w.https.files[wheel] = tiny_wheel(name)
                page = f'<a href="{wheel}">{wheel.rpartition("/")[2]}</a>'.encode()
                w.https.files[f"/simple/{name.replace('_', '-')}/"] = page
            pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--retries=0")
            pip += ("--no-cache-dir", "--disable-pip-version-check", "-d", str(w.folder))
            code, text = await run(w, *pip, "--index-url", base + "/simple/", "other")
            assert code == 0, text
            code, text = await run(w, *pip, "--index-url", base + "/simple/", "my-pkg")
            assert code != 0
            wheel = "/packages/a/b/c/my_pkg-1.0-py3-none-any.whl"
            code, text = await run(w, *pip, base + wheel)
            assert (code != 0, "403" in text) == (True, True), text
            for path in ("/simple/My_Pkg/", wheel, "/simple/x/../my-pkg/"):
                code, text = await run(w, "curl", "-sS", "--path-as-is", base + path)
                assert code == 0
                assert text.startswith("egress denied"), text
            code, text = await run(w, "curl", "-sS", "https://evil.test/")
            assert (code, "403" in text) == (56, True)
            assert not [e for e in w.https.seen if "my" in e["target"]]

    asyncio.run(main())
