"""The sandbox in which an agent works on a task: its files, mounts, limits, and its way out."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from megacomposer.env.audit import Record, discard
from megacomposer.env.sandbox import EGRESS_PORT, HOME, Sandbox, SandboxBackend, SandboxSpec
from megacomposer.env.task import Task

CA_PATH = f"{HOME}/.egress-ca.pem"
"""Inside: whom commands trust, where the proxy looks into HTTPS."""


@asynccontextmanager
async def task_sandbox(
    backend: SandboxBackend, task: Task, *, record: Record = discard
) -> AsyncIterator[Sandbox]:
    """A fresh sandbox of `task.base`, closed at the end; with the egress proxy where the task has
    rules, else without any network.

    Raises what `backend.start` raises, and ValueError for egress rules that are none.
    """
    async with AsyncExitStack() as stack:
        env = dict(task.env)
        socket, trusted = None, ""
        if task.egress:
            # The proxy's libraries are an extra that tasks without network do not need.
            from megacomposer.env.egress.policy import EgressPolicy, proxy_environment
            from megacomposer.env.egress.proxy import EgressProxy

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="egress-"))
            proxy = EgressProxy(
                EgressPolicy(task.egress),
                Path(folder) / "proxy.sock",
                sandbox=task.id,
                record=record,
            )
            await stack.enter_async_context(proxy)
            socket, trusted = str(proxy.socket), proxy.ca_bundle_pem
            env = {**proxy_environment(EGRESS_PORT, CA_PATH if trusted else ""), **env}
        spec = SandboxSpec(
            base=task.base, mounts=task.mounts, limits=task.limits, env=env, egress_socket=socket
        )
        sandbox = await stack.enter_async_context(await backend.start(spec))
        if trusted:
            await sandbox.write_file(CA_PATH, trusted.encode())
        yield sandbox
