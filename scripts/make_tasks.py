"""Make feature-deletion tasks from a repository, or a source archive, that has tests.

    python scripts/make_tasks.py toolz-1.0.0.tar.gz --count 8 --out tasks/toolz

Writes OUT/<task id>/task.json with its layers, OUT/site with the packages that the tests need, and
OUT/funnel.json. Progress is on stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import SandboxError
from megacomposer.tasks.feature_deletion import FeatureDeletion
from megacomposer.tasks.features import KINDS
from megacomposer.tasks.funnel import write_report
from megacomposer.tasks.preparation import FeatureDeletionConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repository", type=Path, help="a directory, or a .tar.gz or .zip archive")
    parser.add_argument("--count", type=int, default=10, help="tasks to keep")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty directory")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of function,class,module,multi")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="auto, bubblewrap, gvisor, ...")
    parser.add_argument("--requires", nargs="*", default=[], help="packages that the tests need")
    parser.add_argument("--site", type=Path, help="use these packages, install nothing")
    parser.add_argument("--pytest-args", default="", help="more arguments of pytest, by spaces")
    parser.add_argument("--max-candidates", type=int, default=0, help="proofs to try at most")
    parser.add_argument("--unsafe", action="store_true", help="allows --backend local: no sandbox")
    return parser.parse_args()


async def make(arguments: argparse.Namespace) -> str:
    config = FeatureDeletionConfig(
        count=arguments.count,
        kinds=tuple(arguments.kinds.split(",")),
        seed=arguments.seed,
        requires=tuple(arguments.requires),
        site=arguments.site,
        pytest_args=tuple(arguments.pytest_args.split()),
        max_candidates=arguments.max_candidates,
    )
    with tempfile.TemporaryDirectory(prefix="make_tasks.") as store:
        unsafe = arguments.unsafe
        backend = await open_backend(arguments.backend, store=Path(store), allow_unsafe=unsafe)
        try:
            maker = FeatureDeletion(
                config, backend, progress=lambda line: print(line, file=sys.stderr, flush=True)
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
        print(f"make_tasks: {error}", file=sys.stderr)
        return 1
    print(last_line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
