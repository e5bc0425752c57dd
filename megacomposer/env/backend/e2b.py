"""The E2B backend: microVMs of an E2B-compatible service, such as E2B itself or AgentENV.

    backend = await open_backend("e2b", store=..., template="python-3.11")

E2B_API_KEY is the key; E2B_API_URL and E2B_SANDBOX_URL say where another service than E2B is. What
is inside comes from the template, as do memory, cores and disk of the machine: a template with more
memory or cores than the limits is refused. The template needs a shell, tar, find and git. There is
no network: an egress socket of this host cannot be mounted in a machine elsewhere.

A fork is the service's: memory, processes and files. `Snapshot.memory` is "e2b:" and the service's
name of the snapshot, `Snapshot.layers` are the files alone, for other backends.
"""

from __future__ import annotations

import asyncio
import io
import os
import uuid

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.agent_sandbox import new_sandbox_id
from megacomposer.env.backend.e2b_protocol import E2bClient, Exit, Machine, Service
from megacomposer.env.backend.e2b_sandbox import ENFORCED, MEMORY_PREFIX, E2bSandbox, lease_s
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.store_backend import StoreBackend
from megacomposer.env.backend.tree_stream import write_tree_tar
from megacomposer.env.sandbox import (
    HOME,
    TEMPORARY,
    WORKDIR,
    BackendUnavailableError,
    SandboxError,
    SandboxSpec,
    SnapshotError,
)

DEFAULT_DOMAIN = "e2b.app"


async def probe() -> str:
    """ "" where a key is set; whether the service takes it shows at the first start."""
    if not os.environ.get("E2B_API_KEY"):
        return "E2B_API_KEY is not set: get a key of an E2B-compatible service"
    return ""


class E2bBackend(StoreBackend):
    """Starts microVMs of one service; see the module for its variables."""

    name = "e2b"
    isolates = True
    forks_memory = True

    def __init__(
        self,
        store: LayerStore,
        *,
        record: Record = discard,
        template: str = "base",
        user: str = "user",
        mounts_in_template: bool = False,
    ) -> None:
        """`user` runs the commands. `mounts_in_template` says that all `SandboxSpec.mounts` are in
        the template already; without it a spec with mounts is refused."""
        domain = os.environ.get("E2B_DOMAIN", DEFAULT_DOMAIN)
        service = Service(
            api_url=os.environ.get("E2B_API_URL", f"https://api.{domain}").rstrip("/"),
            sandbox_url=os.environ.get("E2B_SANDBOX_URL", "").rstrip("/"),
            domain=domain,
            api_key=os.environ.get("E2B_API_KEY", ""),
        )
        super().__init__(store, record)
        self.user = user
        self.client = E2bClient(service)
        self._template, self._mounts_in_template = template, mounts_in_template

    async def start(self, spec: SandboxSpec) -> E2bSandbox:
        return self.adopt(await self.boot(spec), spec)

    def adopt(self, machine: Machine, spec: SandboxSpec) -> E2bSandbox:
        """A sandbox of a machine that runs."""
        sandbox = E2bSandbox(
            backend=self, sandbox_id=new_sandbox_id(self.name), spec=spec, machine=machine
        )
        self._running.add(sandbox)
        self.record(
            "sandbox_started",
            sandbox=sandbox.id,
            backend=self.name,
            machine=machine.id,
            enforced=ENFORCED,
        )
        return sandbox

    async def boot(self, spec: SandboxSpec) -> Machine:
        """A machine in the state of `spec.base`. SnapshotError, SandboxError."""
        self._refuse(spec)
        memory = spec.base.memory
        body = {
            "templateID": memory.removeprefix(MEMORY_PREFIX) if memory else self._template,
            "timeout": lease_s(spec),
            "autoPause": False,
            "secure": True,
            "allow_internet_access": False,
        }
        machine = await self.client.create(body)
        try:
            await self._check_size(machine, spec)
            if not memory:
                await self._fill(machine, spec)
        except BaseException:
            await asyncio.shield(self.client.delete(machine))
            raise
        return machine

    def _refuse(self, spec: SandboxSpec) -> None:
        if spec.egress_socket is not None:
            raise BackendUnavailableError("e2b cannot reach an egress socket of this host")
        if spec.rootfs is not None:
            raise BackendUnavailableError("e2b takes its files from a template: set `template`")
        if spec.mounts and not self._mounts_in_template:
            raise BackendUnavailableError(
                f"e2b cannot mount {spec.mounts[0].source}: build it into the template, and pass "
                "mounts_in_template=True"
            )
        if spec.base.memory and not spec.base.memory.startswith(MEMORY_PREFIX):
            raise SnapshotError(
                f"memory image {spec.base.memory} is of another backend: drop it for files only"
            )

    async def _check_size(self, machine: Machine, spec: SandboxSpec) -> None:
        detail = await self.client.call("GET", f"/sandboxes/{machine.id}")
        memory_bytes = int(detail.get("memoryMB", 0)) << 20
        cpus = float(detail.get("cpuCount", 0))
        if memory_bytes > spec.limits.memory_bytes or cpus > spec.limits.cpus:
            raise SandboxError(
                f"template {self._template} has {memory_bytes >> 20} MiB and {cpus:g} cores, more "
                f"than limits.memory_bytes {spec.limits.memory_bytes} or cpus {spec.limits.cpus:g}"
            )

    async def _fill(self, machine: Machine, spec: SandboxSpec) -> None:
        """The trees, and the files of the base in them."""
        archive = io.BytesIO()
        await asyncio.to_thread(write_tree_tar, self.store, spec.base, archive)
        sandbox = E2bSandbox(backend=self, sandbox_id="", spec=spec, machine=machine)
        script = (
            f'for d in {WORKDIR} {HOME}; do mkdir -p "$d" && chown {self.user} "$d" || exit 1; done'
        )
        process = {"cmd": "/bin/sh", "args": ["-c", script], "cwd": "/"}
        async for event in self.client.start_process(machine, process, user="root"):
            if isinstance(event, Exit) and event.code:
                raise SandboxError(f"the template does not let root make {WORKDIR} and {HOME}")
        name = f"{TEMPORARY}/.base-{uuid.uuid4().hex}.tar"
        await sandbox.upload(name, archive.getvalue())
        unpack = 'cd / && tar -xof "$1" && rm -f "$1"'
        result = await sandbox.script(unpack, name)
        if not result.ok:
            raise SandboxError(f"tar inside cannot unpack the base: {result.stderr[-300:]!r}")

    async def close(self) -> None:
        await super().close()
        await self.client.close()
