"""The HTTP protocol of E2B-compatible sandbox services: control plane, and `envd` inside.

Written from the public descriptions of E2B (`spec/openapi.yml`, `spec/envd`) and of AgentENV
(kvcache-ai, `src/api/spec`), which serves the same protocol over Firecracker microVMs. The control
plane is REST with `X-API-Key`. `envd` speaks Connect RPC in JSON: a stream is a sequence of
envelopes, one byte of flags and a big-endian length before each message.

A connection that breaks, or a stream without its end, is a SandboxError: never an exit code.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import signal
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from megacomposer.env.sandbox import SandboxClosedError, SandboxError, SnapshotError

ENVD_PORT = 49983
KEEPALIVE_S = 30
"""How often `envd` sends something on a silent stream."""
_READ_TIMEOUT_S = 3.0 * KEEPALIVE_S
_ENVELOPE = struct.Struct(">BI")
_END_OF_STREAM = 2
_MESSAGE_LIMIT_BYTES = 8 << 20
_ATTEMPTS = 5
_RETRY_AFTER_LIMIT_S = 60.0
_BUSY = (429, 503)
_SIGNALS = {(signal.strsignal(number) or "").lower(): number for number in signal.valid_signals()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """Where a service is, and the key for it."""

    api_url: str
    """Of the control plane, such as https://api.e2b.app."""
    sandbox_url: str
    """Of the proxy to the sandboxes, which finds one by the E2b-Sandbox-Id header; "" for a host
    name per sandbox."""
    domain: str
    """The end of those host names; a service may name another one per sandbox."""
    api_key: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A running microVM."""

    id: str
    url: str
    token: str | None
    domain: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended."""

    code: int
    """128 + signal where a signal ended it."""
    signaled: bool


class PausedError(SandboxError):
    """409: the machine is paused, or just changing its state."""


class E2bClient:
    """Requests to one service. SandboxError for all that goes wrong on the way."""

    def __init__(self, service: Service) -> None:
        self._service = service
        timeout = httpx.Timeout(60.0, read=_READ_TIMEOUT_S)
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=True)

    async def close(self) -> None:
        await self._http.aclose()

    async def create(self, body: Mapping[str, Any]) -> Machine:
        """SnapshotError where `templateID` is unknown."""
        try:
            return self._machine(await self.call("POST", "/sandboxes", body))
        except SandboxClosedError as error:
            raise SnapshotError(f"template {body.get('templateID')}: {error}") from error

    async def fork(self, machine: Machine, body: Mapping[str, Any]) -> Machine:
        results = await self.call("POST", f"/sandboxes/{machine.id}/fork", body)
        result = results[0] if isinstance(results, list) and results else {}
        if "sandbox" not in result:
            reason = result.get("error", {}).get("message", f"unexpected answer {results!r}"[:300])
            raise SandboxError(f"sandbox {machine.id} was not forked: {reason}")
        return self._machine(result["sandbox"])

    async def delete(self, machine: Machine) -> None:
        """Also where it has ended already."""
        try:
            await self.call("DELETE", f"/sandboxes/{machine.id}")
        except SandboxClosedError:
            return

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """A request of the control plane; waits and repeats it where the service is busy."""
        headers = {"X-API-Key": self._service.api_key}
        for attempt in range(_ATTEMPTS):
            try:
                response = await self._http.request(
                    method, self._service.api_url + path, json=body, headers=headers
                )
            except httpx.HTTPError as error:
                raise SandboxError(f"{method} {path}: {_text(error)}") from error
            if response.status_code not in _BUSY or attempt == _ATTEMPTS - 1:
                break
            await asyncio.sleep(_retry_after_s(response, attempt))
        _raise_for_status(response, f"{method} {path}")
        try:
            return response.json() if response.content else None
        except json.JSONDecodeError as error:
            raise SandboxError(f"{method} {path}: the answer is no JSON") from error

    async def read_file(
        self, machine: Machine, path: str, *, user: str, max_bytes: int
    ) -> bytes | int:
        """The content, or the HTTP status; 413 where it is longer than `max_bytes`."""
        data = bytearray()
        try:
            async with self._http.stream(
                "GET",
                f"{machine.url}/files",
                params={"path": path, "username": user},
                headers=self._envd_headers(machine, user),
            ) as response:
                _raise_for_status(response, f"read {path}", allow=(400, 403, 404, 500))
                if response.status_code != 200:
                    return response.status_code
                async for block in response.aiter_bytes():
                    data += block
                    if len(data) > max_bytes:
                        return 413
        except httpx.HTTPError as error:
            raise SandboxError(f"reading {path}: {_text(error)}") from error
        return bytes(data)

    async def write_file(self, machine: Machine, path: str, data: bytes, *, user: str) -> int:
        """Makes parents too; the HTTP status (507: no space)."""
        try:
            response = await self._http.post(
                f"{machine.url}/files",
                params={"path": path, "username": user},
                headers=self._envd_headers(machine, user),
                files={"file": (path.rsplit("/", 1)[-1], data)},
            )
        except httpx.HTTPError as error:
            raise SandboxError(f"writing {path}: {_text(error)}") from error
        _raise_for_status(response, f"write {path}", allow=(400, 403, 500, 507))
        return response.status_code

    async def start_process(
        self, machine: Machine, process: Mapping[str, Any], *, user: str
    ) -> AsyncIterator[tuple[str, bytes] | Exit]:
        """Runs a process: ("stdout" or "stderr", bytes) as they come, then one Exit.

        Raises PausedError where it was not started since the machine is paused.
        """
        body = json.dumps({"process": process}).encode()
        headers = {
            **self._envd_headers(machine, user),
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": str(KEEPALIVE_S),
        }
        try:
            async with self._http.stream(
                "POST",
                f"{machine.url}/process.Process/Start",
                content=_ENVELOPE.pack(0, len(body)) + body,
                headers=headers,
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                _raise_for_status(response, "process.Process/Start")
                async for event in _events(response):
                    if "data" in event:
                        for stream in ("stdout", "stderr"):
                            if stream in event["data"]:
                                yield stream, base64.b64decode(event["data"][stream])
                    elif "end" in event:
                        yield _exit(event["end"])
                        return
        except httpx.HTTPError as error:
            raise SandboxError(
                f"the connection to a running command broke: {_text(error)}"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"the service sent no event of a process: {error}") from error
        raise SandboxError("the stream of a running command ended without its exit code")

    def _machine(self, answer: Any) -> Machine:
        try:
            domain = answer.get("domain") or self._service.domain
            url = self._service.sandbox_url or f"https://{ENVD_PORT}-{answer['sandboxID']}.{domain}"
            return Machine(
                id=answer["sandboxID"], url=url, token=answer.get("envdAccessToken"), domain=domain
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SandboxError(f"the service sent no sandbox: {answer!r}"[:300]) from error

    def _envd_headers(self, machine: Machine, user: str) -> dict[str, str]:
        headers = {
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
            "E2b-Sandbox-Id": machine.id,
            "E2b-Sandbox-Port": str(ENVD_PORT),
        }
        return headers | ({"X-Access-Token": machine.token} if machine.token else {})


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The `event` of each message. SandboxError for an error at the end of the stream."""
    buffer = bytearray()
    async for block in response.aiter_bytes():
        buffer += block
        while len(buffer) >= _ENVELOPE.size:
            flags, length = _ENVELOPE.unpack_from(buffer)
            if length > _MESSAGE_LIMIT_BYTES:
                raise SandboxError(f"the service sent a message of {length} bytes")
            if len(buffer) < _ENVELOPE.size + length:
                break
            message = json.loads(buffer[_ENVELOPE.size : _ENVELOPE.size + length])
            del buffer[: _ENVELOPE.size + length]
            if not flags & _END_OF_STREAM:
                yield message["event"]
            elif "error" in message:
                raise _rpc_error(message["error"], "the command")


def _exit(end: Mapping[str, Any]) -> Exit:
    # Go's words for a process that did not exit: "signal: killed", and a code of -1.
    status = str(end.get("status", ""))
    if not end.get("exited", False) and status.startswith("signal: "):
        name = status.removeprefix("signal: ").removesuffix(" (core dumped)")
        return Exit(code=128 + _SIGNALS.get(name, signal.SIGKILL), signaled=True)
    code = int(end.get("exitCode", 0))
    if not 0 <= code <= 255:
        raise SandboxError(f"a command ended with code {code} ({status or 'no status'})")
    return Exit(code=code, signaled=False)


def _raise_for_status(response: httpx.Response, what: str, *, allow: tuple[int, ...] = ()) -> None:
    status = response.status_code
    if status < 400 or status in allow:
        return
    reason = ""
    if response.is_closed:
        try:
            reason = response.json()["message"]
        except (ValueError, KeyError, TypeError):
            reason = response.text[:300]
    message = f"{what}: HTTP {status} {reason}".strip()
    if status in (401, 403):
        raise SandboxError(f"{message} (is E2B_API_KEY right for this service?)")
    if status == 409:
        raise PausedError(message)
    if status in (404, 502):  # 502: the proxy finds no running machine
        raise SandboxClosedError(message)
    raise SandboxError(message)


def _rpc_error(error: Mapping[str, Any], what: str) -> SandboxError:
    message = f"{what}: {error.get('code', 'unknown')}: {error.get('message', '')}"
    return SandboxError(message)


def _retry_after_s(response: httpx.Response, attempt: int) -> float:
    try:
        wanted_s = float(response.headers.get("Retry-After", ""))
    except ValueError:  # absent, or a date
        wanted_s = 0.5 * 2**attempt
    return min(max(wanted_s, 0.0), _RETRY_AFTER_LIMIT_S)


def _text(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()
