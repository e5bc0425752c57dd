"""Bandwidth and latency of the links between the GPUs of one host, by size, under torchrun.

Collectives as torch starts them, and copies out of and into a peer's memory by the copy engines.
The file that --json writes calibrates muon_scale.py.

    torchrun --standalone --nproc-per-node 2 scripts/bench/links.py --json links.jsonl
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
from links_ops import COLLECTIVES, PEER_COPIES, Ranks, measure, open_peer, operation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smallest-bytes", type=int, default=2**10)
    parser.add_argument("--largest-bytes", type=int, default=2**30)
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--ops", nargs="+", default=[*COLLECTIVES], choices=[*COLLECTIVES])
    parser.add_argument(
        "--most-blocks", type=int, nargs="+", default=[16, 8, 4],
        help="exchange is also measured on communicators of so many thread blocks, as Muon's",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="append the measurements to this file")
    args = parser.parse_args()
    with start_process(RuntimeConfig(deterministic=False)) as process:
        ranks = Ranks(process)
        on_cuda = process.device.type == "cuda"
        versions = environment(process.device)
        if process.is_main:
            print(json.dumps(versions | {"ranks": process.world_size}))
            print("op | most blocks (0: as NCCL likes) | bytes | us | bus GB/s")
        sizes = [args.smallest_bytes]
        while sizes[-1] * args.factor <= args.largest_bytes:
            sizes.append(sizes[-1] * args.factor)
        cases = [(op, 0) for op in args.ops]
        if on_cuda:
            cases += [("exchange", blocks) for blocks in args.most_blocks]
            cases += [(op, 0) for op in PEER_COPIES]
        elif process.is_main:
            print(f"{', '.join(PEER_COPIES)} | not run: the memory of CUDA devices only")
        peer = None
        for op, blocks in cases:
            if op in PEER_COPIES and peer is None:
                peer = open_peer(ranks, max(sizes))
            for size in sizes:
                run = operation(op, size, ranks, blocks, peer)
                row = measure(run, op, size, ranks) | {"most_blocks": blocks}
                if process.is_main:
                    rate = f"{row['bus_bytes_per_s'] / 1e9:.2f}"
                    print(f"{op} | {blocks} | {size} | {row['ms'] * 1e3:.1f} | {rate}", flush=True)
                    if args.json is not None:
                        args.json.parent.mkdir(parents=True, exist_ok=True)
                        with args.json.open("a", encoding="utf-8") as stream:
                            stream.write(json.dumps(row | versions) + "\n")


if __name__ == "__main__":
    end_process_on_error()
    main()
    end_process(0)
