"""One running bubblewrap sandbox: its processes, their agent, its files and its control group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.bubblewrap_arguments import BwrapArguments, launcher_binds
from megacomposer.env.backend.cgroup import ControlGroup, kill_group
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.seccomp import open_filter
from megacomposer.env.sandbox import (
    USER_ID,
    Limits,
    SandboxClosedError,
    SandboxError,
    SandboxSpec,
    Snapshot,
)

_OWN_INODES = 16
"""Directories of the launcher on the sandbox's file system; its mount points come on top."""
_END_TIMEOUT_S = 5.0


class Place:
    """What `start_place` made. A sandbox gets another one when it is restored."""

    def __init__(
        self,
        *,
        base: Snapshot,
        link: AgentLink,
        process: asyncio.subprocess.Process,
        upper: int,
        group: ControlGroup | None,
    ) -> None:
        self.base, self.link, self.group = base, link, group
        self._process, self._upper = process, upper
        status = os.fstatvfs(upper)
        self._empty_inodes = status.f_files - status.f_ffree

    async def freeze_and_pack(self, store: LayerStore, limits: Limits) -> str | None:
        """The changed files as a layer, None where nothing changed; all is stopped meanwhile."""
        if self.group is not None and self.group.can_freeze:
            return await _to_the_end(self._frozen_pack, store, limits)
        await self.link.pause()
        try:
            return await _to_the_end(self._pack, store, limits)
        finally:
            await self.link.resume()

    def _frozen_pack(self, store: LayerStore, limits: Limits) -> str | None:
        assert self.group is not None
        self.group.freeze()
        try:
            return self._pack(store, limits)
        finally:
            self.group.thaw()

    def _pack(self, store: LayerStore, limits: Limits) -> str | None:
        return store.pack_upper(self._upper, below=self.base, max_bytes=limits.disk_bytes)

    def disk_usage(self) -> tuple[int, int]:
        """Bytes and inodes that were written over the base."""
        status = os.fstatvfs(self._upper)
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        return used_bytes, status.f_files - status.f_ffree - self._empty_inodes

    async def end(self) -> None:
        """Kill everything and remove it. The link must be closed, which ends the agent."""
        if self._upper < 0:
            return
        upper, self._upper = self._upper, -1
        os.close(upper)
        await _end(self._process, self.group)


async def _to_the_end(
    pack: Callable[[LayerStore, Limits], str | None], store: LayerStore, limits: Limits
) -> str | None:
    """In a thread, which a cancelled caller waits for: it reads the sandbox's open files."""
    packing = asyncio.create_task(asyncio.to_thread(pack, store, limits))
    try:
        return await asyncio.shield(packing)
    except asyncio.CancelledError:
        await asyncio.wait([packing])
        raise


async def _end(process: asyncio.subprocess.Process, group: ControlGroup | None) -> None:
    if group is not None:
        for directory in group.directories:
            kill_group(directory)
    try:
        # The end of process 1, which follows from that of the link, is the end of all.
        await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await _close_pipes(process)
    if group is not None:
        await asyncio.to_thread(group.remove)


async def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """Of a process that has ended: else they stay open where the event loop ends at once."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    await process.stdout.read()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What a sandbox is started with."""

    bwrap: str
    launcher: Path
    agent: Path
    limit_memory: bool
    """By an rlimit, since no control group does."""
    limit_processes: bool
    """The same."""


async def start_place(
    spec: SandboxSpec,
    base: Snapshot,
    *,
    lowers: list[Path],
    programs: Programs,
    group: ControlGroup | None,
) -> Place:
    """Start the processes, and wait for the agent.

    SandboxError with what the launcher or bwrap said; nothing is left behind then, nor where this
    is cancelled.
    """
    # asyncio loses a process whose start is cancelled, and waits for it without end.
    starting = asyncio.create_task(_start(spec, base, lowers, programs, group))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        if starting.exception() is None:
            await starting.result().link.close()
            await starting.result().end()
        raise


async def _start(
    spec: SandboxSpec,
    base: Snapshot,
    lowers: list[Path],
    programs: Programs,
    group: ControlGroup | None,
) -> Place:
    files = contextlib.ExitStack()
    process = None
    with files:
        own_info, info = os.pipe2(os.O_CLOEXEC)
        files.callback(os.close, own_info)
        own_control, control = socket.socketpair()
        files.enter_context(own_control)
        files.enter_context(control)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        files.callback(os.close, errors)
        bwrap_arguments = BwrapArguments(
            spec, agent=programs.agent, seccomp=open_filter(), info=info
        )
        files.callback(bwrap_arguments.close)
        try:
            if group is not None:
                group.create(spec.limits)
            process = await asyncio.create_subprocess_exec(
                programs.launcher,
                *_launcher_arguments(spec, lowers, control.fileno(), group, programs),
                "--",
                *(
                    programs.bwrap,
                    "--args",
                    str(bwrap_arguments.arguments),
                    "--",
                    *bwrap_arguments.command,
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                pass_fds=(control.fileno(), *bwrap_arguments.descriptors),
                env={},
                cwd="/",
                start_new_session=True,
            )
            # Else this process would keep the pipe open for itself.
            bwrap_arguments.close()
            assert process.stdin is not None
            assert process.stdout is not None
            link = await AgentLink.open(process.stdout, process.stdin)
            _, (upper, *_), _, _ = socket.recv_fds(own_control, 1, 1)
            os.set_inheritable(upper, False)
            if programs.limit_processes:
                pid = int(json.loads(os.read(own_info, 4096))["child-pid"])
                limit = (spec.limits.processes, spec.limits.processes)
                resource.prlimit(pid, resource.RLIMIT_NPROC, limit)
        except BaseException as error:
            await asyncio.shield(_abandon(process, group))
            if isinstance(error, SandboxClosedError):
                said = os.pread(errors, 4000, 0).decode(errors="replace").strip()
                raise SandboxError(f"bubblewrap did not start: {said or error}") from error
            raise
    return Place(base=base, link=link, process=process, upper=upper, group=group)


async def _abandon(process: asyncio.subprocess.Process | None, group: ControlGroup | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await _end(process, group)
    elif group is not None:
        await asyncio.to_thread(group.remove)


def _launcher_arguments(
    spec: SandboxSpec,
    lowers: list[Path],
    control: int,
    group: ControlGroup | None,
    programs: Programs,
) -> list[str]:
    limits, binds = spec.limits, launcher_binds(spec)
    inodes = limits.inodes + _OWN_INODES + len(binds)
    arguments = ["--parent", str(os.getpid()), "--control", str(control)]
    arguments += ["--size", str(limits.disk_bytes), "--inodes", str(inodes)]
    if os.geteuid() == 0:
        # Not root for the kernel either, whatever the namespaces say.
        arguments += ["--uid", str(USER_ID)]
    for directory in group.directories if group else ():
        arguments += ["--cgroup", str(directory)]
    for path in lowers:
        arguments += ["--lower", str(path)]
    for source, name in binds:
        arguments += ["--bind", source, name]
    # Of a sparse file; an ordinary one meets the end of the tmpfs first, which says it better.
    rlimits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits.disk_bytes + (1 << 20)}
    if programs.limit_memory:
        rlimits[resource.RLIMIT_DATA] = limits.memory_bytes
    for number, value in rlimits.items():
        arguments += ["--rlimit", str(number), str(value)]
    return arguments
