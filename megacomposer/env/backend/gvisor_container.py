"""One gVisor container at a time, and the runsc processes that it consists of.

`runsc run` stays the parent of the sandbox's processes, so they end with it, and it ends with the
host process. Its own directory (state, configuration, messages) is named after the host process;
`remove_stale` removes those of host processes that were killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacomposer.env.backend.cgroup import ControlGroup, GroupRoots
from megacomposer.env.backend.gvisor_runtime import Runsc
from megacomposer.env.backend.layers import remove_tree
from megacomposer.env.backend.process_identity import is_dead, own_identity
from megacomposer.env.sandbox import Limits, SandboxError

KERNEL_BYTES = 96 << 20
"""What gVisor's own kernel may need beside `Limits.memory_bytes`."""
_KERNEL_THREADS = 1000
_COMMAND_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 30.0
_MESSAGE_BYTES = 2000
# Enters the groups, then becomes the command.
_ENTER = """
count=$1
shift
while [ "$count" -gt 0 ]; do
  echo $$ >"$1/cgroup.procs" || exit 125
  shift
  count=$((count - 1))
done
exec "$@"
"""


def make_group(roots: GroupRoots, name: str, limits: Limits) -> ControlGroup | None:
    """Limits for gVisor's processes on the host; None where no group can be made."""
    if not {"memory", "cpu"} <= set(roots.controllers):
        return None
    group = ControlGroup(roots, name)
    group.create(
        Limits(
            memory_bytes=limits.memory_bytes + KERNEL_BYTES,
            # A backstop: inside, the limit is gVisor's. Its kernel has threads of its own.
            processes=4 * limits.processes + _KERNEL_THREADS,
            cpus=limits.cpus,
        )
    )
    return group


class Container:
    """Starts, freezes, thaws and deletes; `directory` is its own, made by `new_directory`."""

    def __init__(
        self, runsc: Runsc, directory: Path, *, group: ControlGroup | None, cpus: float
    ) -> None:
        self.directory = directory
        self.group = group
        self._runsc, self._cpus = runsc, cpus
        self._generation = 0
        self._process: asyncio.subprocess.Process | None = None
        self._memory_file: str | None = None

    async def run(self, config: Mapping[str, Any]) -> asyncio.subprocess.Process:
        """A fresh container; the process is `runsc`, its stdin and stdout are the agent's."""
        (self.directory / "config.json").write_text(json.dumps(config))
        return await self._start("run")

    async def restore(self, config: Mapping[str, Any], image: Path) -> asyncio.subprocess.Process:
        """One that goes on where `checkpoint` stopped. Errors show when the process has ended."""
        (self.directory / "config.json").write_text(json.dumps(config))
        return await self._start("restore", "-image-path", str(image))

    async def checkpoint(self, image: Path) -> None:
        """Write everything to a directory; the container ends. SandboxError where that failed."""
        await self._command("checkpoint", "-image-path", str(image), self._name)

    async def delete(self) -> None:
        """Kill what is there, and wait until it is gone. Does nothing a second time."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            await self._command("delete", "-force", self._name, check=False)
            try:
                async with asyncio.timeout(_EXIT_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        # Also what a `runsc` that was killed has left.
        if self._has_state():
            await self._command("delete", "-force", self._name, check=False)

    def kill(self) -> None:
        """Kill at once; `delete` cleans up."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def remove(self) -> None:
        """`delete`, and the directory and the group too."""
        await self.delete()
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)
        if self.directory.exists():
            await asyncio.to_thread(remove_tree, self.directory)

    def message(self) -> str:
        """The last of what runsc said."""
        file = self.directory / "stderr"
        text = file.read_bytes()[-_MESSAGE_BYTES:].decode(errors="replace") if file.exists() else ""
        return text.strip() or "it said nothing"

    def memory_bytes(self) -> int | None:
        """What the processes and the written files use; None where it cannot be seen.

        gVisor keeps all of it in one memory file, whose blocks are counted.
        """
        pid_file = self.directory / "pid"
        try:
            pid = int(pid_file.read_text())
            if self._memory_file is None:
                self._memory_file = _find_memory_file(pid)
            return os.stat(self._memory_file).st_blocks * 512 if self._memory_file else None
        except (OSError, ValueError):  # not there yet, or gone
            return None

    @property
    def _name(self) -> str:
        # runsc's control socket is named after it, in one name space for the whole machine.
        return f"{self.directory.name.rpartition('.')[2]}-{self._generation}"

    def _has_state(self) -> bool:
        state = self.directory / "state"
        return state.exists() and any(self._name in name for name in os.listdir(state))

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        self._generation += 1
        self._memory_file = None
        command = self._runsc.command(
            self.directory / "state",
            *arguments,
            "-bundle",
            str(self.directory),
            "-pid-file",
            str(self.directory / "pid"),
            self._name,
        )
        if self.group is not None:
            groups = [str(directory) for directory in self.group.directories]
            command = ["/bin/sh", "-c", _ENTER, "sh", str(len(groups)), *groups, *command]
        elif cores := _some_cores(self._cpus):
            command = ["taskset", "-c", cores, *command]
        with (self.directory / "stderr").open("ab") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=_environment(),
                start_new_session=True,
            )
        return self._process

    async def _command(self, *arguments: str, check: bool = True) -> None:
        await run_command(self._runsc.command(self.directory / "state", *arguments), check=check)


async def run_command(command: Sequence[str], *, check: bool = True) -> None:
    """A runsc command to its end. SandboxError where it fails, if `check`, or hangs."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(),
    )
    try:
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            _, message = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise SandboxError(f"{shlex.join(command)[:500]} hangs") from None
        raise
    if check and process.returncode != 0:
        text = message.decode(errors="replace").strip()[-_MESSAGE_BYTES:]
        raise SandboxError(f"{shlex.join(command)[-200:]}: {text or process.returncode}")


def new_directory(sandbox_id: str) -> Path:
    """A directory for a sandbox, which tells whose it is."""
    root = _directories()
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.geteuid():
        raise SandboxError(f"{root} belongs to someone else: remove it, or set TMPDIR")
    directory = root / f"{own_identity()}.{sandbox_id}"
    directory.mkdir(mode=0o700)
    (directory / "state").mkdir()
    return directory


async def remove_stale(runsc: Runsc, store: Path) -> None:
    """Ends and removes what host processes that were killed have left, half-made images too."""
    for parent in (*store.glob("memory"), *store.glob("gvisor/roots-*")):
        for scratch in parent.glob(".*-*.*"):
            if is_dead(scratch.name.split(".")[1]):
                await asyncio.to_thread(remove_tree, scratch)
    root = _directories()
    for name in os.listdir(root) if root.exists() else ():
        if not is_dead(name.split(".", 1)[0]):
            continue
        state = root / name / "state"
        for entry in os.listdir(state) if state.exists() else ():
            if match := re.search(r"gvisor-[0-9a-f]+-\d+", entry):
                await run_command(runsc.command(state, "delete", "-force", match[0]), check=False)
        if (root / name).exists():
            await asyncio.to_thread(remove_tree, root / name)


def _directories() -> Path:
    return Path(tempfile.gettempdir()).resolve() / f"megacomposer-gvisor-{os.geteuid()}"


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath)}


def _some_cores(cpus: float) -> str:
    """As many of ours as the limit needs, at random; "" for all."""
    own = sorted(os.sched_getaffinity(0))
    wanted = max(1, round(cpus))
    return "" if wanted >= len(own) else ",".join(map(str, random.sample(own, wanted)))


def _find_memory_file(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        if os.readlink(f"{folder}/{name}").startswith("/memfd:runsc-memory"):
            return f"{folder}/{name}"
    return None
