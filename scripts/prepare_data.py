#!/usr/bin/env python3
"""Make a dataset from Python's standard library, git checkouts or directories.

    python scripts/prepare_data.py --source stdlib --out data/stdlib
    python scripts/prepare_data.py --repo ../project-a --repo ../project-b --out data/mine

Running it again with the same inputs does nothing; with others it needs --force or another --out.
The last line of stdout is one JSON object, {"event": "prepare_data", ...}. Exit code 1 and one line
`error: ...` on stderr when no dataset could be made.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from typing import Annotated

import tyro

from megacomposer.data.config import PrepareConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandLine(PrepareConfig):
    """`PrepareConfig` with a `--repo` that is given once per tree."""

    repo: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Git checkout (tracked files) or plain directory (every file)."""


def main() -> int:
    """Parse, prepare, report."""
    config = tyro.cli(CommandLine, description=__doc__, use_underscores=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # after the command line is parsed, so that --help does not wait for numpy
    from megacomposer.data.prepare import prepare

    try:
        summary = prepare(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for reason, row in summary["funnel"].items():
        print(f"{reason:<28} {row['files']:>9,} files {row['bytes']:>14,} bytes")
    for split, row in summary["splits"].items():
        print(
            f"{split:<28} {row['documents']:>9,} files {row['text_bytes']:>14,} bytes"
            f" {row['tokens']:>14,} tokens"
        )
    if summary["status"] == "up_to_date":
        print(f"{config.out} is up to date: same inputs and settings, checksums hold")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
