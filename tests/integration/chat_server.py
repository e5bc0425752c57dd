"""An OpenAI-compatible endpoint on this machine that answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any


class ChatServer:
    """Gives `answers` in turn, the last one again and again; keeps the requests that it got."""

    def __init__(self, *answers: Any, statuses: tuple[int, ...] = (200,)) -> None:
        self.answers = [
            answer if isinstance(answer, str) else json.dumps(answer) for answer in answers
        ]
        self.statuses = statuses
        """Of each request in turn, the last one again and again; answers of 200 alone count."""
        self.finish_reason = "stop"
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.url = ""
        self._given = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[ChatServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"(?i)content-length: (\d+)", head)
        assert found is not None
        assert head.startswith(b"POST /v1/chat/completions ")
        key = re.search(rb"(?i)authorization: (.*)\r\n", head)
        self.authorizations.append(key[1].decode() if key else "")
        status = self.statuses[min(len(self.requests), len(self.statuses) - 1)]
        self.requests.append(json.loads(await reader.readexactly(int(found[1]))))
        body = self._body(status)
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, len(body), body)
        )
        await writer.drain()
        writer.close()

    def _body(self, status: int) -> bytes:
        if status != 200:
            # Some endpoints say the refused key again.
            return json.dumps({"error": f"refused: {self.authorizations[-1]}"}).encode()
        answer = self.answers[min(self._given, len(self.answers) - 1)]
        self._given += 1
        message = {"message": {"content": answer}, "finish_reason": self.finish_reason}
        return json.dumps({"choices": [message]}).encode()
