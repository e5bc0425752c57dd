"""Make tasks of real packages from a package index, and write down the funnel of each.

    python scripts/bench/task_funnel.py --out /tmp/tasks --json docs/benchmarks/tasks/funnel.json

Sdists come from pip's index; each runs through scripts/make_tasks.py in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES: dict[str, tuple[int, tuple[str, ...]]] = {
    "inflection==0.5.1": (3, ()),
    "toolz==1.0.0": (8, ()),
    "humanize==4.17.0": (8, ("--requires", "freezegun")),
    # Its conftest.py uses a hook argument that pytest 9 has no more.
    "boltons==24.1.0": (8, ("--requires", "pytest<9")),
    "parse==1.20.2": (3, ()),
}
"""Requirement -> tasks to keep, more arguments of make_tasks."""


def download(requirement: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    # A setup.py may import what lies beside it, which PYTHONSAFEPATH forbids.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [*pip, "--no-binary", ":all:", "--dest", str(folder), requirement]
    subprocess.run(command, check=True, env=env)
    (archive,) = folder.iterdir()
    return archive


def make(requirement: str, out: Path, backend: str) -> dict[str, Any]:
    count, arguments = PACKAGES[requirement]
    name = requirement.partition("==")[0]
    archive = download(requirement, out / "sdists" / name)
    script = Path(__file__).parent.parent / "make_tasks.py"
    command = [sys.executable, str(script), str(archive), "--count", str(count)]
    command += ["--out", str(out / name), "--backend", backend, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((out / name / "funnel.json").read_text())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory for the tasks")
    parser.add_argument("--json", type=Path, help="the report; written after each package")
    parser.add_argument("--backend", default="bubblewrap")
    parser.add_argument(
        "--only", nargs="*", default=list(PACKAGES), help="requirements of PACKAGES"
    )
    arguments = parser.parse_args()
    reports: list[dict[str, Any]] = []
    for requirement in arguments.only:
        reports.append(make(requirement, arguments.out, arguments.backend))
        kinds = [task["kind"] for report in reports for task in report["kept"]]
        total = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        text = {"python": platform.python_version(), "kept": len(kinds), "kept_by_kind": total}
        print(json.dumps({"package": requirement, **text}), flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps({**text, "packages": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
