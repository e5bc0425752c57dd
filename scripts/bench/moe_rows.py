"""Benchmark routing map, permute and combine of a mixture-of-experts layer, each beside its peers.

Peers: torch (sort, index_select, index_add_), megatron-core where installed, and as the ceiling a
plain copy of the same number of bytes. `combine` weights by probabilities; its backward gives the
gradients of rows and probabilities.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, benchmark, report

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from moe_rows_cases import ROUTINGS, Case

OPS = ("routing_map", "map+permute", "permute fwd", "permute bwd", "combine fwd", "combine bwd")
# What waits for the device, and so cannot be captured.
UNCAPTURABLE = {("routing_map", "torch"), ("map+permute", "torch"), ("map+permute", "mcore")}
UNCAPTURABLE |= {("combine fwd", "mcore")}


def measure(case: Case, op: str, *, graph: bool) -> list[Row]:
    """One row per implementation."""
    rows = []
    for name, call in case.calls(op).items():
        # A backward runs on the stream of its forward, which is not the one captured.
        captured = graph and not op.endswith("bwd") and (op, name) not in UNCAPTURABLE
        timing = benchmark(call, device=case.x_TH.device, cuda_graph=captured)
        error = None if name == "copy" else case.error(op, call())
        rows.append(case.row(op, name, timing, error))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="default: 32768, on the CPU 256")
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 7168])
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--routings", nargs="+", default=[*ROUTINGS], choices=ROUTINGS,
                        help="the first alone at every hidden but the first")  # fmt: skip
    parser.add_argument("--ops", nargs="+", default=[*OPS], choices=OPS)
    parser.add_argument("--cuda-graph", action="store_true", help="time CUDA graph replays")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens = args.tokens or (32768 if device.type == "cuda" else 256)
    print(f"{tokens} tokens x {args.choices} choices of {args.experts} experts", flush=True)
    for hidden in args.hidden:
        for kind in args.routings if hidden == args.hidden[0] else args.routings[:1]:
            case = Case(
                kind, tokens=tokens, hidden=hidden, choices=args.choices, experts=args.experts,
                device=device,
            )  # fmt: skip
            rows = [row for op in args.ops for row in measure(case, op, graph=args.cuda_graph)]
            report(rows, device=device, json_path=args.json)


if __name__ == "__main__":
    main()
