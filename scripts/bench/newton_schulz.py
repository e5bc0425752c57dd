"""Benchmark Newton-Schulz orthogonalisation against public implementations, peer by peer.

PYTHONPATH=. python scripts/bench/newton_schulz.py --shapes 48x2048x7168 mixed --json OUT
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, benchmark, report

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from newton_schulz_cases import CASES, Case, add_to_table, our_rows, parse_case, print_real_rate
from newton_schulz_peers import PEERS, reason, run_all, usable_variants


def peer_row(name: str, case: Case, *, graph: bool) -> list[Row]:
    """The fastest working variant of a peer, if any; a printed line for each that fails."""
    peer = PEERS[name]
    tensors = [x.to(peer.input_dtype) for x in case.tensors]
    variants, faults = usable_variants(name, tensors)
    for fault in faults:
        print(f"peer {name}: not run on {case.name}: {fault}", flush=True)
    if not variants:
        return []
    variant, call = variants[0]
    print(f"peer {name} on {case.name}: fastest of {len(variants)} is {variant!r}", flush=True)
    timing = benchmark(
        lambda: run_all(call, tensors),
        device=case.device,
        warmup=3,
        cuda_graph=graph and variant not in peer.uncapturable,
    )
    error = case.error(run_all(call, tensors), peer.coefficients)
    return [case.row(name, timing, error)]


def measure(case: Case, peers: list[str], *, graph: bool, deadline: float) -> list[Row]:
    """Ours, then every peer while time is left."""
    rows = our_rows(case, graph=graph)
    for name in peers:
        if PEERS[name].is_loop and len(case.tensors) > 1:
            continue
        if time.monotonic() > deadline:
            print(f"peer {name}: not run on {case.name}: --budget-s is spent", flush=True)
            continue
        try:
            rows += peer_row(name, case, graph=graph)
        except Exception as error:  # noqa: BLE001  a foreign package may fail in any way
            print(f"peer {name}: not run on {case.name}: {reason(error)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", help="BxMxN, or `mixed`; default: our goals")
    parser.add_argument("--peers", nargs="*", default=[*PEERS], choices=[*PEERS])
    parser.add_argument("--cuda-graph", action="store_true", help="time CUDA graph replays")
    parser.add_argument("--budget-s", type=float, default=150.0, help="no peer starts after this")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--table", type=Path, help="add our times to this optim/cost.py table")
    args = parser.parse_args()
    device, deadline = torch.device(args.device), time.monotonic() + args.budget_s
    for name in args.shapes or (CASES if device.type == "cuda" else ["4x96x256"]):
        case = parse_case(name, device)
        rows = measure(case, args.peers, graph=args.cuda_graph, deadline=deadline)
        report(rows, device=device, json_path=args.json)
        print_real_rate(case, rows)
        if args.table is not None:
            add_to_table(args.table, case, rows)


if __name__ == "__main__":
    main()
