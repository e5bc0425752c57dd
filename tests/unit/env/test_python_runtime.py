"""Packages for sandboxes: installed apart, without the task's own, found by the interpreter."""

from __future__ import annotations

import asyncio
import sys
import zipfile
from pathlib import Path

import pytest
from grading import Grader

from megacomposer.env.grading.python_runtime import (
    PYTHON_TARGET,
    install_site,
    python_runtime,
    remove_distribution,
    runtime_of,
)
from megacomposer.env.sandbox import Mount, SandboxSpec


def wheel(directory: Path, name: str, requires: str = "") -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": f"NAME = {name!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-tool = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)


def test_the_task_s_own_package_goes_even_where_another_needs_it(tmp_path: Path) -> None:
    wheel(tmp_path, "uses_it", "Requires-Dist: own_one\n")
    wheel(tmp_path, "own_one")
    site = tmp_path / "site"
    options = ("--no-index", "--find-links", str(tmp_path))
    asyncio.run(install_site(["uses-it"], site, exclude=["Own.One"], options=options))
    names = {path.name for path in site.rglob("*")}
    assert "uses_it" in names
    assert not any("own" in name for name in names)
    script = (site / "bin" / "uses_it-tool").read_bytes()
    assert script.startswith(b"#!/usr/bin/env python3\n"), "no path of this machine"
    assert remove_distribution(site, "own-one") == 0
    with pytest.raises(ValueError, match="not empty"):
        asyncio.run(install_site(["uses-it"], site, options=options))
    with pytest.raises(ValueError, match="nothing-like-this"):
        asyncio.run(install_site(["nothing-like-this"], tmp_path / "other", options=options))
    with pytest.raises(ValueError, match="no directory"):
        python_runtime(tmp_path / "missing")


def test_the_interpreter_inside_has_the_site_and_not_what_is_installed_beside_it(tmp_path) -> None:
    with Grader(tmp_path) as grader:
        backend = grader.backend
        runtime = runtime_of(grader.mounts, in_place=not backend.isolates)
        if runtime.mounts[0].target != PYTHON_TARGET:
            pytest.skip("this interpreter lives under /usr, or nothing is mounted")

        async def run(code: str) -> bytes:
            spec = SandboxSpec(mounts=runtime.mounts, env=runtime.env)
            async with await backend.start(spec) as sandbox:
                result = await sandbox.exec([runtime.python, "-c", code])
                assert result.ok, result.stderr
                return result.stdout

        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        code = (
            "import importlib.util as u, ssl, sqlite3, sys, pytest\n"
            "print(f'{sys.version_info.major}.{sys.version_info.minor}', bool(u.find_spec('pip')))"
        )
        assert grader.run(run(code)).decode() == f"{version} False\n"


def test_mounts_of_a_task_take_the_place_of_the_runtime_s_own(tmp_path) -> None:
    mine = Mount(source=str(tmp_path), target="/opt/site")
    other = Mount(source="/usr/share", target="/opt/data")
    runtime = runtime_of((mine, other), given=python_runtime())
    targets = [mount.target for mount in runtime.mounts]
    assert len(targets) == len(set(targets))
    assert {mine, other} <= set(runtime.mounts)
    assert runtime.site == "/opt/site"
    assert runtime_of((mine,), in_place=True).site == str(tmp_path.resolve())
