"""What gVisor is started from: a root directory of the host, and the OCI configuration.

The root directory holds the merged files of a snapshot, a made-up /etc and the agent; gVisor lays
an overlay in its own memory over it, so that nothing of it is ever written. It is kept in the store
and used by every sandbox of the same files and mounts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megacomposer.env.backend.agent_sandbox import agent_program
from megacomposer.env.backend.layers import LayerStore, remove_tree
from megacomposer.env.backend.process_identity import own_identity
from megacomposer.env.sandbox import (
    EGRESS_PORT,
    SandboxError,
    SandboxSpec,
    Snapshot,
)

AGENT = "/run/megacomposer/agent"
EGRESS_SOCKET = "/run/megacomposer/egress.sock"
STATX_LIBRARY = Path(__file__).with_name("_gvisor_statx.so")
"""Built by setup.py from csrc/gvisor_statx.cpp; see there."""
_STATX_INSIDE = "/run/megacomposer/statx.so"
_USR_LINKS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
_SHARED_MEMORY_BYTES = 64 << 20
_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootPlan:
    """All that decides the root directory. Equal plans have equal files, on every machine."""

    layers: tuple[str, ...]
    user_id: int
    """Of the commands, inside."""
    rootfs: str | None
    targets: Mapping[str, bool]
    """Where something is mounted -> whether it is a directory."""
    links: Mapping[str, str]
    """Symbolic links at the top, such as bin -> usr/bin."""
    statx: bool
    """Whether programs load STATX_LIBRARY."""
    agent: str
    """SHA-256 of the agent program."""

    @property
    def key(self) -> str:
        return hashlib.sha256(canonical_json(dataclasses.asdict(self))).hexdigest()


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def plan_root(spec: SandboxSpec, *, layers: tuple[str, ...], user_id: int, statx: bool) -> RootPlan:
    """ValueError where a mount or the rootfs does not exist."""
    targets = {"/proc": True, "/dev": True, "/dev/shm": True}
    links: dict[str, str] = {}
    for target, source in read_only_mounts(spec).items():
        if not os.path.exists(source):
            raise ValueError(f"mounts: {source} does not exist on this machine")
        targets[target] = os.path.isdir(source)
    if spec.egress_socket is not None:
        targets[EGRESS_SOCKET] = False
    top = Path(spec.rootfs or "/")
    for name in os.listdir(top) if spec.rootfs else _USR_LINKS:
        if (top / name).is_symlink():
            links[name] = os.readlink(top / name)
    return RootPlan(
        layers=layers,
        user_id=user_id,
        rootfs=spec.rootfs,
        targets=dict(sorted(targets.items())),
        links=dict(sorted(links.items())),
        statx=statx and spec.rootfs is None,
        agent=hashlib.sha256(agent_program().read_bytes()).hexdigest(),
    )


def read_only_mounts(spec: SandboxSpec) -> dict[str, str]:
    """Target inside -> source on the host, parents before children."""
    found: dict[str, str] = {}
    if spec.rootfs is None:
        found["/usr"] = "/usr"
        found |= {f"/{name}": f"/{name}" for name in _USR_LINKS if _is_directory(f"/{name}")}
        for path in ("/etc/alternatives", "/etc/ssl/certs"):
            if os.path.isdir(path):
                found[path] = path
    else:
        for name in sorted(os.listdir(spec.rootfs)):
            if name not in {"proc", "dev", "sys", "tmp", "home", "workspace", "run"}:
                path = os.path.join(spec.rootfs, name)
                if not os.path.islink(path):
                    found[f"/{name}"] = path
    found |= {mount.target: mount.source for mount in spec.mounts}
    return dict(sorted(found.items(), key=lambda item: item[0].count("/")))


def make_root(store: LayerStore, plan: RootPlan) -> Path:
    """The root directory of a plan, made at the first call. Blocks. SnapshotError."""
    parent = store.root / "gvisor" / f"roots-{os.geteuid()}"
    target = parent / plan.key
    if target.exists():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{own_identity()}.", dir=parent))
    try:
        _fill_root(store, plan, scratch)
        try:
            scratch.rename(target)
        except OSError as error:
            # Another process may have been faster; its files are the same.
            if not target.exists():
                raise SandboxError(f"cannot make the root directory {target}: {error}") from error
    finally:
        if scratch.exists():
            remove_tree(scratch)
    return target


def _fill_root(store: LayerStore, plan: RootPlan, root: Path) -> None:
    owner = plan.user_id if os.geteuid() == 0 else None
    store.checkout(Snapshot(layers=plan.layers), root, owner=owner)
    (root / "home").rename(root / "agent")
    (root / "home").mkdir()
    (root / "agent").rename(root / "home" / "agent")
    (root / "tmp").chmod(0o1777)
    for name, link in plan.links.items():
        (root / name).symlink_to(link)
    for target, is_directory in plan.targets.items():
        _make_mount_point(root, target, is_directory)
    place = root / AGENT[1:]
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(agent_program(), place)
    place.chmod(0o755)
    if plan.statx:
        shutil.copyfile(STATX_LIBRARY, root / _STATX_INSIDE[1:])
    if plan.rootfs is None:
        _fill_etc(root / "etc", plan)
    # What a frozen process has open must look the same when it is thawed, also elsewhere.
    for name in ("run/megacomposer", "etc"):
        for file in (root / name).rglob("*"):
            os.utime(file, (0, 0), follow_symlinks=False)
    root.chmod(0o755)


def _make_mount_point(root: Path, target: str, is_directory: bool) -> None:
    inside = Path(target[1:])
    if not target.startswith("/") or ".." in inside.parts or not inside.parts:
        raise ValueError(f"mounts: target {target!r} is no absolute path below /")
    place = root
    for part in inside.parts[:-1]:
        place = place / part
        if place.is_symlink():
            raise ValueError(f"mounts: target {target!r} goes through a link")
        place.mkdir(exist_ok=True)
    place = place / inside.parts[-1]
    if place.is_symlink() or (place.exists() and place.is_dir() != is_directory):
        raise ValueError(f"mounts: target {target!r} is something else in the snapshot")
    if is_directory:
        place.mkdir(exist_ok=True)
    else:
        place.touch()


def _fill_etc(etc: Path, plan: RootPlan) -> None:
    etc.mkdir(exist_ok=True)
    user = plan.user_id
    texts = {
        "passwd": f"agent:x:{user}:{user}:agent:/home/agent:/bin/sh\n",
        "group": f"agent:x:{user}:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "resolv.conf": "",
    }
    if plan.statx:
        texts["ld.so.preload"] = _STATX_INSIDE + "\n"
    for name, text in texts.items():
        (etc / name).write_text(text)


def oci_config(spec: SandboxSpec, root: Path, *, user_id: int) -> dict[str, Any]:
    """The `config.json` of a sandbox; `root` is `make_root`'s."""
    command = [AGENT, "--namespace"]
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["mode=1777", f"size={_SHARED_MEMORY_BYTES}"],
        },
        *(_bind(source, target) for target, source in read_only_mounts(spec).items()),
        # Read-only: commands may be of the user that owns the root directory's files.
        _bind(str(root / AGENT[1:]), AGENT),
    ]
    if spec.egress_socket is not None:
        mounts.append(_bind(spec.egress_socket, EGRESS_SOCKET))
        command += ["--forward", f"{EGRESS_PORT}:{EGRESS_SOCKET}"]
    limits = {
        "RLIMIT_NPROC": spec.limits.processes,
        "RLIMIT_FSIZE": spec.limits.disk_bytes,
        "RLIMIT_CORE": 0,
    }
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user_id, "gid": user_id},
            "args": command,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
            "rlimits": [{"type": kind, "hard": n, "soft": n} for kind, n in limits.items()],
        },
        "root": {"path": str(root), "readonly": False},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": k} for k in ("pid", "ipc", "uts", "mount", "network")]},
    }


def _bind(source: str, target: str) -> dict[str, Any]:
    return {"destination": target, "type": "bind", "source": source, "options": ["ro", "rbind"]}


def _is_directory(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
