"""Benchmark the expert layer of a mixture of experts, from expert ids to summed tokens, beside its
peers: routing map, gather, both products with SwiGLU and probabilities, and the sum over a token's
experts. Times, share of a dense product's rate, and peak memory beyond inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from megacomposer.kernels import grouped_mlp
from megacomposer.kernels.bench import Row, benchmark, report

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from moe_mlp_cases import SHAPES, Case, Peak
from moe_mlp_peers import PEERS, Call, load, time_limit
from moe_rows_cases import ROUTINGS


def measure(case: Case, name: str, call: Call, rest_s: float) -> tuple[list[Row], Peak]:
    """Forward, forward and backward, and peak memory. The first calls compile and autotune."""
    forward, both = case.forward(call), case.forward_backward(call)
    for _ in range(3):
        forward()
        both()
    errors = case.errors(call)
    peak = case.peak(name, forward, both)
    rows = []
    for pause_s in sorted({0.0, rest_s}):
        for op, run, error in zip(("fwd", "fwd+bwd"), (forward, both), errors, strict=True):
            timing = benchmark(run, device=case.device, warmup=3, rest_s=pause_s)
            op = f"{op} rested {pause_s} s" if pause_s else op
            rows.append(case.row(op, name, timing, error))
    return rows, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all but tiny")
    parser.add_argument("--routings", nargs="+", default=[*ROUTINGS], choices=ROUTINGS)
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=PEERS)
    parser.add_argument("--budget-s", type=float, default=30.0, help="of a peer at one shape")
    parser.add_argument("--gather-mib", type=int, nargs="*", default=[],
                        help="time ours with blocks of these sizes too")  # fmt: skip
    parser.add_argument("--rest-s", type=float, default=0.0, help="time at higher clocks too")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.rest_s and device.type != "cuda":
        parser.error("--rest-s is for clocks of a GPU; leave it out with --device cpu")
    usual = grouped_mlp._GATHER_BYTES
    for shape in args.shapes or (["qwen3", "kimi"] if device.type == "cuda" else ["tiny"]):
        for routing in args.routings:
            case, rows, peaks = Case(shape, routing, device), [], []
            for name in ["ours", *(f"ours {mib} MiB" for mib in args.gather_mib), *args.peers]:
                grouped_mlp._GATHER_BYTES = int(name.split()[1]) << 20 if " " in name else usual
                try:
                    with time_limit(args.budget_s):
                        measured, peak = measure(case, name, load(name, case), args.rest_s)
                except Exception as error:  # a foreign package may fail in any way
                    if name.startswith("ours"):
                        raise
                    print(f"{name}: not run on {case.name}: {error!r:.200}", flush=True)
                    continue
                rows, peaks = rows + measured, [*peaks, peak]
            report(rows, device=device, json_path=args.json)
            for peak in peaks:
                print(peak, flush=True)
                if args.json is not None:
                    with args.json.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(peak.record()) + "\n")


if __name__ == "__main__":
    main()
