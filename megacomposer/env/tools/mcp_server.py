"""The tool set as an MCP server (Model Context Protocol), for agents of other makers.

Needs the `mcp` extra. All connections of a server share its one sandbox; calls keep the order in
which they arrive, as in `ToolSet.call`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from megacomposer import __version__
from megacomposer.env.audit import AuditLog
from megacomposer.env.backends import open_backend
from megacomposer.env.grading.python_runtime import python_runtime
from megacomposer.env.sandbox import SandboxBackend, SandboxError
from megacomposer.env.task import Task, TestPlan, load_task
from megacomposer.env.task_sandbox import task_sandbox
from megacomposer.env.tools.mcp_config import McpServerConfig
from megacomposer.env.tools.toolset import ToolSet
from megacomposer.env.transcript import ToolCall

_logger = logging.getLogger(__name__)

HTTP_HOST = "127.0.0.1"
"""There is no authentication, so other machines are not answered."""
HTTP_PATH = "/mcp"


def build_server(tools: ToolSet, *, instructions: str = "") -> Server[Any]:
    """A server of these tools; `instructions` is the task, for the client's model.

    A call that the tool set refuses is a result with isError. A failure of the infrastructure is
    a protocol error, so that a client cannot take it for an answer.
    """
    numbers = itertools.count(1)
    listed = [
        Tool(
            name=tool.name,
            description=tool.description,
            input_schema=tool.schema["function"]["parameters"],
            annotations=ToolAnnotations(read_only_hint=tool.reads_only, open_world_hint=False),
        )
        for tool in tools.tools.values()
    ]

    async def list_tools(_: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=listed)

    async def call_tool(_: Any, params: CallToolRequestParams) -> CallToolResult:
        call = ToolCall(
            id=f"mcp-{next(numbers)}", name=params.name, arguments=params.arguments or {}
        )
        try:
            observation = await tools.call(call)
        except SandboxError as error:
            raise MCPError(code=INTERNAL_ERROR, message=f"sandbox failure: {error}") from error
        content = TextContent(type="text", text=observation.text)
        return CallToolResult(content=[content], is_error=observation.is_error)

    return Server(
        "megacomposer",
        version=__version__,
        instructions=instructions or None,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve one client over this process's stdin and stdout, until it closes them."""
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


async def serve_http(server: Server[Any], port: int) -> None:
    """Serve over streamable HTTP at http://127.0.0.1:`port`/mcp, until SIGINT or SIGTERM."""
    app = server.streamable_http_app(streamable_http_path=HTTP_PATH, host=HTTP_HOST)
    config = uvicorn.Config(
        app, host=HTTP_HOST, port=port, log_level="warning", timeout_graceful_shutdown=5
    )
    # uvicorn raises the signal again once it has shut down; the sandbox is still to be closed.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    await uvicorn.Server(config).serve()


async def serve(config: McpServerConfig) -> None:
    """Open the sandbox, serve its tools until the client leaves, and close it.

    Raises ValueError for a task or directory that cannot be used, and SandboxError.
    """
    log = AuditLog(Path(config.audit) if config.audit else None)
    store = Path(config.store).expanduser()
    backend = await open_backend(config.backend, store=store, record=log.record)
    try:
        task = await _task(config, backend)
        async with task_sandbox(backend, task, record=log.record) as sandbox:
            names = config.tools or task.tools
            tools = ToolSet(sandbox, names, tests=task.tests, record=log.record)
            server = build_server(await tools.start(), instructions=task.instruction)
            _logger.info("serving %d tools, backend %s", len(tools.tools), backend.name)
            if config.http_port:
                await serve_http(server, config.http_port)
            else:
                await serve_stdio(server)
    finally:
        await backend.close()
        log.close()


async def _task(config: McpServerConfig, backend: SandboxBackend) -> Task:
    """The task of the file, or one without an instruction over a copy of the directory."""
    if config.task:
        return load_task(Path(config.task))
    base = await backend.import_tree(config.repo)
    python = python_runtime(Path(config.site) if config.site else None)
    return Task(
        id="repo",
        instruction="",
        base=base,
        pristine=base,
        tests=TestPlan(),
        mounts=python.mounts,
        env=python.env,
    )
