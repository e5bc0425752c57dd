"""What the egress proxy reads from an HTTP head, and which headers go on from it."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import Any

import h11

from megacomposer.env.egress.policy import split_authority
from megacomposer.env.task import EgressRule

_PATH_SHOWN_CHARACTERS = 500
# RFC 9110 section 7.6.1, and what would tell an upstream server who asks.
_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-authentication-info",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"http2-settings",
    b"expect",
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-proto",
    b"via",
    b"alt-svc",
}

Headers = list[tuple[bytes, bytes]]


class RefusedError(Exception):
    """Answered with `status` and one line; the audit log gets `reason`, one word."""

    def __init__(self, reason: str, advice: str, *, status: int = 403) -> None:
        super().__init__(advice)
        self.reason, self.advice, self.status = reason, advice, status


class UpstreamError(Exception):
    """Allowed, but the server could not be reached, or broke off. Answered with 502."""


@dataclasses.dataclass(kw_only=True)
class Exchange:
    """One request or tunnel, as it becomes one audit event."""

    method: str
    host: str = ""
    port: int = 0
    path: str = ""
    """As sent, without the query."""
    rule: str = ""
    reason: str = ""
    """Why it was refused; "" where it was not."""
    status: int = 0
    """Of the answer; 0 where none was given."""
    sent_bytes: int = 0
    """Of the request's body, or up the tunnel."""
    received_bytes: int = 0
    error: str = ""
    """Allowed, but it went wrong: how."""

    def details(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def shown(self) -> str:
        """For the line that an agent reads."""
        where = f"{self.host}:{self.port}" if self.host else "?"
        return f"{self.method} {where}{self.path}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tunnel:
    """Inside of a CONNECT that the proxy looks into."""

    scheme: str
    host: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a request goes."""

    scheme: str
    host: str
    port: int
    path: str
    """With its query: the request target of the request that is sent on."""

    @property
    def authority(self) -> bytes:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return (host if self.port == usual else f"{host}:{self.port}").encode("ascii")


def check_head(request: h11.Request) -> None:
    """Raises RefusedError for what could be read in two ways, and for protocol changes."""
    headers = dict(request.headers)
    if b"transfer-encoding" in headers and (
        b"content-length" in headers or request.http_version < b"1.1"
    ):
        raise RefusedError("smuggling", "a request has one length, not two", status=400)
    if b"websocket" in headers.get(b"upgrade", b"").lower():
        raise RefusedError("websocket", "WebSockets are not allowed here; use plain requests")


def read_target(request: h11.Request, tunnel: Tunnel | None) -> Target:
    """Raises RefusedError where the head is no request that a proxy can take."""
    raw = request.target.decode("ascii")
    host_header = dict(request.headers).get(b"host", b"").decode("latin-1")
    absolute = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?]*)(.*)", raw)
    try:
        if tunnel:
            if not raw.startswith("/"):
                raise ValueError("give only a path inside a tunnel")
            usual = 443 if tunnel.scheme == "https" else 80
            host, port = split_authority(host_header, usual)
            if (host, port) != (tunnel.host, tunnel.port):
                where = f"{tunnel.host}:{tunnel.port}"
                raise RefusedError(
                    "host_mismatch",
                    f"the Host header names {host}:{port}, but the tunnel goes to {where}",
                )
            return Target(scheme=tunnel.scheme, host=host, port=port, path=raw)
        if absolute:
            if absolute[1].lower() != "http":
                raise ValueError("for https:// open a tunnel with CONNECT")
            host, port = split_authority(absolute[2], 80)
            path = absolute[3] if absolute[3].startswith("/") else "/" + absolute[3]
            return Target(scheme="http", host=host, port=port, path=path)
        if not raw.startswith("/"):
            raise ValueError("the target of a request is http://HOST/PATH")
        host, port = split_authority(host_header, 80)
        return Target(scheme="http", host=host, port=port, path=raw)
    except ValueError as error:
        raise RefusedError("malformed", str(error), status=400) from None


def shown_path(target: str) -> str:
    """For logs and messages: a query may hold secrets."""
    return target.partition("?")[0].partition("#")[0][:_PATH_SHOWN_CHARACTERS]


def request_headers(request: h11.Request, target: Target, rule: EgressRule) -> Headers:
    """Of the request that is sent on: its own connection, its own framing."""
    body: Headers = []
    for name, value in request.headers:
        if name in (b"content-length", b"transfer-encoding"):
            body = [(name, value)]
    dropped = _nominated(request.headers)
    kept = [
        (name, value)
        for name, value in request.headers
        if name not in _HOP_BY_HOP
        and name not in dropped
        and name not in (b"host", b"content-length")
        and not any(fnmatch.fnmatchcase(name.decode("latin-1"), p) for p in rule.drop_headers)
    ]
    return [(b"host", target.authority), *kept, *body, (b"connection", b"close")]


def response_headers(response: h11.Response) -> Headers:
    """Of the answer that is passed back; h11 frames it anew for the client."""
    headers = response.headers
    dropped = _nominated(headers) - {b"content-length"}
    if any(name == b"transfer-encoding" for name, _ in headers):
        dropped |= {b"content-length"}
    return [(n, v) for n, v in headers if n not in _HOP_BY_HOP and n not in dropped]


def _nominated(headers: Any) -> set[bytes]:
    """Names that a Connection header declares as meant for the next hop only."""
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }
