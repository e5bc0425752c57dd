"""A small E2B-compatible service for tests: the real protocol, over sandboxes of this machine.

Control plane and `envd` on one port of 127.0.0.1, found by the E2b-Sandbox-Id header. Machines run
in a real backend; `faults` are what a test wants to go wrong.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import struct
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

from megacomposer.env.sandbox import (
    Sandbox,
    SandboxBackend,
    SandboxFileError,
    SandboxSpec,
    Snapshot,
    Status,
)

KEY = "e2b_test"


@dataclasses.dataclass
class Machine:
    sandbox: Sandbox
    token: str
    paused: bool = False
    timeout_s: int = 0


@dataclasses.dataclass
class Faults:
    busy: int = 0
    """How many requests are answered 429, with Retry-After 0."""
    drop_stream: bool = False
    """Close the connection in the middle of a command's output."""
    end_stream: str = ""
    """End a command's stream with this instead of its exit: "nothing" or "error"."""


@dataclasses.dataclass
class Answer:
    status: int
    body: bytes = b""


class E2bServer:
    def __init__(self, backend: SandboxBackend) -> None:
        self.backend = backend
        self.faults = Faults()
        self.machines: dict[str, Machine] = {}
        self.snapshots: dict[str, Snapshot] = {"base": Snapshot(layers=())}
        self.requests: list[str] = []
        self.url = ""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for machine in self.machines.values():
                await machine.sandbox.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        with contextlib.suppress(ConnectionError, h11.RemoteProtocolError, asyncio.CancelledError):
            while connection.our_state is h11.IDLE:
                body, request = bytearray(), None
                while True:
                    event = connection.next_event()
                    if event is h11.NEED_DATA:
                        connection.receive_data(await reader.read(65536))
                    elif isinstance(event, h11.Request):
                        request = event
                    elif isinstance(event, h11.Data):
                        body += event.data
                    else:
                        break
                if request is None:
                    break
                await self._answer(connection, request, bytes(body), writer)
                if connection.our_state is h11.MUST_CLOSE or connection.their_state is not h11.DONE:
                    break
                connection.start_next_cycle()
        writer.close()

    async def _answer(
        self,
        connection: h11.Connection,
        request: h11.Request,
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        headers = {name.decode(): value.decode() for name, value in request.headers}
        url = urlsplit(request.target.decode())
        self.requests.append(f"{request.method.decode()} {url.path}")
        if url.path == "/process.Process/Start":
            machine = self._machine(headers)
            if isinstance(machine, Machine):
                await self._stream(connection, machine, body, writer)
                return
            answer = machine
        elif url.path == "/files":
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            answer = await self._files(request.method, headers, query, body)
        else:
            answer = await self._control(request.method.decode(), url.path, headers, body)
        fields = [("Content-Length", str(len(answer.body))), ("Retry-After", "0")]
        writer.write(
            connection.send(h11.Response(status_code=answer.status, headers=fields))
            + connection.send(h11.Data(data=answer.body))
            + connection.send(h11.EndOfMessage())
        )
        await writer.drain()

    async def _control(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> Answer:
        if headers.get("x-api-key") != KEY:
            return failure(401, "invalid API key")
        if self.faults.busy:
            self.faults.busy -= 1
            return failure(429, "slow down")
        wanted = json.loads(body or b"{}")
        _, _, name, action = (*path.split("/"), "", "")[:4]
        if not name:
            base = self.snapshots.get(wanted["templateID"])
            if base is None:
                return failure(404, "template not found")
            return Answer(201, json.dumps(await self._boot(base, wanted["timeout"])).encode())
        machine = self.machines.get(name)
        if machine is None:
            return failure(404, "sandbox not found")
        if machine.paused and action in ("fork", "snapshots", "pause"):
            return failure(409, "sandbox is paused")
        if method == "DELETE":
            await self.machines.pop(name).sandbox.close()
            return Answer(204)
        if action == "":
            size = {"memoryMB": 512, "cpuCount": 2, "diskSizeMB": 1024, "sandboxID": name}
            return Answer(200, json.dumps(size).encode())
        if action in ("pause", "connect"):
            machine.paused = action == "pause"
            return Answer(204 if machine.paused else 201, b"" if machine.paused else b"{}")
        if action == "fork":
            forks = [
                {"sandbox": self._add(await machine.sandbox.fork(), wanted["timeout"])}
                for _ in range(wanted["count"])
            ]
            return Answer(201, json.dumps(forks).encode())
        assert action == "snapshots", path
        snapshot = f"snapshot-{uuid.uuid4().hex[:8]}"
        self.snapshots[snapshot] = await machine.sandbox.snapshot()
        return Answer(201, json.dumps({"snapshotID": snapshot, "names": []}).encode())

    async def _boot(self, base: Snapshot, timeout_s: int) -> dict[str, str]:
        return self._add(await self.backend.start(SandboxSpec(base=base)), timeout_s)

    def _add(self, sandbox: Sandbox, timeout_s: int) -> dict[str, str]:
        name, token = f"vm-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
        self.machines[name] = Machine(sandbox=sandbox, token=token, timeout_s=timeout_s)
        return {"sandboxID": name, "templateID": "base", "envdAccessToken": token}

    def _machine(self, headers: dict[str, str]) -> Machine | Answer:
        machine = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if machine is None:
            return failure(502, "the sandbox was not found")
        if headers.get("x-access-token") != machine.token:
            return failure(401, "wrong access token")
        return failure(409, "sandbox is paused") if machine.paused else machine

    async def _files(
        self, method: bytes, headers: dict[str, str], query: dict[str, str], body: bytes
    ) -> Answer:
        machine = self._machine(headers)
        if isinstance(machine, Answer):
            return machine
        try:
            if method == b"GET":
                return Answer(200, await machine.sandbox.read_file(query["path"]))
            boundary = b"--" + headers["content-type"].split("boundary=")[1].encode()
            part = body.split(b"\r\n\r\n", 1)[1].rsplit(b"\r\n" + boundary, 1)[0]
            await machine.sandbox.write_file(query["path"], part)
        except SandboxFileError as error:
            return failure({"ENOENT": 404, "ENOSPC": 507}.get(error.code, 400), str(error))
        return Answer(200, b"[{}]")

    async def _stream(
        self,
        connection: h11.Connection,
        machine: Machine,
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        process = json.loads(body[5:])["process"]
        fields = [("Content-Type", "application/connect+json"), ("Transfer-Encoding", "chunked")]
        writer.write(connection.send(h11.Response(status_code=200, headers=fields)))

        def send(message: dict[str, Any], flags: int = 0) -> None:
            data = json.dumps(message).encode()
            writer.write(
                connection.send(h11.Data(data=struct.pack(">BI", flags, len(data)) + data))
            )

        def on_output(stream: str, data: bytes) -> None:
            send({"event": {"data": {stream: base64.b64encode(data).decode()}}})
            if self.faults.drop_stream:
                writer.transport.abort()

        send({"event": {"start": {"pid": 7}}})
        send({"event": {"keepalive": {}}})
        result = await machine.sandbox.exec(
            [process["cmd"], *process["args"]],
            cwd=process["cwd"],
            env=process.get("envs", {}),
            on_output=on_output,
            timeout_s=60.0,
        )
        if self.faults.end_stream == "error":
            send({"error": {"code": "unavailable", "message": "node lost"}}, flags=2)
        elif not self.faults.end_stream:
            end: dict[str, Any] = {"exited": True, "status": f"exit status {result.exit_code}"}
            if result.status is Status.SIGNALED:
                end = {"status": "signal: killed", "exitCode": -1}
            elif result.exit_code:
                end["exitCode"] = result.exit_code
            send({"event": {"end": end}})
            send({}, flags=2)
        writer.write(connection.send(h11.EndOfMessage()))
        await writer.drain()


def failure(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"code": status, "message": message}).encode())


def service_store(directory: Path) -> Path:
    """Where the service keeps its files: not where the client does."""
    return directory / "service"
