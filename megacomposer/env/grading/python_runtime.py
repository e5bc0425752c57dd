"""How a sandbox gets a Python interpreter and the packages that a task depends on.

    await install_site(["pytest", "attrs>=23"], Path("/var/tmp/site"))
    runtime = python_runtime(Path("/var/tmp/site"))
    spec = SandboxSpec(base=base, mounts=runtime.mounts, env=runtime.env)
    await sandbox.exec([runtime.python, "-m", "pytest"])

A directory of packages ("site") is read-only inside and never holds the task's own package.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath

from megacomposer.env.sandbox import WORKDIR, Mount, SandboxSpec

PYTHON_TARGET = "/opt/python"
"""Where an interpreter that does not live under /usr is mounted."""
SITE_TARGET = "/opt/site"
"""Where the packages are mounted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonRuntime:
    """Mounts, variables and the interpreter, as paths inside the sandbox."""

    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    """For the agent's commands: PATH, PYTHONPATH and so on. Grading sets its own."""
    python: str
    site: str | None
    """The packages, inside; None: only the standard library."""


def python_runtime(site: Path | None = None, *, in_place: bool = False) -> PythonRuntime:
    """The interpreter that runs this, without its own installed packages, and `site` beside it.

    An interpreter below /usr is in every sandbox; another one is mounted at PYTHON_TARGET.
    `in_place` is for backends that mount nothing (`local`): the paths of the host are used.

    Raises ValueError where `site` is no directory.
    """
    if site is not None and not site.is_dir():
        raise ValueError(f"site {site} is no directory: make it with install_site first")
    prefix = Path(sys.base_prefix)
    mounts: list[Mount] = []
    inside = str(prefix)
    if not prefix.is_relative_to("/usr") and not in_place:
        inside = PYTHON_TARGET
        mounts.append(Mount(source=str(prefix), target=PYTHON_TARGET))
    site_inside: str | None = None
    if site is not None:
        source = str(site.resolve())
        site_inside = source if in_place else SITE_TARGET
        if not in_place:
            mounts.append(Mount(source=source, target=SITE_TARGET))
        own = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        if inside == PYTHON_TARGET and (prefix / own).is_dir():
            # Over what is installed with the interpreter: pip alone brings copies of a dozen
            # packages, any of which may be the one that a task asks for.
            mounts.append(Mount(source=source, target=f"{PYTHON_TARGET}/{own}"))
    return PythonRuntime(
        mounts=tuple(mounts),
        env=_environment(inside, site_inside),
        python=f"{inside}/bin/python{sys.version_info.major}.{sys.version_info.minor}",
        site=site_inside,
    )


def runtime_of(
    mounts: Sequence[Mount], *, in_place: bool = False, given: PythonRuntime | None = None
) -> PythonRuntime:
    """The runtime of a task that brings `mounts`: all of what its sandbox mounts is in `mounts`.

    `given`, else this process's interpreter; the packages are what the task mounts at SITE_TARGET.
    With `in_place` nothing else may be mounted.
    """
    site = next((mount for mount in mounts if mount.target == SITE_TARGET), None)
    runtime = given or python_runtime(Path(site.source) if site else None, in_place=in_place)
    if in_place:
        return runtime
    by_target = {mount.target: mount for mount in (*runtime.mounts, *mounts)}
    return dataclasses.replace(
        runtime,
        mounts=tuple(by_target.values()),
        site=SITE_TARGET if SITE_TARGET in by_target else runtime.site,
    )


def interpreter(spec: SandboxSpec) -> tuple[str, dict[str, str]]:
    """The Python of a running sandbox, and variables that it needs: for programs of ours inside.

    The one that `spec` mounts, else that of its own /usr.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if any(mount.target == PYTHON_TARGET for mount in spec.mounts):
        return f"{PYTHON_TARGET}/bin/{version}", {"LD_LIBRARY_PATH": f"{PYTHON_TARGET}/lib"}
    return "/usr/bin/python3", {}


def _environment(prefix: str, site: str | None) -> dict[str, str]:
    paths = [f"{prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    if site:
        paths.insert(0, f"{site}/bin")
    env = {
        "PATH": ":".join(dict.fromkeys(paths)),
        # Bytecode would be part of snapshots, and a leftover to read deleted code from.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }
    if site:
        env["PYTHONPATH"] = f"{WORKDIR}:{site}"
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and not PurePosixPath(prefix).is_relative_to(
        "/usr"
    ):
        # Such an interpreter names the directory it was built for; it has moved.
        env["LD_LIBRARY_PATH"] = f"{prefix}/lib"
    return env


async def install_site(
    requirements: Sequence[str],
    target: Path,
    *,
    exclude: Sequence[str] = (),
    options: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> None:
    """`pip install --target` of `requirements` and what they need, for `python_runtime`.

    `exclude` names distributions to take out again: the task's own package, where a dependency
    pulled it in. `options` are more arguments of pip, such as an index. `target` must not hold
    packages yet.

    Raises ValueError with pip's words where it fails, and TimeoutError.
    """
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"target {target} is not empty: remove it, or name a new directory")
    target.mkdir(parents=True, exist_ok=True)
    if not requirements:
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-input"),
        *("--disable-pip-version-check", "--no-warn-script-location", "--target", str(target)),
        *options,
        *requirements,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = output.decode(errors="replace").strip()[-2000:]
        raise ValueError(f"pip could not install {' '.join(requirements)}: {words}")
    for name in exclude:
        remove_distribution(target, name)
    _relocate_scripts(target / "bin")


def remove_distribution(site: Path, name: str) -> int:
    """Take an installed distribution out of `site`; returns how many files went (0: not there)."""
    removed = 0
    wanted = _normalized(name)
    for distribution in metadata.distributions(path=[str(site)]):
        if _normalized(distribution.metadata["Name"]) != wanted:
            continue
        for file in list(distribution.files or ()):
            path = Path(str(distribution.locate_file(file)))
            # `pip --target` records scripts as ../../bin/x, from where they were first.
            if ".." in file.parts:
                path = site / "bin" / file.name
            for victim in (path, *_bytecode(path)):
                if victim.is_file() or victim.is_symlink():
                    victim.unlink()
                    removed += 1
            _prune(path.parent, site)
    return removed


def _bytecode(source: Path) -> list[Path]:
    if source.suffix != ".py":
        return []
    return sorted((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))


def _prune(directory: Path, site: Path) -> None:
    """Remove directories that became empty, up to `site`."""
    while directory != site and directory.is_relative_to(site) and directory.is_dir():
        if any(directory.iterdir()):
            return
        directory.rmdir()
        directory = directory.parent


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _relocate_scripts(directory: Path) -> None:
    """Scripts name the interpreter that installed them, which the sandbox does not have."""
    if not directory.is_dir():
        return
    for script in directory.iterdir():
        if not script.is_file() or script.is_symlink():
            continue
        first, separator, rest = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            script.write_bytes(b"#!/usr/bin/env python3" + separator + rest)
