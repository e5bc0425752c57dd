"""Harbor tasks of other authors, as far as a sandbox without their image can run them.

What the Dockerfile copies becomes the starting state; `tests/` goes to `.harbor/` in the pristine
state, which the agent never sees; grading runs `test.sh` there and reads the reward that it
writes. A reward of 1 or more passes. What RUN lines install is not made here.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from megacomposer.env.sandbox import WORKDIR, Limits, SandboxBackend
from megacomposer.env.task import Task, TestPlan

TESTS = ".harbor"
REWARD_ID = "harbor::reward"
_MIB = 1 << 20
_HARMLESS = {"FROM", "WORKDIR", "COPY", "ADD", "ENV", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "ARG"}
_BRIDGE = '''"""Runs test.sh and says its reward as JUnit XML."""

import os
import pathlib
import subprocess
import sys
import xml.sax.saxutils

logs = pathlib.Path(".harbor/logs/verifier").absolute()
logs.mkdir(parents=True, exist_ok=True)
done = subprocess.run(["bash", ".harbor/test.sh"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
reward = 0.0
for name in ("reward.txt", "reward.json"):
    if (logs / name).is_file():
        text = (logs / name).read_text().strip()
        if name.endswith("json"):
            import json

            values = json.loads(text)
            text = values.get("reward", min(values.values(), default=0.0))
        reward = float(text)
        break
passed = reward >= 1.0
said = ascii(done.stdout[-1000:].decode(errors="replace"))
words = xml.sax.saxutils.quoteattr(f"reward {reward}: {said}")
failure = "" if passed else f"<failure message={words}/>"
with open(sys.argv[1], "w") as file:
    file.write(
        f'<testsuite tests="1" failures="{int(not passed)}">'
        f'<testcase classname="harbor" name="reward">{failure}</testcase></testsuite>'
    )
sys.exit(int(not passed))
'''


async def read_foreign(
    directory: Path,
    backend: SandboxBackend,
    settings: Mapping[str, Any],
    *,
    accept_image_steps: bool,
) -> Task:
    """Raises ValueError naming what this cannot be read without."""
    if "steps" in settings or (directory / "steps").is_dir():
        raise ValueError(f"{directory}: tasks of several steps are not supported")
    for name in ("instruction.md", "tests/test.sh", "environment/Dockerfile"):
        if not (directory / name).is_file():
            raise ValueError(f"{directory / name} is missing")
    environment = settings.get("environment", {})
    dockerfile = (directory / "environment" / "Dockerfile").read_text(encoding="utf-8")
    steps = list(instructions(dockerfile))
    needed = [f"{word} {rest}" for word, rest in steps if word not in _HARMLESS]
    if needed and not accept_image_steps:
        raise ValueError(
            f"{directory}: its Dockerfile also says {needed[0]!r}. Give the sandboxes a root that "
            "has the result, and pass accept_image_steps=True"
        )
    workdir = str(environment.get("workdir") or _workdir(steps))
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        _copy(steps, directory / "environment", tree, workdir)
        base = await backend.import_tree(name)
        shutil.copytree(directory / "tests", tree / TESTS, symlinks=True)
        for file in (tree / TESTS).rglob("*"):
            if file.is_file() and not file.is_symlink():
                _relocate(file, workdir)
        (tree / TESTS / "reward_bridge.py").write_text(_BRIDGE, encoding="utf-8")
        pristine = await backend.import_tree(name)
    instruction = (directory / "instruction.md").read_text(encoding="utf-8")
    verifier = settings.get("verifier", {})
    return Task(
        id=str(settings.get("task", {}).get("name") or directory.resolve().name),
        instruction=instruction.replace(workdir, str(WORKDIR)),
        base=base,
        pristine=pristine,
        tests=TestPlan(
            runner="junit",
            command=("python3", f"{TESTS}/reward_bridge.py", "{report}"),
            fail_to_pass=(REWARD_ID,),
            protected_paths=(TESTS,),
            env={str(key): str(value) for key, value in verifier.get("env", {}).items()},
            timeout_s=float(verifier.get("timeout_sec", 600.0)),
        ),
        env={str(key): str(value) for key, value in environment.get("env", {}).items()},
        limits=_limits(settings),
        origin={
            "kind": "harbor",
            "metadata": dict(settings.get("metadata", {})),
            "image_steps": needed,
            "network_mode": _network(environment),
        },
    )


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Instruction and rest of each line, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _workdir(steps: list[tuple[str, str]]) -> str:
    current = PurePosixPath("/")
    for word, rest in steps:
        if word == "WORKDIR":
            current /= rest
    return str(current) if str(current) != "/" else str(WORKDIR)


def _copy(steps: list[tuple[str, str]], context: Path, tree: Path, workdir: str) -> None:
    """What COPY and ADD put into the working directory."""
    current = PurePosixPath("/")
    for word, rest in steps:
        if word == "WORKDIR":
            current /= rest
        if word not in ("COPY", "ADD"):
            continue
        parts = [part for part in shlex.split(rest) if not part.startswith("--")]
        *sources, target = parts
        place = current / target
        if not place.is_relative_to(workdir):
            raise ValueError(f"{context}: {word} {rest} does not stay in {workdir}")
        inside = tree / place.relative_to(workdir)
        for source in sources:
            path = context / source
            if not path.resolve().is_relative_to(context.resolve()) or not path.exists():
                raise ValueError(f"{context}: {word} {rest}: {source} is not a file there")
            if path.is_dir():
                shutil.copytree(path, inside, symlinks=True, dirs_exist_ok=True)
                continue
            into = inside / path.name if target.endswith(("/", ".")) else inside
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, into)


def _relocate(file: Path, workdir: str) -> None:
    """Absolute places of Harbor's containers, in text files, to where they are here."""
    data = file.read_bytes()
    if b"\0" in data:
        return
    for old, new in (
        (b"/logs/", f"{WORKDIR}/{TESTS}/logs/".encode()),
        (b"/tests/", f"{WORKDIR}/{TESTS}/".encode()),
        (workdir.encode() + b"/", f"{WORKDIR}/".encode()),
    ):
        if old != new:
            data = data.replace(b" " + old, b" " + new).replace(b'"' + old, b'"' + new)
            data = data.replace(b"'" + old, b"'" + new).replace(b">" + old, b">" + new)
    file.write_bytes(data)


def _limits(settings: Mapping[str, Any]) -> Limits:
    environment, agent = settings.get("environment", {}), settings.get("agent", {})
    default = Limits()
    memory = environment.get("memory_mb") or _megabytes(environment.get("memory"))
    storage = environment.get("storage_mb") or _megabytes(environment.get("storage"))
    return Limits(
        memory_bytes=int(memory * _MIB) if memory else default.memory_bytes,
        disk_bytes=int(storage * _MIB) if storage else default.disk_bytes,
        cpus=float(environment.get("cpus") or default.cpus),
        wall_s=float(agent.get("timeout_sec") or default.wall_s),
    )


def _megabytes(size: str | None) -> float | None:
    """The older spelling, such as "2G"."""
    if not size:
        return None
    units = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    if size[-1:].upper() not in units:
        raise ValueError(f"size {size!r} must end in G, M or K")
    return float(size[:-1]) * units[size[-1].upper()]


def _network(environment: Mapping[str, Any]) -> str:
    if "network_mode" in environment:
        return str(environment["network_mode"])
    return "no-network" if environment.get("allow_internet") is False else "public"
