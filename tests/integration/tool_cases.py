"""What tests of the tools share: a tool set over a real sandbox with given files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from megacomposer.env.audit import AuditLog
from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import Limits, SandboxSpec
from megacomposer.env.tools.toolset import ToolSet
from megacomposer.env.transcript import Observation, ToolCall

PATH = "/usr/local/bin:/usr/bin:/bin"
_numbers = itertools.count(1)


class Bench:
    """A tool set, its audit log, and a short way to call a tool."""

    def __init__(self, tools: ToolSet, log: AuditLog) -> None:
        self.tools, self.sandbox, self.log = tools, tools.sandbox, log

    async def __call__(self, name: str, **arguments: Any) -> Observation:
        return await self.tools.call(call(name, **arguments))

    async def text(self, name: str, **arguments: Any) -> str:
        """The answer of a call that must not be refused."""
        observation = await self(name, **arguments)
        assert not observation.is_error, observation.text
        return observation.text

    async def error(self, kind: str, name: str, **arguments: Any) -> str:
        """The answer of a call that must be refused with this kind."""
        observation = await self(name, **arguments)
        assert (observation.is_error, observation.error_kind) == (True, kind), observation
        return observation.text


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call-{next(_numbers)}", name=name, arguments=arguments)


def write_files(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


@asynccontextmanager
async def open_bench(
    folder: Path,
    files: Mapping[str, str | bytes] | None = None,
    names: tuple[str, ...] = (),
    *,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    mounts: tuple[Any, ...] = (),
    **options: Any,
) -> AsyncIterator[Bench]:
    """A bench over a bubblewrap sandbox whose workspace holds `files`."""
    log = AuditLog()
    tree = folder / "tree"
    tree.mkdir()
    backend = await open_backend("bubblewrap", store=folder / "store", record=log.record)
    try:
        base = await backend.import_tree(str(write_files(tree, files or {})))
        spec = SandboxSpec(
            base=base, limits=limits or Limits(), env={"PATH": PATH, **(env or {})}, mounts=mounts
        )
        async with await backend.start(spec) as sandbox:
            yield Bench(ToolSet(sandbox, names, record=log.record, **options), log)
    finally:
        await backend.close()


def run(
    folder: Path,
    body: Callable[[Bench], Awaitable[None]],
    files: Mapping[str, str | bytes] | None = None,
    names: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Run an async test body with a bench."""

    async def main() -> None:
        async with open_bench(folder, files, names, **options) as bench:
            await body(bench)

    asyncio.run(main())
