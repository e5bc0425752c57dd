"""The gVisor backend: a kernel of its own per sandbox, and forks of memory with the files.

A snapshot is a checkpoint of the whole sandbox. Forks start from it with every process, open file
and interpreter state kept; files that were written are in gVisor's memory, thus in the checkpoint
too. `Snapshot.memory` names it in the store, `Snapshot.layers` are the same files alone, so that
other backends can go on from them: `dataclasses.replace(snapshot, memory=None)`.

A checkpoint ends the container, so the sandbox itself goes on as its first fork; commands that run
meanwhile just take longer. In a fork they go on too, as background processes.

Every system call costs more than elsewhere (20 times for `stat`): for shells this hardly matters,
for large test runs bubblewrap is the better backend.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tarfile
from pathlib import Path

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_sandbox import new_sandbox_id
from megacomposer.env.backend.cgroup import find_roots
from megacomposer.env.backend.gvisor_bundle import RootPlan, make_root, oci_config, plan_root
from megacomposer.env.backend.gvisor_container import (
    Container,
    make_group,
    new_directory,
    remove_stale,
)
from megacomposer.env.backend.gvisor_image import ImageStore
from megacomposer.env.backend.gvisor_port import AgentPort
from megacomposer.env.backend.gvisor_runtime import Runsc, find_runsc
from megacomposer.env.backend.gvisor_sandbox import GvisorSandbox
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.reaper import HostState
from megacomposer.env.backend.store_backend import StoreBackend
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    SandboxClosedError,
    SandboxError,
    SandboxSpec,
    SnapshotError,
)


async def probe() -> str:
    """ "" where runsc works here, else why not."""
    try:
        await find_runsc()
    except BackendUnavailableError as error:
        return str(error)
    return ""


class GvisorBackend(StoreBackend):
    """Starts gVisor sandboxes; `open_backend("gvisor")` has probed before.

    `Limits.disk_bytes` bounds each file; all files together are memory, and bounded as such.
    `Limits.inodes` is bounded by memory only.
    """

    name = "gvisor"
    isolates = True

    def __init__(self, store: LayerStore, *, record: Record = discard) -> None:
        super().__init__(store, record)
        self.images = ImageStore(store)
        self._runsc: Runsc | None = None
        self._roots = find_roots()
        self._host = HostState(store.root, self._roots, record)

    @property
    def runsc(self) -> Runsc:
        assert self._runsc is not None, "no sandbox was started yet"
        return self._runsc

    @property
    def forks_memory(self) -> bool:
        """Not for an unprivileged user with the runsc of Debian 12."""
        return self._runsc is None or self._runsc.forks_memory

    async def start(self, spec: SandboxSpec) -> GvisorSandbox:
        if self._runsc is None:
            self._runsc = await find_runsc()
            await remove_stale(self._runsc, self.store.root)
        plan, image, next_request = await self.prepare(spec)
        return await self._start(spec, plan, image, next_request)

    async def prepare(self, spec: SandboxSpec) -> tuple[RootPlan, Path | None, int]:
        """What `launch` needs for `spec.base`. SnapshotError."""
        layers, image, next_request = spec.base.layers, None, 0
        if spec.base.memory is not None:
            if not self.forks_memory:
                raise SnapshotError(
                    f"runsc cannot restore memory for this user ({self.runsc.mode}): run as root, "
                    "install a runsc of 2023 or later, or drop the snapshot's memory"
                )
            found = await asyncio.to_thread(
                self.images.load, spec.base.memory, version=self.runsc.version
            )
            if spec.limits.processes < found.processes:
                raise SnapshotError(
                    f"limits.processes {spec.limits.processes}: {found.processes} is frozen in "
                    f"memory image {spec.base.memory}"
                )
            layers, image, next_request = found.plan.layers, found.directory, found.next_request
        plan = await asyncio.to_thread(
            plan_root,
            spec,
            layers=layers,
            user_id=self.runsc.user_id,
            statx=self.runsc.needs_statx,
        )
        if image is not None and plan != found.plan:
            changed = [
                field.name
                for field in dataclasses.fields(plan)
                if getattr(plan, field.name) != getattr(found.plan, field.name)
            ]
            raise SnapshotError(
                f"memory image {spec.base.memory} was made with other {', '.join(changed)}"
            )
        return plan, image, next_request

    async def thaw(
        self,
        spec: SandboxSpec,
        plan: RootPlan,
        image: Path,
        next_request: int,
        *,
        running: bool = True,
    ) -> GvisorSandbox:
        """A sandbox from a checkpoint; where not `running`, all processes of it are killed."""
        return await self._start(spec, plan, image, next_request, running=running)

    async def config(self, spec: SandboxSpec, plan: RootPlan) -> dict[str, object]:
        root = await asyncio.to_thread(make_root, self.store, plan)
        return oci_config(spec, root, user_id=plan.user_id)

    async def launch(
        self,
        container: Container,
        spec: SandboxSpec,
        plan: RootPlan,
        image: Path | None,
        next_request: int,
        *,
        running: bool = True,
    ) -> tuple[AgentPort, AgentLink]:
        """Starts the container fresh, or from a checkpoint, and finds its agent."""
        config = await self.config(spec, plan)
        port = AgentPort()
        try:
            if image is None:
                port.attach(await container.run(config))
                link = await AgentLink.open(port.reader, port.writer)
            else:
                port.attach(await container.restore(config, image))
                link = await AgentLink.open(port.reader, port.writer, first_request=next_request)
                await (link.resume() if running else link.kill_all())
        except SandboxClosedError as error:
            raise SandboxError(f"gVisor did not start: {container.message()}") from error
        return port, link

    async def _start(
        self,
        spec: SandboxSpec,
        plan: RootPlan,
        image: Path | None,
        next_request: int,
        *,
        running: bool = True,
    ) -> GvisorSandbox:
        sandbox_id = new_sandbox_id(self.name)
        directory = new_directory(sandbox_id)
        container = Container(self.runsc, directory, group=None, cpus=spec.limits.cpus)
        try:
            self._host.note_groups()
            container.group = await asyncio.to_thread(
                make_group, self._roots, sandbox_id, spec.limits
            )
            port, link = await self.launch(
                container, spec, plan, image, next_request, running=running
            )
        except BaseException:
            await asyncio.shield(container.remove())
            raise
        sandbox = GvisorSandbox(
            backend=self,
            sandbox_id=sandbox_id,
            spec=spec,
            plan=plan,
            container=container,
            port=port,
            link=link,
        )
        self._running.add(sandbox)
        self.record(
            "sandbox_started",
            sandbox=sandbox_id,
            backend=self.name,
            enforced=self.enforced(container),
        )
        return sandbox

    def enforced(self, container: Container) -> dict[str, str]:
        """See `Stats.enforced`; "memory": what is written is memory, and limited as such."""
        return {
            "memory_bytes": "cgroup" if container.group else "watch",
            "processes": "rlimit",
            "cpus": "cgroup" if container.group else "affinity",
            "disk_bytes": "memory",
            "inodes": "memory",
            "output_bytes": "agent",
            "wall_s": "agent",
        }

    async def export_layer(self, digest: str, file: str) -> None:
        """A layer, or a memory image (`Snapshot.memory`) with the layers that it stands on."""
        if self.images.has(digest):
            await asyncio.to_thread(self.images.export, digest, Path(file))
        else:
            await asyncio.to_thread(self.store.export_layer, digest, Path(file))

    async def import_layer(self, file: str) -> str:
        return await asyncio.to_thread(self._import, Path(file))

    def _import(self, file: Path) -> str:
        try:
            with tarfile.open(file, "r:") as tar:
                first = tar.next()
        except tarfile.TarError as error:
            raise SnapshotError(f"{file}: not a layer: {error}") from error
        if first is not None and first.name.startswith("memory/"):
            return self.images.import_file(file)
        return self.store.import_layer(file)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._host.close)
