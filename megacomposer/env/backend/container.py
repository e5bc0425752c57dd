"""The container backend: `docker` or `podman`, by their command line.

    backend = await open_backend("docker", store=..., image="python:3.11-slim")

The agent is bound into the image and is the container's process; workspace, home and temporary
files are sized tmpfs mounts, filled through the agent. There is no network, no capability, and the
image is read-only. Half of `Limits.disk_bytes` is for the workspace; only docker limits inodes.
Snapshots are files, packed by `tar` inside; the image needs a shell, tar and find.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import shutil
from collections.abc import Sequence
from typing import Self

from megacomposer.env.audit import Record, discard
from megacomposer.env.backend.agent_link import AgentLink
from megacomposer.env.backend.agent_sandbox import AgentSandbox, agent_program, new_sandbox_id
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.backend.process_identity import is_dead, own_identity
from megacomposer.env.backend.store_backend import StoreBackend
from megacomposer.env.backend.tree_stream import pack_over_link, write_tree_tar
from megacomposer.env.sandbox import (
    EGRESS_PORT,
    HOME,
    TEMPORARY,
    USER_ID,
    WORKDIR,
    BackendUnavailableError,
    SandboxClosedError,
    SandboxError,
    SandboxSpec,
    Snapshot,
    SnapshotError,
    Stats,
)

PROGRAMS = ("docker", "podman")
LABEL = "megacomposer.host"
"""Of every container: the identity of the host process."""
_AGENT = "/run/megacomposer-agent"
_EGRESS = "/run/megacomposer-egress.sock"
_PACK_TIMEOUT_S = 600.0
_COMMAND_TIMEOUT_S = 60.0
_ENFORCED = {
    "memory_bytes": "cgroup",
    "processes": "cgroup",
    "cpus": "cgroup",
    "disk_bytes": "tmpfs",
    "inodes": "tmpfs",
    "output_bytes": "agent",
    "wall_s": "agent",
}


async def probe() -> str:
    """ "" where docker or podman answers, else why not."""
    try:
        await find_program()
    except BackendUnavailableError as error:
        return str(error)
    return ""


async def find_program() -> str:
    """The first of PROGRAMS whose engine answers. BackendUnavailableError."""
    reasons = []
    for program in PROGRAMS:
        if shutil.which(program) is None:
            reasons.append(f"{program} is not on PATH")
            continue
        code, _, message = await _run([program, "info"])
        if code == 0:
            return program
        reasons.append(f"{program}: {message.strip().splitlines()[-1:] or [f'exit {code}']}")
    raise BackendUnavailableError(f"{'; '.join(reasons)}: install podman, or start docker")


class ContainerSandbox(AgentSandbox):
    """One container."""

    def __init__(
        self,
        *,
        backend: DockerBackend,
        sandbox_id: str,
        spec: SandboxSpec,
        process: asyncio.subprocess.Process,
        link: AgentLink,
    ) -> None:
        super().__init__(sandbox_id=sandbox_id, spec=spec, link=link, record=backend.record)
        self._backend, self._process = backend, process

    async def snapshot(self) -> Snapshot:
        """Files, while background processes go on."""
        self._require_open()
        layer = await pack_over_link(
            self._link,
            self._backend.store,
            max_bytes=2 * self._spec.limits.disk_bytes,
            generation=len(self._spec.base.layers),
        )
        snapshot = Snapshot(layers=(layer,))
        self._record("snapshot", sandbox=self._id, snapshot=snapshot.id)
        return snapshot

    async def fork(self) -> Self:
        spec = dataclasses.replace(self._spec, base=await self.snapshot())
        child = await self._backend.start(spec)
        assert isinstance(child, type(self))
        return child

    async def restore(self, snapshot: Snapshot) -> None:
        self._require_open()
        archive = await self._backend.archive(snapshot)
        await self._link.kill_all()
        await self._backend.fill(self._link, archive)

    async def stats(self) -> Stats:
        return await self._stats_of_link(self._backend.enforced)

    async def _destroy(self) -> None:
        await self._backend.remove(self._id)
        await self._process.wait()
        self._backend.forget(self)


class DockerBackend(StoreBackend):
    """Starts containers of one image."""

    name = "docker"
    isolates = True
    forks_memory = False

    def __init__(
        self,
        store: LayerStore,
        *,
        record: Record = discard,
        image: str = "",
        options: Sequence[str] = (),
    ) -> None:
        """`options` go before the subcommand, such as --storage-driver of podman."""
        if not image:
            raise ValueError("image is not set: name one with a shell, tar, find and git")
        super().__init__(store, record)
        self._image, self._options = image, tuple(options)
        self._program = ""

    async def start(self, spec: SandboxSpec) -> ContainerSandbox:
        _refuse(spec)
        if not self._program:
            self._program = await find_program()
            await self._remove_stale()
        archive = await self.archive(spec.base)
        sandbox_id = new_sandbox_id(self.name)
        process = await asyncio.create_subprocess_exec(
            *self._command(
                "run",
                *_run_options(self._program, spec, sandbox_id),
                self._image,
                *_agent_options(spec),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            link = await AgentLink.open(process.stdout, process.stdin)
            await self.fill(link, archive)
        except BaseException as error:
            await asyncio.shield(self.remove(sandbox_id))
            message = (await process.stderr.read(4000)).decode(errors="replace").strip()
            await process.wait()
            if isinstance(error, SandboxClosedError):
                raise SandboxError(f"{self._program} run failed: {message}") from error
            raise
        sandbox = ContainerSandbox(
            backend=self, sandbox_id=sandbox_id, spec=spec, process=process, link=link
        )
        self._running.add(sandbox)
        self.record(
            "sandbox_started", sandbox=sandbox_id, backend=self.name, enforced=self.enforced
        )
        return sandbox

    @property
    def enforced(self) -> dict[str, str]:
        """See `Stats.enforced`."""
        return {**_ENFORCED, "inodes": "none" if self._program == "podman" else "tmpfs"}

    async def archive(self, snapshot: Snapshot) -> bytes:
        """The snapshot's files, to `fill` a container with."""
        if snapshot.memory is not None:
            raise SnapshotError("containers restore files only: drop the snapshot's memory")
        file = io.BytesIO()
        await asyncio.to_thread(write_tree_tar, self.store, snapshot, file)
        return file.getvalue()

    async def fill(self, link: AgentLink, archive: bytes) -> None:
        """Replace the trees by an archive's."""
        trees = f"{WORKDIR} {HOME} {TEMPORARY}"
        script = f"find {trees} -mindepth 1 -maxdepth 1 -exec rm -rf {{}} + && cd / && tar -xof -"
        result = await link.exec(
            ["/bin/sh", "-c", script],
            cwd="/",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            stdin=archive,
            timeout_s=_PACK_TIMEOUT_S,
            output_bytes=1 << 20,
        )
        if not result.ok:
            text = result.stderr.decode(errors="replace")[-500:]
            raise SandboxError(f"the image cannot unpack the base (needs sh, find, tar): {text}")

    async def remove(self, sandbox_id: str) -> None:
        """Kill and remove a container, also one that has ended."""
        await _run(self._command("rm", "--force", "--volumes", sandbox_id))

    async def _remove_stale(self) -> None:
        """Containers of host processes that were killed."""
        template = '{{.Names}} {{.Label "' + LABEL + '"}}'
        listing = ["ps", "--all", "--filter", f"label={LABEL}", "--format", template]
        code, output, message = await _run(self._command(*listing))
        if code != 0:
            raise SandboxError(f"{self._program} ps: {message.strip()[-500:]}")
        for line in output.splitlines():
            name, _, identity = line.partition(" ")
            if is_dead(identity):
                await self.remove(name)

    def _command(self, *arguments: str) -> list[str]:
        return [self._program, *self._options, *arguments]


def _refuse(spec: SandboxSpec) -> None:
    if spec.rootfs is not None:
        raise BackendUnavailableError("containers have an image instead of a rootfs: set `image`")


def _run_options(program: str, spec: SandboxSpec, sandbox_id: str) -> list[str]:
    limits = spec.limits
    options = [
        "--rm",
        "--interactive",
        f"--name={sandbox_id}",
        f"--label={LABEL}={own_identity()}",
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        f"--user={USER_ID}:{USER_ID}",
        f"--memory={limits.memory_bytes}",
        f"--memory-swap={limits.memory_bytes}",
        f"--pids-limit={limits.processes}",
        f"--cpus={limits.cpus:g}",
        "--ulimit=nofile=4096:4096",
        "--ulimit=core=0:0",
        # Of the user on the whole host; podman's own default may be above what it may set.
        "--ulimit=nproc=16384:16384",
        f"--volume={agent_program()}:{_AGENT}:ro",
        f"--entrypoint={_AGENT}",
    ]
    # The shares add up to the quota. Podman knows no number of inodes, and docker no owner by `U`.
    for place, share in ((WORKDIR, 2), (HOME, 4), (TEMPORARY, 4)):
        size_bytes = limits.disk_bytes // share
        if program == "podman":
            mount = f"type=tmpfs,destination={place},tmpfs-mode=755,tmpfs-size={size_bytes},U=true"
            options.append(f"--mount={mount},exec")
        else:
            owner = f"uid={USER_ID},gid={USER_ID},nr_inodes={limits.inodes}"
            options.append(
                f"--tmpfs={place}:rw,exec,nosuid,nodev,mode=755,size={size_bytes},{owner}"
            )
    options += [f"--volume={one.source}:{one.target}:ro" for one in spec.mounts]
    if spec.egress_socket is not None:
        options.append(f"--volume={spec.egress_socket}:{_EGRESS}:ro")
    return options


def _agent_options(spec: SandboxSpec) -> list[str]:
    forward = ["--forward", f"{EGRESS_PORT}:{_EGRESS}"] if spec.egress_socket else []
    return ["--namespace", *forward]


async def _run(command: Sequence[str]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            output, message = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            return 124, "", f"{os.path.basename(command[0])} did not answer"
        raise
    return (
        process.returncode or 0,
        output.decode(errors="replace"),
        message.decode(errors="replace"),
    )
