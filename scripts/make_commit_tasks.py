"""Make tasks from the commits of a git repository that change code together with its tests.

    python scripts/make_commit_tasks.py ../project --count 8 --out tasks/project --requires numpy

Writes OUT/<task id>/task.json with its layers, OUT/site with pytest and the packages of --requires,
and OUT/funnel.json. Progress is on stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from megacomposer.env.backends import open_backend
from megacomposer.env.grading.python_runtime import install_site
from megacomposer.env.sandbox import SandboxError
from megacomposer.tasks.commits import CommitTasks, CommitTasksConfig
from megacomposer.tasks.funnel import write_report
from megacomposer.tasks.preparation import SITE


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path, help="a git repository, bare or not")
    parser.add_argument("--count", type=int, default=10, help="tasks to keep, newest first")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty directory")
    parser.add_argument("--revision", default="HEAD", help="where to begin")
    parser.add_argument("--max-commits", type=int, default=1000, help="commits to look at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="auto, bubblewrap, gvisor, ...")
    parser.add_argument("--requires", nargs="*", default=[], help="packages that the tests need")
    parser.add_argument("--site", type=Path, help="use these packages, install nothing")
    parser.add_argument("--pytest-args", default="", help="more arguments of pytest, by spaces")
    return parser.parse_args()


async def make(arguments: argparse.Namespace) -> str:
    config = CommitTasksConfig(
        count=arguments.count,
        max_commits=arguments.max_commits,
        revision=arguments.revision,
        seed=arguments.seed,
        pytest_args=tuple(arguments.pytest_args.split()),
    )
    site = arguments.out / SITE
    with tempfile.TemporaryDirectory(prefix="make_tasks.") as store:
        backend = await open_backend(arguments.backend, store=Path(store))
        try:
            if arguments.out.exists() and any(arguments.out.iterdir()):
                raise ValueError(f"out {arguments.out} is not empty: name a new directory")
            if arguments.site:
                shutil.copytree(arguments.site, site)
            else:
                await install_site(["pytest", *arguments.requires], site, options=["--no-compile"])
            maker = CommitTasks(
                config,
                backend,
                site=site,
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
            report = await maker.make(arguments.repository, arguments.out)
        finally:
            await backend.close()
    return write_report(report, arguments.out)


def main() -> int:
    arguments = parse_arguments()
    try:
        last_line = asyncio.run(make(arguments))
    except (ValueError, SandboxError) as error:
        print(f"make_commit_tasks: {error}", file=sys.stderr)
        return 1
    print(last_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
