"""What bwrap is told: the sandbox's view of files, namespaces and rights, as its arguments.

Sources below /tmp/in and /tmp/root are where `_sandbox_launcher` puts them. Everything but the
agent's own command goes through a file, so that no process shows host paths in its arguments.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path

from megacomposer.env.sandbox import (
    EGRESS_PORT,
    HOME,
    TEMPORARY,
    USER_ID,
    WORKDIR,
    Mount,
    SandboxSpec,
)

AGENT = "/run/agent"
EGRESS_SOCKET = "/run/egress.sock"
_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID)),
    *("--cap-drop", "ALL", "--disable-userns", "--die-with-parent", "--new-session"),
    # The agent is process 1: commands cannot signal it, and its end is the end of all of them.
    *("--as-pid-1", "--clearenv", "--hostname", "sandbox"),
)
_ETC = {
    "passwd": f"root:x:0:0:root:/:/usr/sbin/nologin\n"
    f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    # No resolv.conf: there is no resolver to reach.
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_HOST_ETC = ("alternatives", "ld.so.cache", "ssl/certs", "ca-certificates", "mime.types")
"""Of the host's /etc, where they are: no secrets, and programs of /usr point to them."""
_ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_OWN_PLACES = ("proc", "dev", "sys", "tmp", "run", "home", "workspace", "root")
"""Of a rootfs these are not shown."""
_RESERVED_TARGETS = (WORKDIR, HOME, TEMPORARY, "/proc", "/dev", "/run", "/usr", "/etc", AGENT)


def check_mounts(mounts: Sequence[Mount]) -> None:
    """ValueError names a mount that is missing on the host, or would hide the sandbox's own."""
    for mount in mounts:
        target = posixpath.normpath(mount.target)
        if not os.path.isabs(mount.source) or not os.path.exists(mount.source):
            raise ValueError(f"mounts: {mount.source!r} is not on this machine (absolute path)")
        if target != mount.target or not target.startswith("/"):
            raise ValueError(f"mounts: target {mount.target!r} is not a plain absolute path")
        hidden = [str(place) for place in _RESERVED_TARGETS if _is_below(str(place), target)]
        inside = [place for place in ("/proc", "/dev", "/run") if _is_below(target, place)]
        if hidden or inside:
            raise ValueError(
                f"mounts: target {target!r} is a place of the sandbox's own: use another, such as "
                "/opt/NAME"
            )


def _is_below(path: str, parent: str) -> bool:
    return path == parent or parent == "/" or path.startswith(parent + "/")


def launcher_binds(spec: SandboxSpec) -> list[tuple[str, str]]:
    """Sources of the host, and the names below /tmp/in that the launcher gives them."""
    binds = [(mount.source, f"mount{index}") for index, mount in enumerate(spec.mounts)]
    if spec.rootfs is not None:
        binds.append((spec.rootfs, "rootfs"))
    if spec.egress_socket is not None:
        binds.append((spec.egress_socket, "egress"))
    return binds


class BwrapArguments:
    """Arguments and the open files that they name. `close` ends the files."""

    def __init__(self, spec: SandboxSpec, *, agent: Path, seccomp: int, info: int) -> None:
        """Takes `seccomp` and `info` over."""
        self.descriptors: list[int] = [seccomp, info]
        """To be inherited."""
        try:
            arguments = [*_ISOLATION, "--seccomp", str(seccomp), "--info-fd", str(info)]
            arguments += self._system(spec)
            for name in ("home", "run", "var"):
                arguments += ["--perms", "0755", "--dir", f"/{name}"]
            arguments += ["--proc", "/proc", "--dev", "/dev", "--bind", "/tmp/shm", "/dev/shm"]
            arguments += ["--bind", "/tmp/root/workspace", str(WORKDIR)]
            arguments += ["--bind", "/tmp/root/home", str(HOME)]
            arguments += ["--bind", "/tmp/root/tmp", str(TEMPORARY)]
            arguments += ["--symlink", str(TEMPORARY), "/var/tmp"]
            for index, mount in enumerate(spec.mounts):
                arguments += ["--ro-bind", f"/tmp/in/mount{index}", mount.target]
            descriptor = os.open(agent, os.O_RDONLY | os.O_CLOEXEC)
            arguments += self._file(descriptor, AGENT, "0555")
            if spec.egress_socket is not None:
                arguments += ["--bind", "/tmp/in/egress", EGRESS_SOCKET]
            arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(WORKDIR)]
            text = "".join(f"{argument}\0" for argument in arguments)
            self.arguments = self._content("arguments", text)
            """The file with all of them."""
        except BaseException:
            self.close()
            raise
        self.command = [AGENT]
        if spec.egress_socket is not None:
            self.command += ["--forward", f"{EGRESS_PORT}:{EGRESS_SOCKET}"]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def _system(self, spec: SandboxSpec) -> list[str]:
        if spec.rootfs is not None:
            return _system_of_rootfs(Path(spec.rootfs))
        arguments = ["--ro-bind", "/usr", "/usr"]
        for name in _ROOT_LINKS:
            path = Path("/", name)
            if path.is_symlink():
                arguments += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                arguments += ["--ro-bind", str(path), str(path)]
        for name in ("etc", "etc/ssl"):
            arguments += ["--perms", "0755", "--dir", f"/{name}"]
        for name, text in _ETC.items():
            arguments += self._file(self._content(name, text), f"/etc/{name}", "0444")
        for name in _HOST_ETC:
            if os.path.exists(f"/etc/{name}"):
                arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        return arguments

    def _content(self, name: str, text: str) -> int:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self.descriptors.append(descriptor)
        os.write(descriptor, text.encode(errors="surrogateescape"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _file(self, descriptor: int, target: str, mode: str) -> list[str]:
        """Copied, not bound: a bound file would show where it lies on the host."""
        if descriptor not in self.descriptors:
            self.descriptors.append(descriptor)
        return ["--perms", mode, "--file", str(descriptor), target]


def _system_of_rootfs(rootfs: Path) -> list[str]:
    arguments = []
    for entry in sorted(os.scandir(rootfs), key=lambda entry: entry.name):
        if entry.name in _OWN_PLACES:
            continue
        if entry.is_symlink():
            arguments += ["--symlink", os.readlink(entry.path), f"/{entry.name}"]
        elif entry.name == "var":
            continue  # /var/tmp must be writable; the rest is the host's state, not the task's.
        else:
            arguments += ["--ro-bind", f"/tmp/in/rootfs/{entry.name}", f"/{entry.name}"]
    return arguments
