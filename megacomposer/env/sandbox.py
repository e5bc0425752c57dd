"""The sandbox protocol: what every backend does, and the values that cross it.

A sandbox is one isolated machine-like place with a working tree at `WORKDIR`. Everything that
touches its files goes through a process inside it, so a path, symlink or archive that the agent
made never names a file of the host.

    backend = await open_backend("bubblewrap", store=Path("~/.cache/megacomposer/layers"))
    async with await backend.start(SandboxSpec(base=snapshot)) as sandbox:
        result = await sandbox.exec(["pytest", "-q"], timeout_s=60.0)
        child = await sandbox.fork()
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from types import TracebackType
from typing import Protocol, Self

WORKDIR = PurePosixPath("/workspace")
"""The repository inside every sandbox: the default working directory of a command."""
HOME = PurePosixPath("/home/agent")
"""Writable, empty at the start; `HOME` of every command."""
TEMPORARY = PurePosixPath("/tmp")
USER_ID = 1000
"""User and group id of every command inside."""
EGRESS_PORT = 3128
"""Where the egress proxy listens inside, on 127.0.0.1, when the sandbox has one."""


class SandboxError(RuntimeError):
    """The infrastructure failed (backend, host, agent link). Never the task's fault: retry it."""


class BackendUnavailableError(SandboxError):
    """This machine cannot run the backend; the message says what is missing and the remedy."""


class SandboxClosedError(SandboxError):
    """The sandbox has ended, or its processes died under it."""


class SandboxFileError(ValueError):
    """A file operation that the sandbox's own file system refuses; names path and reason.

    `code` is the errno name, such as "ENOENT", "EISDIR", "EFBIG" or "ENOSPC".
    """

    def __init__(self, path: str, code: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.code, self.reason = path, code, reason


class PatchRejectedError(ValueError):
    """The diff does not apply; the message is git's. Nothing was changed."""


class SnapshotError(ValueError):
    """An unknown, deleted or damaged snapshot; names it."""


class Status(enum.StrEnum):
    """How a command ended."""

    EXITED = "exited"
    """By itself: `exit_code` is 0..255."""
    SIGNALED = "signaled"
    """By a signal that the sandbox did not send; `exit_code` is 128 + signal."""
    TIMEOUT = "timeout"
    """Killed with all that it started at `timeout_s`; the output up to then is there."""
    MEMORY_LIMIT = "memory_limit"
    """Killed by the kernel at `Limits.memory_bytes`; `exit_code` is 137."""
    OUTPUT_LIMIT = "output_limit"
    """Killed because it wrote more than `Limits.output_bytes`; the first bytes are kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecResult:
    """A command that has ended."""

    status: Status
    exit_code: int
    """128 + signal where a signal ended it (137 for SIGKILL)."""
    stdout: bytes
    stderr: bytes
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status is Status.EXITED and self.exit_code == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Quotas of one sandbox. A backend that cannot enforce one refuses to start with it."""

    memory_bytes: int = 4 << 30
    """All processes together, page cache and written files included."""
    processes: int = 512
    """Processes and threads together."""
    cpus: float = 2.0
    """Cores' worth of time."""
    disk_bytes: int = 2 << 30
    """What may be written over the base, workspace, home and temporary files together."""
    inodes: int = 200_000
    """How many files and directories may be made."""
    output_bytes: int = 8 << 20
    """Of one command, stdout and stderr together."""
    wall_s: float = 6 * 3600.0
    """Life of the sandbox: after it, everything inside is killed and calls raise
    SandboxClosedError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A directory or file of the host that the sandbox sees, read-only."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path inside."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A frozen state, named by its content; usable on any machine that has its layers."""

    layers: tuple[str, ...]
    """SHA-256 of each file layer (an OCI-style tar), lowest first; () is an empty workspace."""
    memory: str | None = None
    """SHA-256 of the memory image, for backends that freeze processes too; None: files only."""

    @property
    def id(self) -> str:
        """One word for logs and keys: the newest layer (or "empty"), and the memory image."""
        top = self.layers[-1][:16] if self.layers else "empty"
        return f"{top}-{len(self.layers)}" + (f"+{self.memory[:16]}" if self.memory else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What to start."""

    base: Snapshot = Snapshot(layers=())
    """Its files are the root of three trees: `workspace/`, `home/` and `tmp/`, mounted at
    `WORKDIR`, `HOME` and `TEMPORARY`."""
    rootfs: str | None = None
    """A directory of the host with `usr`, `etc` and so on, read-only inside; None: the host's own
    /usr, and a made-up /etc."""
    mounts: tuple[Mount, ...] = ()
    limits: Limits = Limits()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables of every command. Nothing of the host's environment is inherited."""
    egress_socket: str | None = None
    """Unix socket of the policy proxy on the host. Inside, it is reached at
    127.0.0.1:EGRESS_PORT; None: no network at all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Use of resources so far. None: the backend cannot tell."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    processes: int | None
    cpu_s: float | None
    disk_bytes: int | None
    inodes: int | None
    enforced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Field of Limits -> what enforces it: "cgroup", "rlimit", "tmpfs", "agent", "none"."""


OnOutput = Callable[[str, bytes], None]
"""Called with "stdout" or "stderr" and the bytes, as they come."""


class Sandbox(Protocol):
    """One running sandbox. All methods raise SandboxClosedError after `close`."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

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
        """Run a command to its end; no shell, no terminal, stdin ends after `stdin`.

        Processes that it leaves in the background live on until the sandbox ends, unless it timed
        out or broke a limit: then everything that it started dies with it.

        `cwd` defaults to WORKDIR; `env` is added to the spec's.

        Raises SandboxFileError where the program or `cwd` does not exist.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 32 << 20) -> bytes:
        """Raises SandboxFileError: missing, no regular file, or longer than `max_bytes` (EFBIG).

        Relative paths are from WORKDIR. Links are followed inside the sandbox only.
        """
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file, parents included; mode applies when it is created.

        Written beside and renamed: a reader never sees half. Raises SandboxFileError.
        """
        ...

    async def patch(self, diff: bytes) -> None:
        """Apply a `git diff --binary` to WORKDIR, whole or not at all; else PatchRejectedError."""
        ...

    async def snapshot(self) -> Snapshot:
        """Freeze the state as it is now; the sandbox goes on. Content-addressed."""
        ...

    async def fork(self) -> Self:
        """A second sandbox in the present state: its files, and its processes where the backend's
        `forks_memory`."""
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Go back (or over) to a snapshot; everything that runs inside is killed first."""
        ...

    async def stats(self) -> Stats: ...

    async def close(self) -> None:
        """Kill and remove everything; a second call does nothing."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SandboxBackend(Protocol):
    """Starts sandboxes of one kind on this machine."""

    name: str
    isolates: bool
    """False for `local`, which only an explicit opt-in may use."""
    forks_memory: bool

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox of `spec.base`.

        Raises SnapshotError, or SandboxError; nothing is left behind then.
        """
        ...

    async def import_tree(self, workspace: str) -> Snapshot:
        """Put a host directory into the store as the files of WORKDIR, as one layer.

        Content-addressed (times are not part of it), owned by USER_ID inside; links stay links,
        special files are refused (ValueError).
        """
        ...

    async def export_layer(self, digest: str, file: str) -> None:
        """Write a layer as a tar file, to carry to another machine. SnapshotError if unknown."""
        ...

    async def import_layer(self, file: str) -> str:
        """Add such a file to this machine's store, checked by its digest, which is returned."""
        ...

    async def close(self) -> None:
        """End all sandboxes of this backend."""
        ...
