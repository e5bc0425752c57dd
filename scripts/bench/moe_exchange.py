"""Benchmark the exchange of an expert layer between the GPUs of one host, and the layer around it.

    torchrun --standalone --nproc-per-node 2 scripts/bench/moe_exchange.py

Dispatch: tokens to the ranks of their experts, routing known: ours, one copy for each rank, against
one row for each expert over all_to_all_single and symm_mem.all_to_all_vdev_2d (`--peers vdev`, in a
job of its own: torch has one kind of symmetric memory a process). Then the whole layer, beside one
of as many experts and rows on each rank without an exchange. Times are the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megacomposer.kernels.bench import environment
from megacomposer.runtime.config import RuntimeConfig
from megacomposer.runtime.process import end_process, end_process_on_error, start_process

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from moe_exchange_cases import SHAPES, Layer, dispatches, slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all but tiny")
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", help="default: collective, and peer on GPUs")
    parser.add_argument("--peers", nargs="*", default=["rows"], choices=["rows", "vdev"])
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    args = parser.parse_args()
    end_process_on_error()
    with start_process(RuntimeConfig(deterministic=False)) as process:
        on_gpu = process.device.type == "cuda"
        transports = args.transports
        if transports is None:
            transports = ["collective", "peer"] if on_gpu else ["collective"]

        def show(row: dict[str, object]) -> None:
            if process.is_main:
                print(
                    " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values())
                )
                if args.json is not None:
                    with args.json.open("a", encoding="utf-8") as stream:
                        record = environment(process.device) | {"ranks": process.world_size} | row
                        stream.write(json.dumps(record) + "\n")

        if process.is_main:
            print(json.dumps(environment(process.device) | {"ranks": process.world_size}))
        for shape in args.shapes or (["qwen3", "kimi"] if on_gpu else ["tiny"]):
            layer = Layer(shape, process.device)
            if process.is_main:
                print("op | shape | how | ms | leaves a rank, MB | GB/s")
            for how, run, sent_bytes in dispatches(layer, transports, args.peers):
                ms = slowest(run, process.device)
                rate = sent_bytes / ms / 1e6
                show({"op": "dispatch", "shape": shape, "how": how, "ms": ms,
                      "sent_mb": sent_bytes / 1e6, "gb_per_s": rate})  # fmt: skip
            if "vdev" in args.peers:
                continue
            if process.is_main:
                print("op | shape | how | parts | forward ms | both ms")
            cases = [("no exchange", 1), *((t, parts) for t in transports for parts in args.parts)]
            for how, parts in cases:
                forward, both = layer.passes(how, parts)
                show({"op": "layer", "shape": shape, "how": how, "parts": parts,
                      "fwd_ms": slowest(forward, process.device),
                      "both_ms": slowest(both, process.device)})  # fmt: skip
    end_process(0)


if __name__ == "__main__":
    main()
