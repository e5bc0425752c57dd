"""The seccomp filter of sandboxes: system calls that no build or test needs, refused with EPERM.

Namespaces, capabilities and `no_new_privs` already forbid most of these. The filter keeps the code
behind them, where the kernel's holes have been, out of reach, and stops what is not bound to a
namespace at all (AF_VSOCK). It is a list of refusals: what it does not name is left to the kernel.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

# Name -> number on x86-64 and on aarch64 (None: not there).
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # Large or young parts of the kernel.
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "memfd_secret": (447, 447),
    # The machine.
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "lookup_dcookie": (212, 18),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "nfsservctl": (180, 42),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "uselib": (134, None),
    "_sysctl": (156, None),
}
# audit architecture; clone, clone3, socket, socketpair, ioctl; column of _REFUSED.
_MACHINES = {
    "x86_64": (0xC000003E, (56, 435, 41, 53, 16), 0),
    "aarch64": (0xC00000B7, (220, 435, 198, 199, 29), 1),
}
_LAST_KNOWN_CALL = 469
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_SOCKET_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_TERMINAL_REQUESTS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX write into a terminal's input."""

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


class _Program:
    """A BPF program; jumps name labels that come later."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str, str]] = []
        self._labels: dict[str, int] = {}

    def add(self, code: int, value: int, yes: str = "", no: str = "") -> None:
        """`yes` and `no`: where to jump; "" is the next line."""
        self._lines.append((code, value, yes, no))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def assemble(self) -> bytes:
        out = b""
        for index, (code, value, *targets) in enumerate(self._lines):
            offsets = [self._labels[name] - index - 1 if name else 0 for name in targets]
            assert all(0 <= offset < 256 for offset in offsets)
            out += struct.pack("<HBBI", code, *offsets, value)
        return out


def build_filter(machine: str = platform.machine()) -> bytes:
    """The program as an array of `struct sock_filter`, for `bwrap --seccomp`.

    ValueError for a machine whose system calls are not known.
    """
    if machine not in _MACHINES:
        raise ValueError(f"no seccomp filter for {machine}; known: {', '.join(_MACHINES)}")
    architecture, (clone, clone3, socket, socketpair, ioctl), column = _MACHINES[machine]
    program = _Program()
    program.add(_LOAD, _ARCHITECTURE_OFFSET)
    # The other calling conventions of the machine have other numbers.
    program.add(_JUMP_EQUAL, architecture, "", "kill")
    program.add(_LOAD, _NUMBER_OFFSET)
    # Later calls (and x32) are unknown here; programs know how to do without.
    program.add(_JUMP_ABOVE, _LAST_KNOWN_CALL, "absent")
    # Its flags are in memory, which a filter cannot read: the C library falls back to clone.
    program.add(_JUMP_EQUAL, clone3, "absent")
    for number in (numbers[column] for numbers in _REFUSED.values()):
        if number is not None:
            program.add(_JUMP_EQUAL, number, "refuse")
    program.add(_JUMP_EQUAL, clone, "clone")
    program.add(_JUMP_EQUAL, socket, "socket")
    program.add(_JUMP_EQUAL, socketpair, "socket")
    program.add(_JUMP_EQUAL, ioctl, "ioctl", "allow")
    program.label("clone")
    program.add(_LOAD, _ARGUMENT_OFFSET)
    program.add(_JUMP_SET, _NAMESPACE_FLAGS, "refuse", "allow")
    program.label("socket")
    program.add(_LOAD, _ARGUMENT_OFFSET)
    for family in _SOCKET_FAMILIES:
        program.add(_JUMP_EQUAL, family, "allow")
    program.add(_JUMP_SET, 0, "", "refuse")  # Never set: always to "refuse".
    program.label("ioctl")
    program.add(_LOAD, _ARGUMENT_OFFSET + 8)
    for request in _TERMINAL_REQUESTS:
        program.add(_JUMP_EQUAL, request, "refuse")
    program.label("allow")
    program.add(_RETURN, _ALLOW)
    program.label("refuse")
    program.add(_RETURN, _ERROR | errno.EPERM)
    program.label("absent")
    program.add(_RETURN, _ERROR | errno.ENOSYS)
    program.label("kill")
    program.add(_RETURN, _KILL)
    return program.assemble()


def open_filter() -> int:
    """The filter of this machine in an open file, at its start; the caller closes it."""
    descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(descriptor, build_filter())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
