"""The `bubblewrap` backend: namespaces, an overlay of layers on a sized tmpfs, control groups.

A sandbox is a chain of processes: `_sandbox_launcher` makes a mount namespace with the files,
becomes bwrap, and bwrap starts the agent as process 1 of a pid namespace. Everything hangs on this
chain, which dies with the host process; only control groups need removing (see `reaper`).

Works as root, then commands run as user USER_ID of the host, and as an ordinary user. A user
without a delegated control group has no quota of CPU, and one of memory for each process only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.agent_sandbox import AgentSandbox, agent_program, new_sandbox_id
from megacomposer.env.backend.bubblewrap_arguments import check_mounts
from megacomposer.env.backend.bubblewrap_place import Place, Programs, start_place
from megacomposer.env.backend.cgroup import CONTROLLERS, ControlGroup, find_roots
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.reaper import HostState
from megacomposer.env.backend.seccomp import build_filter
from megacomposer.env.backend.store_backend import StoreBackend
from megacomposer.env.sandbox import (
    BackendUnavailableError,
    Limits,
    SandboxError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Stats,
)

_LAUNCHER = Path(__file__).with_name("_sandbox_launcher")
_FIELDS = dict(zip(CONTROLLERS, ("memory_bytes", "processes", "cpus"), strict=True))


_NOTES = {
    "rlimit": "memory is limited for each process (RLIMIT_DATA), not for all together",
    "none": "memory is not limited",
}
_usable: set[int] = set()
"""Users for whom the trial went well in this process."""


async def probe() -> str:
    """ "" where sandboxes start here, else why not and the remedy. The first call starts one."""
    if os.geteuid() in _usable:
        return ""
    try:
        with tempfile.TemporaryDirectory() as store:
            backend = BubblewrapBackend(LayerStore(Path(store)), strict_limits=False)
            try:
                async with await backend.start(SandboxSpec(limits=Limits(wall_s=60.0))) as sandbox:
                    result = await sandbox.exec(["sh", "-c", "mkdir a && rmdir a && mkdir a"])
            finally:
                await backend.close()
    except BackendUnavailableError as error:
        return str(error)
    except SandboxError as error:
        return (
            f"{error}. Unprivileged user namespaces and overlayfs must be allowed (sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0; Linux "
            "6.6 or later where this is not root)"
        )
    if not result.ok:
        return f"a command failed in a trial sandbox: {result.stderr.decode(errors='replace')}"
    _usable.add(os.geteuid())
    return ""


class BubblewrapSandbox(AgentSandbox):
    """See `megacomposer.env.sandbox.Sandbox`."""

    def __init__(
        self, *, backend: BubblewrapBackend, sandbox_id: str, spec: SandboxSpec, place: Place
    ) -> None:
        super().__init__(sandbox_id=sandbox_id, spec=spec, link=place.link, record=backend.record)
        self._backend, self._place = backend, place
        self._changing = asyncio.Lock()
        self._places = 1

    async def snapshot(self) -> Snapshot:
        async with self._changing:
            self._require_open()
            store, place = self._backend.store, self._place
            digest = await place.freeze_and_pack(store, self._spec.limits)
            snapshot = place.base
            if digest is not None:
                snapshot = await asyncio.to_thread(store.extend, place.base, digest)
        self._record("snapshot", sandbox=self._id, snapshot=snapshot.id)
        return snapshot

    async def fork(self) -> Self:
        base = await self.snapshot()
        child = await self._backend.start(dataclasses.replace(self._spec, base=base))
        assert isinstance(child, type(self))
        return child

    async def restore(self, snapshot: Snapshot) -> None:
        async with self._changing:
            self._require_open()
            # The new one first: an unknown snapshot changes nothing.
            name = f"{self._id}.{self._places}"
            place = await self._backend.start_place(self._spec, snapshot, name)
            self._places += 1
            old, self._place, self._link = self._place, place, place.link
            await old.link.close()
            await old.end()

    async def stats(self) -> Stats:
        self._require_open()
        group = self._place.group
        disk_bytes, inodes = self._place.disk_usage()
        if group is not None:
            usage = group.usage()
            values = dataclasses.asdict(usage)
        else:
            seen = await self._link.stats()
            values = {
                "memory_bytes": seen.memory_bytes,
                "memory_peak_bytes": None,
                "processes": seen.threads,
                "cpu_s": seen.cpu_s,
            }
        enforced = self._backend.enforced
        return Stats(**values, disk_bytes=disk_bytes, inodes=inodes, enforced=enforced)

    async def _destroy(self) -> None:
        async with self._changing:
            await self._place.link.close()
            await self._place.end()
        self._backend.forget(self)

    async def _memory_kills(self) -> int | None:
        group = self._place.group
        return group.memory_kills() if group is not None else None


class BubblewrapBackend(StoreBackend):
    """See `megacomposer.env.sandbox.SandboxBackend`; made by `open_backend("bubblewrap", ...)`.

    `strict_limits`: refuse to start where a quota of memory, processes or CPU cannot be enforced by
    a control group. None means True for root, and False for others; the audit event
    `sandbox_started` says what enforces what.
    """

    name = "bubblewrap"
    isolates = True
    forks_memory = False

    def __init__(
        self, store: LayerStore, *, record: Record = discard, strict_limits: bool | None = None
    ) -> None:
        """Also removes what host processes that died have left."""
        super().__init__(store, record)
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise BackendUnavailableError(
                "bwrap is not installed: install bubblewrap (apt-get install bubblewrap)"
            )
        if not _LAUNCHER.exists():
            raise BackendUnavailableError(
                f"{_LAUNCHER} is missing: install a C++ compiler and reinstall with "
                "`pip install -e .` (setup.py builds it from csrc/sandbox_launcher.cpp)"
            )
        try:
            build_filter()
        except ValueError as error:
            raise BackendUnavailableError(str(error)) from error
        agent = agent_program()
        self._strict = os.geteuid() == 0 if strict_limits is None else strict_limits
        self._groups = find_roots()
        self._state = HostState(store.root, self._groups, record)
        self.enforced = self._find_enforced()
        """Field of Limits -> what enforces it, in every sandbox of this backend."""
        self._programs = Programs(
            bwrap=bwrap,
            launcher=_LAUNCHER,
            agent=agent,
            limit_memory=self.enforced["memory_bytes"] == "rlimit",
            limit_processes=self.enforced["processes"] == "rlimit",
        )

    def _find_enforced(self) -> Mapping[str, str]:
        enforced = dict.fromkeys(_FIELDS.values(), "none")
        enforced.update({_FIELDS[name]: "cgroup" for name in self._groups.controllers})
        for field in ("memory_bytes", "processes"):
            if enforced[field] == "none" and os.geteuid() != 0:
                enforced[field] = "rlimit"
        own = {"disk_bytes": "tmpfs", "inodes": "tmpfs", "output_bytes": "agent", "wall_s": "agent"}
        return {**enforced, **own}

    async def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        weak = {
            field: how for field in _FIELDS.values() if (how := self.enforced[field]) != "cgroup"
        }
        if weak and self._strict:
            raise BackendUnavailableError(
                f"no control group for {', '.join(weak)}: give this process one (a writable or "
                "delegated cgroup), or pass strict_limits=False to run without"
            )
        check_mounts(spec.mounts)
        sandbox_id = new_sandbox_id("bwrap")
        place = await self.start_place(spec, spec.base, sandbox_id)
        sandbox = BubblewrapSandbox(backend=self, sandbox_id=sandbox_id, spec=spec, place=place)
        self._running.add(sandbox)
        self.record(
            "sandbox_started",
            sandbox=sandbox_id,
            backend=self.name,
            base=spec.base.id,
            network="proxy" if spec.egress_socket else "none",
            limits=dataclasses.asdict(spec.limits),
            enforced=dict(self.enforced),
            notes=_NOTES.get(self.enforced["memory_bytes"], ""),
        )
        return sandbox

    async def start_place(self, spec: SandboxSpec, base: Snapshot, name: str) -> Place:
        """The processes and files of a sandbox; `name` is that of its control group."""
        if base.memory is not None:
            raise SnapshotError(f"{base.id} has a memory image: bubblewrap restores files only")
        lowers = await asyncio.to_thread(self.store.lower_directories, base)
        group = ControlGroup(self._groups, name) if self._groups.directories else None
        if group is not None:
            self._state.note_groups()
        return await start_place(spec, base, lowers=lowers, programs=self._programs, group=group)

    async def close(self) -> None:
        await super().close()
        self._state.close()
