"""The seccomp filter, loaded into a real process: what is refused, and that programs still run."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys

import pytest

from megacomposer.env.backend.seccomp import build_filter, open_filter

# Loads the filter from descriptor argv[1], then runs the rest of its arguments as Python.
_LOADER = """
import ctypes, os, sys
data = os.read(int(sys.argv[1]), 1 << 16)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(data, len(data))
program = Program(len(data) // 8, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program)) == 0, os.strerror(ctypes.get_errno())
def call(number, *values):
    result = libc.syscall(number, *(ctypes.c_long(value) for value in values))
    return "ok" if result >= 0 else os.strerror(ctypes.get_errno())
exec(sys.argv[2])
"""


def run_filtered(code: str) -> str:
    descriptor = open_filter()
    try:
        result = subprocess.run(
            [sys.executable, "-I", "-c", _LOADER, str(descriptor), code],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(descriptor)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(autouse=True)
def on_x86_64() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of these calls are those of x86-64")


def test_dangerous_calls_are_refused() -> None:
    calls = {
        "ptrace": "101, 0",
        "process_vm_readv": "310, os.getpid(), 0, 0, 0, 0, 0",
        "unshare, without any flag": "272, 0",
        "setns": "308, 0, 0",
        "mount": "165, 0, 0, 0, 0, 0",
        "clone with CLONE_NEWUSER": "56, 0x10000000 | 17, 0, 0, 0, 0",
        "keyctl": "250, 0, -3, 0",
        "bpf": "321, 0, 0, 0",
        "io_uring_setup": "425, 1, 0",
        "userfaultfd": "323, 0",
        "perf_event_open": "298, 0, 0, -1, -1, 0",
        "AF_VSOCK": "41, 40, 1, 0",
        "AF_NETLINK": "41, 16, 3, 0",
        "AF_PACKET": "41, 17, 3, 0",
        "AF_ALG": "41, 38, 5, 0",
        "TIOCSTI": "16, 0, 0x5412, 0",
        "TIOCSTI with higher bits": "16, 0, 0x100005412, 0",
    }
    code = "\n".join(f"print(call({arguments}))" for arguments in calls.values())
    answers = dict(zip(calls, run_filtered(code).splitlines(), strict=True))
    assert answers == dict.fromkeys(calls, "Operation not permitted")


def test_unknown_calls_look_absent_so_that_programs_fall_back() -> None:
    code = "print(call(435, 0, 0)); print(call(5000)); print(call(0x40000000 + 39))"
    assert run_filtered(code) == "Function not implemented\n" * 3


def test_threads_children_and_sockets_work() -> None:
    code = """
import socket, subprocess, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family).close()
a, b = socket.socketpair(); a.sendall(b"pair"); print(b.recv(4).decode())
print(call(39) == "ok")
"""
    assert run_filtered(code).split() == ["thread", "child", "pair", "True"]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_lands_inside_and_every_path_returns(machine: str) -> None:
    program = build_filter(machine)
    lines = list(struct.iter_unpack("<HBBI", program))
    assert len(lines) < 4096
    for index, (code, yes, no, _) in enumerate(lines):
        if code & 0x07 == 0x05:
            assert max(index + 1 + yes, index + 1 + no) < len(lines)
    assert lines[-1][0] == 0x06


def test_unknown_machine_is_refused_rather_than_unfiltered() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        build_filter("riscv64")
