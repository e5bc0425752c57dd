"""Benchmark the sandbox backends of this machine: latency of each operation, and throughput."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from megacomposer.env.backends import open_backend, probe_backends

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
import sandbox_cases as cases


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """All rows, and what they were measured on."""
    rows: list[cases.Row] = []

    def add(row: cases.Row) -> None:
        rows.append(row)
        print(row, flush=True)

    print(json.dumps(cases.machine()))
    print(f"{'backend':<16}{'operation':<28}{'repeats':>7}{'median ms':>12}{'p95 ms':>12}")
    add(cases.spawn_rows(args.repeats))
    known = {**await probe_backends(), "local": ""}
    reasons = {name: known[name] for name in args.backend}
    with tempfile.TemporaryDirectory() as place:
        source = cases.make_repository(Path(place) / "repository")
        for name, reason in reasons.items():
            if reason:
                print(f"{name:<16}not measured: {reason}")
                continue
            store = Path(place) / f"store-{name}"
            backend = await open_backend(name, store=store, allow_unsafe=name == "local")
            try:
                repeats = args.repeats if name == "bubblewrap" else max(5, args.repeats // 10)
                for row in await cases.backend_rows(name, backend, source, repeats):
                    add(row)
                if name == "bubblewrap":
                    for width in args.concurrency:
                        add(await cases.throughput_row(name, backend, source, args.count, width))
            finally:
                await backend.close()
    return {
        "machine": cases.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "not_measured": {name: reason for name, reason in reasons.items() if reason},
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="of each operation")
    parser.add_argument("--count", type=int, default=1000, help="sandboxes for the throughput")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--backend", nargs="*", default=["bubblewrap", "gvisor", "local"])
    parser.add_argument("--json", type=Path, help="append one JSON object to this file")
    parser.add_argument("--uid", type=int, help="of root only: measure as this user")
    args = parser.parse_args()
    out = args.json.open("a", encoding="utf-8") if args.json else None
    if args.uid:
        asyncio.run(probe_backends())  # loads what that user may not be able to reach
        os.setgroups([])
        os.setresgid(args.uid, args.uid, args.uid)
        os.setresuid(args.uid, args.uid, args.uid)
    result = asyncio.run(measure(args))
    if out:
        out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
