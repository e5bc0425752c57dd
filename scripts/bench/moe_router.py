"""Benchmark a router from logits to gates, with replay, losses and gradients, beside its peers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, benchmark, report

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from moe_router_cases import CASES, Call, Case


def differentiated(call: Call, logits_TE: torch.Tensor) -> Callable[[], object]:
    """The call and the gradient of the logits, from random gradients of the gates and 1."""
    upstream = [torch.randn_like(y) if y.dim() else torch.ones_like(y) for y in call(logits_TE)]
    return lambda: torch.autograd.grad(call(logits_TE), logits_TE, upstream)


def measure(case: Case, device: torch.device, graph: bool, *, losses: bool, replay: bool) -> list:
    """Forward and forward + backward of every implementation."""
    rows = []
    kind = case.name + (", replay" if replay else "") + (", losses" if losses else "")
    for name, load in case.calls(losses=losses, replay=replay).items():
        try:
            call = load()
            runs = {
                "fwd": lambda call=call: call(case.logits_TE),
                "fwd+bwd": differentiated(call, case.logits_TE),
            }
            timings = {
                op: benchmark(run, device=device, cuda_graph=graph) for op, run in runs.items()
            }
        except Exception as error:  # a foreign package may fail in any way
            if name == "ours":
                raise
            print(f"{name}: not run on {kind}: {error!r:.200}", flush=True)
            continue
        rows += [
            Row(op=f"router {kind} {op}", implementation=name, shape=case.shape, dtype="float32",
                timing=timing, bytes_moved=case.bytes_moved(backward=op != "fwd"))
            for op, timing in timings.items()
        ]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=CASES)
    parser.add_argument("--tokens", type=int, help="default: 32768 or 8192, on the CPU 256")
    parser.add_argument("--cuda-graph", action="store_true", help="time CUDA graph replays")
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens = args.tokens or (None if device.type == "cuda" else 256)
    rows = []
    for case in (Case(name, tokens, device) for name in args.cases):
        for losses, replay in ((False, False), (False, True), (True, False)):
            rows += measure(case, device, args.cuda_graph, losses=losses, replay=replay)
    report(rows, device=device, json_path=args.json)


if __name__ == "__main__":
    main()
