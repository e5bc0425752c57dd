"""The `local` backend: plain processes of this machine in a temporary directory. NO ISOLATION.

What runs here can read, change and delete whatever the user of this process can. It is for trusted
code where no sandbox works, and only `allow_unsafe=True` gives it. The paths WORKDIR, HOME and
TEMPORARY do not exist for commands: arguments of the sandbox's methods that begin with them are
translated, and commands find the true places in their working directory, HOME and TMPDIR.
"""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
from pathlib import Path
from typing import Self

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_sandbox import AgentSandbox, agent_program, new_sandbox_id
from megacomposer.env.backend.layers import LayerStore, remove_tree
from megacomposer.env.backend.store_backend import StoreBackend
from megacomposer.env.sandbox import (
    HOME,
    TEMPORARY,
    WORKDIR,
    BackendUnavailableError,
    SandboxError,
    SandboxSpec,
    Snapshot,
    Stats,
)

TREES = {"workspace": WORKDIR, "home": HOME, "tmp": TEMPORARY}
_ENFORCED = {
    "memory_bytes": "none",
    "processes": "none",
    "cpus": "none",
    "disk_bytes": "none",
    "inodes": "none",
    "output_bytes": "agent",
    "wall_s": "agent",
}


class LocalSandbox(AgentSandbox):
    """A temporary directory and the processes that an agent started in it."""

    def __init__(
        self,
        *,
        backend: LocalBackend,
        spec: SandboxSpec,
        link: AgentLink,
        process: asyncio.subprocess.Process,
        root: Path,
    ) -> None:
        super().__init__(sandbox_id=root.name, spec=spec, link=link, record=backend.record)
        self._backend, self._process, self._root = backend, process, root

    async def snapshot(self) -> Snapshot:
        self._require_open()
        await self._link.pause()
        try:
            trees = {name: self._root / name for name in TREES}
            digest = await asyncio.to_thread(self._backend.store.pack_trees, trees, exact=True)
        finally:
            await self._link.resume()
        snapshot = Snapshot(layers=(digest,))
        self._record("snapshot", sandbox=self._id, snapshot=snapshot.id)
        return snapshot

    async def fork(self) -> Self:
        base = await self.snapshot()
        spec = SandboxSpec(
            base=base, mounts=self._spec.mounts, limits=self._spec.limits, env=self._spec.env
        )
        child = await self._backend.start(spec)
        assert isinstance(child, type(self))
        return child

    async def restore(self, snapshot: Snapshot) -> None:
        self._require_open()
        with tempfile.TemporaryDirectory(prefix="next-", dir=self._root) as name:
            # Unpacked first: an unknown snapshot changes nothing.
            await asyncio.to_thread(self._backend.store.checkout, snapshot, Path(name))
            await self._link.kill_all()
            for tree in TREES:
                await asyncio.to_thread(remove_tree, self._root / tree)
                (Path(name) / tree).rename(self._root / tree)

    async def stats(self) -> Stats:
        return await self._stats_of_link(_ENFORCED)

    async def _destroy(self) -> None:
        # The end of its stream made the agent kill what it started, and exit.
        await self._process.wait()
        await asyncio.to_thread(remove_tree, self._root)
        self._backend.forget(self)

    def _base_env(self) -> dict[str, str]:
        return {
            **super()._base_env(),
            "HOME": str(self._root / "home"),
            "TMPDIR": str(self._root / "tmp"),
        }

    def _inside(self, path: str) -> str:
        absolute = posixpath.normpath(super()._inside(path))
        for name, place in TREES.items():
            if absolute == str(place) or absolute.startswith(f"{place}/"):
                return str(self._root / name) + absolute[len(str(place)) :]
        return absolute


class LocalBackend(StoreBackend):
    """Starts processes without any isolation; `open_backend("local", allow_unsafe=True)`."""

    name = "local"
    isolates = False
    forks_memory = False

    def __init__(self, store: LayerStore, *, record: Record = discard) -> None:
        super().__init__(store, record)

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        _refuse_what_needs_isolation(spec)
        program = agent_program()
        root = Path(tempfile.gettempdir()).resolve() / new_sandbox_id("local")
        root.mkdir(mode=0o700)
        process = None
        try:
            await asyncio.to_thread(self.store.checkout, spec.base, root)
            process = await asyncio.create_subprocess_exec(
                program,
                env={},
                cwd="/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            link = await AgentLink.open(process.stdout, process.stdin)
        except BaseException:
            if process is not None:
                process.kill()
                await process.wait()
            remove_tree(root)
            raise
        sandbox = LocalSandbox(backend=self, spec=spec, link=link, process=process, root=root)
        self._running.add(sandbox)
        self.record(
            "sandbox_started", sandbox=sandbox.id, backend=self.name, enforced=dict(_ENFORCED)
        )
        return sandbox


def _refuse_what_needs_isolation(spec: SandboxSpec) -> None:
    if spec.rootfs is not None:
        raise BackendUnavailableError("local has no rootfs of its own: use another backend")
    if spec.egress_socket is not None:
        raise BackendUnavailableError("local cannot confine the network: use another backend")
    if moved := [mount for mount in spec.mounts if mount.source != mount.target]:
        raise BackendUnavailableError(
            f"local mounts nothing ({moved[0].target}): use another backend, or target = source"
        )
    if spec.base.memory is not None:
        raise SandboxError("local restores files only: this snapshot has a memory image")
