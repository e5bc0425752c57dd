"""One gVisor sandbox: a container, and another one after each snapshot; `gvisor` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_sandbox import AgentSandbox
from megacomposer.env.backend.gvisor_bundle import RootPlan
from megacomposer.env.backend.gvisor_container import Container
from megacomposer.env.backend.gvisor_port import AgentPort
from megacomposer.env.backend.layers import remove_tree
from megacomposer.env.backend.tree_stream import pack_over_link
from megacomposer.env.sandbox import (
    ExecResult,
    OnOutput,
    SandboxClosedError,
    SandboxError,
    SandboxSpec,
    Snapshot,
    Stats,
    Status,
)

if TYPE_CHECKING:
    from megacomposer.env.backend.gvisor import GvisorBackend

_WATCH_INTERVAL_S = 0.2


class GvisorSandbox(AgentSandbox):
    """One container, which is another one after each snapshot."""

    def __init__(
        self,
        *,
        backend: GvisorBackend,
        sandbox_id: str,
        spec: SandboxSpec,
        plan: RootPlan,
        container: Container,
        port: AgentPort,
        link: AgentLink,
    ) -> None:
        super().__init__(sandbox_id=sandbox_id, spec=spec, link=link, record=backend.record)
        self._backend, self._plan = backend, plan
        self._container, self._port = container, port
        self._lock = asyncio.Lock()
        self._out_of_memory = False
        self._watcher = asyncio.create_task(self._watch_memory())

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 120.0,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """MEMORY_LIMIT ends the sandbox: gVisor's memory is one, and goes as a whole."""
        output = {"stdout": bytearray(), "stderr": bytearray()}

        def keep(stream: str, data: bytes) -> None:
            output[stream] += data
            if on_output:
                on_output(stream, data)

        started_s = time.monotonic()
        try:
            return await super().exec(
                argv, cwd=cwd, env=env, stdin=stdin, timeout_s=timeout_s, on_output=keep
            )
        except SandboxClosedError:
            if self._ended or not await self._exceeded_memory():
                raise
            self._ended = "it reached its memory limit"
            command = " ".join(argv)[:500]
            self._record("limit", sandbox=self._id, field="memory_bytes", command=command)
            return ExecResult(
                status=Status.MEMORY_LIMIT,
                exit_code=137,
                stdout=bytes(output["stdout"]),
                stderr=bytes(output["stderr"]),
                wall_s=time.monotonic() - started_s,
            )

    async def snapshot(self) -> Snapshot:
        """Files and memory; files alone where the backend's `forks_memory` is False."""
        async with self._lock:
            self._require_open()
            if self._backend.forks_memory:
                snapshot = await self._snapshot_memory()
            else:
                snapshot = Snapshot(layers=(await self.pack(),))
        self._record("snapshot", sandbox=self._id, snapshot=snapshot.id)
        return snapshot

    async def fork(self) -> Self:
        """Costs a checkpoint and two restores, and packs no files."""
        if not self._backend.forks_memory:
            child = await self._backend.start(
                dataclasses.replace(self._spec, base=await self.snapshot())
            )
        else:
            async with self._lock:
                self._require_open()
                image = await asyncio.to_thread(self._backend.images.scratch)
                try:
                    next_request = await self._checkpoint(image)
                    child = await self._backend.thaw(self._spec, self._plan, image, next_request)
                finally:
                    await asyncio.to_thread(remove_tree, image)
        assert isinstance(child, type(self))
        return child

    async def restore(self, snapshot: Snapshot) -> None:
        async with self._lock:
            self._require_open()
            # Looked up first: an unknown snapshot changes nothing.
            prepared = await self._backend.prepare(dataclasses.replace(self._spec, base=snapshot))
            await self._backend.config(self._spec, prepared[0])  # unpacks the layers
            with contextlib.suppress(SandboxError):
                await self._link.kill_all()  # commands that run end as killed, not as lost
            await self._link.close()
            await self._container.delete()
            plan, image, next_request = prepared
            port, link = await self._backend.launch(
                self._container, self._spec, plan, image, next_request
            )
            self._plan, self._port, self._link = plan, port, link

    async def stats(self) -> Stats:
        self._require_open()
        seen = await self._link.stats()
        group = self._container.group.usage() if self._container.group else None
        used_bytes = self._container.memory_bytes()
        return Stats(
            memory_bytes=group.memory_bytes if group else used_bytes,
            memory_peak_bytes=group.memory_peak_bytes if group else None,
            processes=seen.threads,
            cpu_s=group.cpu_s if group else None,
            disk_bytes=None,
            inodes=None,
            enforced=self._backend.enforced(self._container),
        )

    async def _snapshot_memory(self) -> Snapshot:
        image = await asyncio.to_thread(self._backend.images.scratch)
        try:
            next_request = await self._checkpoint(image)
            # The files are read in a fork of it, where nothing changes them any more.
            async with await self._backend.thaw(
                self._spec, self._plan, image, next_request, running=False
            ) as fork:
                layer = await fork.pack()
            memory = await asyncio.to_thread(
                self._backend.images.add,
                image,
                plan=self._plan,
                processes=self._spec.limits.processes,
                next_request=next_request,
                version=self._backend.runsc.version,
            )
        finally:
            if image.exists():
                await asyncio.to_thread(remove_tree, image)
        return Snapshot(layers=(layer,), memory=memory)

    async def _checkpoint(self, image: Path) -> int:
        """Writes the checkpoint, and goes on from it; the first request of a fork's link."""
        self._port.hold_after_next()
        try:
            await self._link.pause()
            next_request = self._link.next_request
            await self._container.checkpoint(image)
        except SandboxError:
            self._port.release()
            await self._link.resume()
            raise
        except BaseException:
            self._port.release()
            self._container.kill()  # cancelled in the middle: in no known state
            raise
        await self._port.ended()
        config = self._backend.config(self._spec, self._plan)
        self._port.attach(await self._container.restore(await config, image))
        try:
            await self._link.resume()
        except SandboxClosedError as error:
            raise SandboxClosedError(
                f"sandbox {self._id} did not survive its snapshot: {self._container.message()}"
            ) from error
        return next_request

    async def pack(self) -> str:
        """The files as they are now, stored as one layer; its digest."""
        return await pack_over_link(
            self._link,
            self._backend.store,
            max_bytes=2 * self._spec.limits.disk_bytes,
            generation=len(self._plan.layers),
        )

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            used_bytes = self._container.memory_bytes()
            if used_bytes is not None and used_bytes > self._spec.limits.memory_bytes:
                self._out_of_memory = True
                self._container.kill()
                return

    async def _exceeded_memory(self) -> bool:
        group = self._container.group
        return self._out_of_memory or bool(group and await asyncio.to_thread(group.memory_kills))

    async def _destroy(self) -> None:
        self._watcher.cancel()
        await self._container.remove()
        self._backend.forget(self)
