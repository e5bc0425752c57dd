"""The MCP server, as the SDK's own client sees it over a real connection."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from megacomposer.env.backends import open_backend
from megacomposer.env.task import Task, TestPlan
from megacomposer.env.tools.mcp_server import build_server
from megacomposer.env.tools.toolset import TOOL_NAMES
from tool_cases import open_bench, write_files

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "mcp_server.py"
ENV = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PATH": os.environ["PATH"]}


def text(result: Any) -> str:
    assert [item.type for item in result.content] == ["text"]
    return str(result.content[0].text)


def closed(audit: Path) -> list[str]:
    """Why each sandbox of an audit file ended."""
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    started = [event for event in events if event["kind"] == "sandbox_started"]
    ended = [event["why"] for event in events if event["kind"] == "sandbox_closed"]
    assert len(started) == len(ended) == 1
    return ended


@asynccontextmanager
async def stdio_client(folder: Path, *arguments: str) -> AsyncIterator[Client]:
    arguments = (*arguments, "--store", str(folder / "store"), "--audit", str(folder / "audit"))
    server = StdioServerParameters(
        command=sys.executable, args=[str(SCRIPT), "--backend", "bubblewrap", *arguments], env=ENV
    )
    async with Client(server, read_timeout_seconds=60) as client:
        yield client


def test_a_client_over_stdio_lists_calls_and_is_refused_like_any_agent(tmp_path: Path) -> None:
    repo = write_files(tmp_path / "repo", {f"f{i}.txt": f"number {i}\n" for i in range(5)})

    async def main() -> None:
        async with stdio_client(tmp_path, "--repo", str(repo)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tuple(tools) == TOOL_NAMES
            schema = tools["read"].input_schema
            assert schema["required"] == ["path"]
            assert schema["additionalProperties"] is False

            answers = await asyncio.gather(
                *(client.call_tool("read", {"path": f"f{i}.txt"}) for i in range(5)),
                client.call_tool("grep", {"pattern": "number", "output": "files"}),
            )
            assert not any(answer.is_error for answer in answers)
            assert [text(answer) for answer in answers[:5]] == [
                f"     1\tnumber {i}" for i in range(5)
            ]
            for name, arguments, part in (
                ("reed", {}, "did you mean read?"),
                ("read", {"path": "f9.txt"}, "No such file"),
                ("read", {"file": "f1.txt"}, "unknown field `file`"),
                ("read", {"path": "f1.txt", "limit": "2"}, "Expected `int`"),
                ("terminal", {"command": "sleep 60", "timeout_s": 0.3}, "Killed after 0.3 s"),
            ):
                answer = await client.call_tool(name, arguments)
                assert answer.is_error, name
                assert part in text(answer)

            await client.call_tool("terminal", {"command": "cd /tmp; kept=1; rm /workspace/*"})
            answer = await client.call_tool("terminal", {"command": "echo $kept $PWD"})
            assert text(answer) == "1 /tmp"

    asyncio.run(main())
    assert sorted(os.listdir(repo)) == [f"f{i}.txt" for i in range(5)]
    assert closed(tmp_path / "audit") == ["it was closed"]


def test_a_task_gives_its_tools_and_its_instruction(tmp_path: Path) -> None:
    async def main() -> None:
        backend = await open_backend("bubblewrap", store=tmp_path / "store")
        tree = write_files(tmp_path / "tree", {"a.py": "x = 1\n"})
        base = await backend.import_tree(str(tree))
        await backend.close()
        task = Task(
            id="t",
            instruction="Make x two.",
            base=base,
            pristine=base,
            tests=TestPlan(),
            tools=("read", "edit", "finish"),
        )
        (tmp_path / "task.json").write_text(task.to_json())
        async with stdio_client(tmp_path, "--task", str(tmp_path / "task.json")) as client:
            assert client.instructions == "Make x two."
            listed = [tool.name for tool in (await client.list_tools()).tools]
            assert listed == ["read", "edit", "finish"]
            edit = {"path": "a.py", "old_text": "1", "new_text": "2"}
            assert "x = 2" in text(await client.call_tool("edit", edit))
            assert text(await client.call_tool("finish", {"message": "done"})) == "Finished."
            assert (await client.call_tool("read", {"path": "a.py"})).is_error

    asyncio.run(main())


def test_a_failure_of_the_sandbox_is_a_protocol_error_and_no_result(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            open_bench(tmp_path) as bench,
            Client(build_server(await bench.tools.start())) as client,
        ):
            assert not (await client.call_tool("list", {})).is_error
            await bench.sandbox.close()
            with pytest.raises(MCPError, match="sandbox failure"):
                await client.call_tool("list", {})

    asyncio.run(main())


def test_a_client_over_http_works_and_the_server_ends_cleanly(tmp_path: Path) -> None:
    repo = write_files(tmp_path / "repo", {"a.txt": "hello\n"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "--backend", "bubblewrap", "--repo", str(repo)]
    command += ["--store", str(tmp_path / "store"), "--audit", str(tmp_path / "audit")]
    server = subprocess.Popen([*command, "--http-port", str(port)], env=ENV)

    async def main() -> None:
        async with Client(f"http://127.0.0.1:{port}/mcp", read_timeout_seconds=60) as client:
            answers = await asyncio.gather(
                client.call_tool("read", {"path": "a.txt"}), client.call_tool("lost", {})
            )
            assert text(answers[0]) == "     1\thello"
            assert answers[1].is_error

    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            time.sleep(0.05)
        asyncio.run(main())
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert closed(tmp_path / "audit") == ["it was closed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either task or repo"),
        (["--repo", "/nowhere"], "/nowhere"),
        (["--repo", ".", "--task", "x"], "give either task or repo"),
        (["--repo", ".", "--tools", "bash"], "there is no 'bash'"),
        (["--repo", ".", "--backend", "vm"], "vm"),
        (["--repo", ".", "--backend", "local"], "isolates nothing"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line_on_stderr(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    command = [sys.executable, str(SCRIPT), "--store", str(tmp_path / "store"), *arguments]
    result = subprocess.run(
        command, env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_the_sandbox_of_a_killed_server_does_not_outlive_it(tmp_path: Path) -> None:
    repo = write_files(tmp_path / "repo", {"a.txt": ""})
    command = [sys.executable, str(SCRIPT), "--backend", "bubblewrap", "--repo", str(repo)]
    server = subprocess.Popen(
        [*command, "--store", str(tmp_path / "store")],
        env=ENV,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert server.stderr
    assert server.stdin
    assert b"serving" in server.stderr.readline()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert children
    server.kill()
    server.wait()
    server.stdin.close()
    server.stderr.close()
    for _ in range(600):
        alive = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        if not alive:
            break
        time.sleep(0.05)
    assert alive == []
