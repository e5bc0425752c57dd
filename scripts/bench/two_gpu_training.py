"""Training on two GPUs, or two CPU processes, against one: every layout, sharded Muon against
unsharded, and checkpoints from two ranks to one and back. Needs data of scripts/prepare_data.py.

Exit status 1 if a run is missing or differs by more than its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from two_gpu_training_cases import ALONE, LAYOUTS, MIXES, Run, judge, stages, table
from two_gpu_training_jobs import Jobs

PAIRS = [*LAYOUTS][1:]


def perform(jobs: Jobs, runs: list[Run]) -> None:
    """On one rank both dtypes side by side, each on its own device; on two run after run."""
    tasks = {"0,1": [run.name for run in runs if run.layout != ALONE]}
    for device, dtype in enumerate(("fp32", "bf16")):
        alone = [run.name for run in runs if run.layout == ALONE and run.dtype == dtype]
        tasks[str(device)] = alone
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(jobs.perform, names, on) for on, names in tasks.items()]:
            future.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--data", default="data/stdlib/train", help="prefix of the .bin/.idx pair")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--layouts", nargs="+", default=PAIRS, choices=PAIRS)
    parser.add_argument("--mixes", nargs="+", default=["-".join(mix) for mix in MIXES])
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--json", type=Path, help="write a line for each run to this file")
    args = parser.parse_args()
    wanted = [mix for mix in MIXES if "-".join(mix) in args.mixes]
    order = stages(args.layouts, wanted)
    if args.device == "cpu":  # where there is no peer memory
        order = [[run for run in runs if run.kind != "peer"] for runs in order]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        options = ["--data", args.data, "--steps", str(args.steps)]
        options += ["--seq-length", str(args.seq_length)]
        deadline_s = started + args.budget_s
        jobs = Jobs(folder=Path(name), device=args.device, options=options, deadline_s=deadline_s)
        for runs in order:
            perform(jobs, runs)
        rows = jobs.rows()
    verdicts = [judge(run, rows) for runs in order for run in runs]
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(rows.get(verdict["run"], {}) | verdict) for verdict in verdicts]
        args.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(table(verdicts)))
    bad = [verdict["run"] for verdict in verdicts if verdict["verdict"] != "ok"]
    seconds = time.monotonic() - started
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} runs as they must be, {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
