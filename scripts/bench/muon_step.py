"""Benchmark the compute side of an optimizer step of a mid-size MoE on one GPU.

Sharded Muon beside AdamW and dion's Muon on the same tensors, and where our time goes. The file
that --json writes calibrates muon_scale.py. Run with the root of the repository on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from megacomposer.kernels.bench import environment, measured_copy_bandwidth

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from muon_step_model import OPTIMIZERS, Model, newton_schulz_rows, pass_times, time_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="qwen3_30b_a3b", help="of model/presets.py")
    parser.add_argument("--layers", type=int, default=6, help="the preset is cut to so many")
    parser.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    parser.add_argument("--o-proj", default="per_head", choices=["per_head", "whole"])
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = Model(args.preset, args.layers, device, split_output_heads=args.o_proj == "per_head")
    record: dict[str, object] = {"model": model.describe()} | environment(device)
    print(json.dumps(record))
    copy = measured_copy_bandwidth(device)
    print(f"measured copy bandwidth: {copy / 1e9:.0f} GB/s")

    print("optimizer | ms a step (p20 to p80) | peak GiB")
    steps: dict[str, object] = {}
    for name in args.optimizers:
        found = time_steps(name, model)
        if isinstance(found, str):
            print(f"{name} | not run: {found}")
            continue
        steps[name] = found
        print(f"{name} | {found['ms']:.2f} ({found['p20_ms']:.2f} to {found['p80_ms']:.2f}) "
              f"| {found['peak_gib']:.1f}", flush=True)  # fmt: skip
    record |= {"step_ms": steps["ours"]["ms"] if "ours" in steps else None, "steps": steps}

    print("pass of ours | ms | GB/s | % of copy")
    passes = pass_times(model)
    for name, entry in passes.items():
        rate = entry["bytes"] / (entry["ms"] * 1e-3) if entry["bytes"] else 0.0
        shown = f"{rate / 1e9:.0f} | {rate / copy:.0%}" if rate else "- | -"
        print(f"{name} | {entry['ms']:.2f} | {shown}")
    elementwise = [entry for entry in passes.values() if entry["bytes"]]
    total_s = sum(entry["ms"] for entry in elementwise) * 1e-3
    record["passes"] = passes
    record["elementwise_bytes_per_s"] = sum(entry["bytes"] for entry in elementwise) / total_s

    print("Newton-Schulz: rows x columns | batch | ms")
    record["newton_schulz"] = newton_schulz_rows(model)
    for row in record["newton_schulz"]:
        print(f"{row['rows']} x {row['columns']} | {row['batch']} | {row['ms']:.3f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
