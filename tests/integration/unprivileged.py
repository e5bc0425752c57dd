"""Runs a test as an ordinary user, in a child process, where the tests themselves run as root."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - what is imported later may be out of reach
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import megacomposer.env.backend

USER_ID = 61_234
"""A user that owns nothing else on the machine."""
BOTH = ("root", "user")


def why_not(user: str) -> str:
    """Why a test cannot run as "root" or "user" here, or the empty string."""
    if user == "root" and os.geteuid() != 0:
        return "needs root"
    if user == "user" and os.geteuid() == 0:
        # The sandbox's programs lie in the package, which an ordinary user must be able to reach.
        for directory in Path(megacomposer.env.backend.__file__).resolve().parents:
            if not directory.stat().st_mode & 0o001:
                return f"an ordinary user cannot enter {directory}"
    return ""


def run_as(user: str, function: Callable[[], None], *, directory: Path) -> None:
    """Call `function` as this user, who gets `directory` and may reach it.

    AssertionError with the traceback where it fails in the child.
    """
    if user == "root" or os.geteuid() != 0:
        function()
        return
    os.chown(directory, USER_ID, USER_ID)
    for parent in (directory, *directory.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            signal.alarm(100)  # the time limit of the tests is for the parent only
            os.setgroups([])
            os.setresgid(USER_ID, USER_ID, USER_ID)
            os.setresuid(USER_ID, USER_ID, USER_ID)
            os.chdir(directory)
            function()
            status = 0
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"failed as {user}:\n{told}"
