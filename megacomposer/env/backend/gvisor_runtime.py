"""Which `runsc` this machine has, and how it can be run here.

Found by trying: each platform is given one short command, and one that hangs (KVM does on some
machines) is never asked for. The answer is remembered for the life of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from megacomposer.env.backend.gvisor_bundle import STATX_LIBRARY
from megacomposer.env.sandbox import USER_ID, BackendUnavailableError

PLATFORMS = ("systrap", "ptrace")
"""Of those that need no hardware, the fastest first; Debian 12's runsc has only ptrace."""
REMEDY = "install gVisor's runsc (Debian: apt-get install runsc)"
_TRY_TIMEOUT_S = 20.0
# Releases before this one refuse a flag of statx that `ls` always passes.
_STATX_FIXED = 20230401
_PARENT_DEATH = ("setpriv", "--pdeathsig", "KILL")
_USER_NAMESPACE = ("unshare", "-Urm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runsc:
    """One way to run gVisor that was seen to work."""

    prefix: tuple[str, ...]
    """What runs `runsc`, and `runsc` itself with its options."""
    platform: str
    version: str
    mode: str
    """"root", "user namespace", or "rootless" (which cannot restore, so not fork memory)."""
    user_id: int
    """Of the commands inside."""

    @property
    def forks_memory(self) -> bool:
        return self.mode != "rootless"

    @property
    def needs_statx(self) -> bool:
        date = re.search(r"\d{8}", self.version)
        return date is not None and int(date[0]) < _STATX_FIXED

    def command(self, state: Path, *arguments: str) -> list[str]:
        """`state` is where runsc keeps what it knows of its containers."""
        return [*self.prefix, "-root", str(state), *arguments]


_found: dict[tuple[str, float, int], Runsc] = {}


async def find_runsc() -> Runsc:
    """The best way that works here. BackendUnavailableError says why none does."""
    program = shutil.which("runsc")
    if program is None:
        raise BackendUnavailableError(f"runsc is not on PATH: {REMEDY}")
    for tool in (_PARENT_DEATH[0], _USER_NAMESPACE[0]):
        if shutil.which(tool) is None:
            raise BackendUnavailableError(f"{tool} is not on PATH: install util-linux")
    key = (program, os.stat(program).st_mtime, os.geteuid())
    if key not in _found:
        _found[key] = await _try_all(program)
    runsc = _found[key]
    if runsc.needs_statx and not STATX_LIBRARY.exists():
        raise BackendUnavailableError(
            f"runsc {runsc.version} needs {STATX_LIBRARY.name}, or `ls` fails inside: install a "
            "C++ compiler and reinstall with `pip install -e .`, or take a runsc of 2023 or later"
        )
    return runsc


async def _try_all(program: str) -> Runsc:
    _, output = await _run([program, "--version"])
    version = output.split("\n", 1)[0].removeprefix("runsc version ").strip()
    common = ("-network=none", "-overlay2=root:memory", "-host-uds=open")
    modes: dict[str, tuple[str, ...]] = {"root": (*_PARENT_DEATH, program, "-ignore-cgroups")}
    if os.geteuid() != 0:
        modes = {
            # The new capabilities clear the parent-death signal, so it is set after.
            "user namespace": (*_USER_NAMESPACE, *_PARENT_DEATH, program, "-ignore-cgroups"),
            "rootless": (*_PARENT_DEATH, program, "-rootless"),
        }
    reasons = []
    for mode, prefix in modes.items():
        for platform in PLATFORMS:
            command = (*prefix, f"-platform={platform}", *common)
            code, output = await _run([*command, "do", "true"])
            if code == 0:
                # In a user namespace of one user that one is 0; it has no capability inside.
                user_id = USER_ID if mode == "root" else 0
                return Runsc(
                    prefix=command, platform=platform, version=version, mode=mode, user_id=user_id
                )
            reason = output.strip().splitlines()[-1:] or [f"exit {code}"]
            reasons.append(f"{mode}, {platform}: {reason[0][:200]}")
    raise BackendUnavailableError(f"runsc {version} does not run here ({'; '.join(reasons)})")


async def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output; a command that hangs is killed, with all that it started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_TRY_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        return 124, f"did not end in {_TRY_TIMEOUT_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return process.returncode or 0, output.decode(errors="replace")
