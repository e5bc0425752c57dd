"""Make feature-deletion tasks from a repository, or a source archive, that has tests.

    python scripts/make_tasks.py toolz-1.0.0.tar.gz --count 8 --out tasks/toolz

Writes OUT/<task id>/task.json with its layers, OUT/site with the packages that the tests need, and
OUT/funnel.json. Progress is on stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
import tempfile
from pathlib import Path

from megacomposer.env.backends import open_backend
from megacomposer.env.sandbox import SandboxError
from megacomposer.tasks.feature_deletion import FeatureDeletion
from megacomposer.tasks.features import KINDS
from megacomposer.tasks.funnel import write_report
from megacomposer.tasks.model_deleter import DeleterError, open_deleter
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
    parser.add_argument("--deleter", default="static", help="static, or model: a language model")
    parser.add_argument("--model-url", default="", help="its endpoint; key: $OPENAI_API_KEY")
    parser.add_argument("--model", default="", help="its name, as the endpoint knows it")
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
    model = {"url": arguments.model_url, "model": arguments.model}
    async with contextlib.AsyncExitStack() as stack:
        deleter = await stack.enter_async_context(open_deleter(arguments.deleter, **model))
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="make_tasks.")))
        backend = await open_backend(arguments.backend, store=store, allow_unsafe=arguments.unsafe)
        stack.push_async_callback(backend.close)
        progress = functools.partial(print, file=sys.stderr, flush=True)
        maker = FeatureDeletion(config, backend, deleter=deleter, progress=progress)
        report = await maker.make(arguments.repository, arguments.out)
    return write_report(report, arguments.out)


def main() -> int:
    arguments = parse_arguments()
    try:
        print(asyncio.run(make(arguments)))
    except (ValueError, DeleterError, SandboxError) as error:
        print(f"make_tasks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
