"""There is no network but the policy proxy: E14-E16, E18, E19 of the escape suite."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacomposer.env.sandbox import EGRESS_PORT, Limits
from megacomposer.env.task import EgressRule
from sandbox_cases import CANARY, PROBE, Box, Host

UNREACHABLE = {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "EPERM", "EADDRNOTAVAIL"}
REFUSED = {"EPERM", "EACCES", "EAFNOSUPPORT"}
# Not in /usr: it is the host's, read-only, and long to walk in gVisor.
FIND_SOCKETS = "find / \\( -path /usr -o -path /proc -o -path /sys \\) -prune -o -type s -print"


@contextlib.contextmanager
def canary_servers() -> Iterator[tuple[int, str, list[socket.socket]]]:
    """TCP and UDP on all addresses of the host, and an abstract Unix socket; none may be seen."""
    name = f"{CANARY}-abstract"
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        port = tcp.getsockname()[1]
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", port))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield port, name, [tcp, udp, abstract]


def own_addresses() -> list[str]:
    """The machine's own, and its gateway's."""
    found = ["127.0.0.1"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        found.append(probe.getsockname()[0])
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        destination, gateway = line.split()[1:3]
        if destination == "00000000":
            found.append(socket.inet_ntoa(bytes.fromhex(gateway)[::-1]))
    return found


def test_services_of_the_host_and_the_gateway_cannot_be_reached(box: Box) -> None:
    with canary_servers() as (port, name, servers):
        assert reached(box, port, *own_addresses()) <= UNREACHABLE
        assert box.probe("abstract", name)[0][1] == "ECONNREFUSED"
        assert select.select(servers, [], [], 0)[0] == []


def reached(box: Box, port: int, *addresses: str) -> set[str]:
    """The answers, by TCP and UDP."""
    answers = box.probe("reach", str(port), *addresses)
    assert len(answers) == 2 * len(addresses)
    return {answer for _, answer in answers}


def test_no_address_can_be_reached(box: Box) -> None:
    addresses = ("169.254.169.254", "8.8.8.8", "10.0.0.1", "::1", "fd00:ec2::254", "2001:4860::1")
    assert reached(box, 53, *addresses) <= UNREACHABLE
    assert reached(box, 80, *addresses) <= UNREACHABLE


def test_the_only_interface_is_its_own_loopback(box: Box) -> None:
    text = box.sh("cat /proc/net/dev").stdout.decode()
    assert re.findall(r"^ *(\w+):", text, re.MULTILINE) == ["lo"]


def test_one_sandbox_cannot_reach_a_service_in_another(host: Host, box: Box) -> None:
    port = "18080"
    with host.box() as other:
        other.probe("tty")
        ready = "while ! test -s /tmp/log; do sleep 0.1; done"
        assert other.sh(f"{PROBE} listen {port} >/tmp/log 2>&1 & {ready}").ok
        assert other.probe("reach", port, "127.0.0.1")[0] == ["tcp", "ok"]
        assert box.probe("reach", port, "127.0.0.1")[0] == ["tcp", "ECONNREFUSED"]


def test_names_are_resolved_by_nobody(box: Box) -> None:
    with canary_servers() as (_, _, servers):
        result = box.sh("getent hosts secret.evil.test; getent hosts localhost")
        assert b"evil" not in result.stdout
        assert b"nameserver" not in box.sh("cat /etc/resolv.conf").stdout
        assert reached(box, 53, "8.8.8.8", "127.0.0.53", "127.0.0.1") <= UNREACHABLE
        assert select.select(servers, [], [], 0)[0] == []


def test_raw_packet_and_foreign_sockets_are_refused(box: Box) -> None:
    answers = dict(box.probe("sockets"))
    assert len(answers) == 13
    assert set(answers.values()) <= REFUSED
    assert answers["packet"] == answers["raw_icmp"] == "EPERM"
    if box.host.backend == "bubblewrap":
        assert answers["vsock"] == answers["netlink_route"] == "EPERM"


def test_no_unix_socket_of_the_host_is_visible(box: Box) -> None:
    path = f"/tmp/{CANARY[:20]}.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        os.chmod(path, 0o777)
        try:
            names = (path, "/run/docker.sock", "/var/run/docker.sock", "/run/dbus/socket")
            assert {answer for _, answer in box.probe("unix", *names)} <= {"ENOENT", "EACCES"}
        finally:
            os.unlink(path)
    assert box.sh(FIND_SOCKETS).stdout == b""


@pytest.fixture(scope="module")
def proxied(host: Host) -> Iterator[Box]:
    """A sandbox with a proxy that lets one host through."""
    rules = (EgressRule(host="allowed.test", ports=(80, 443), methods=("GET",)),)
    egress_socket = host.submit("proxy", rules).result()
    with host.box(egress_socket=egress_socket, limits=Limits(processes=64)) as box:
        yield box


def ask(box: Box, *requests: str) -> list[str]:
    """The status of each answer of the proxy, to a request line and a Host header."""
    texts = [f"{request}\\nConnection: close\\n\\n" for request in requests]
    return [words[1] for words in box.probe("talk", "127.0.0.1", str(EGRESS_PORT), *texts)]


DENIED = (
    "169.254.169.254",
    "[::1]",
    "127.0.0.1",
    "localhost",
    "2852039166",
    "0251.0376.0251.0376",
    "0xa9fea9fe",
    "[::ffff:169.254.169.254]",
    "metadata.google.internal",
    "dns.google",
    "secret.evil.test",
    "allowed.test:8080",
)


@pytest.mark.parametrize("method", ["GET", "CONNECT"])
def test_the_proxy_refuses_and_records_denied_places(proxied: Box, method: str) -> None:
    seen = len(proxied.host.events("egress_denied"))
    names = [name if ":8080" in name else f"{name}:80" for name in DENIED]
    lines = names if method == "CONNECT" else [f"http://{name}/latest/meta-data/" for name in names]
    requests = [
        f"{method} {line} HTTP/1.1\\nHost: {name}" for line, name in zip(lines, names, strict=True)
    ]
    answers = ask(proxied, *requests)
    assert len(answers) == len(DENIED)
    assert set(answers) <= {"403", "400"}
    denied = proxied.host.events("egress_denied")[seen:]
    assert len(denied) == len(DENIED)
    assert all(event["reason"] for event in denied)


def test_the_proxys_socket_is_the_only_one(proxied: Box) -> None:
    sockets = proxied.sh(FIND_SOCKETS).stdout.split()
    assert len(sockets) <= 1
    with canary_servers() as (port, _, servers):
        assert reached(proxied, port, "127.0.0.1") <= UNREACHABLE
        assert select.select(servers, [], [], 0)[0] == []


def test_the_way_to_the_proxy_comes_back_when_a_command_kills_it(proxied: Box) -> None:
    proxied.sh("kill -9 -1", timeout_s=30)
    request = "GET http://denied.test/ HTTP/1.1\\nHost: denied.test"
    assert ask(proxied, request) == ["403"]
