"""Predict Muon's step of a preset on worlds of H200s that are not here, from the plan it would run.

Prints the shortest predicted step of a few layouts for each world, and the fewest GPUs for a goal.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon_scale import (
    HEADINGS,
    best_prediction,
    check,
    meets,
    preset,
    read_calibrations,
    read_near_bytes_per_s,
    row,
    search_fewest,
    unmeasured_shapes,
)
from megacomposer.optim.muon_timeline import Machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="kimi_k2", help="of model/presets.py")
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--goal-ms", type=float, default=200.0, help="the fewest GPUs for this")
    parser.add_argument("--multiple", type=int, default=64, help="worlds looked at for the goal")
    parser.add_argument("--calibration", type=Path, help="written by muon_step.py --json")
    parser.add_argument("--links", type=Path, help="written by links.py --json, for NVLink")
    parser.add_argument("--check", action="store_true", help="predict the steps calibrated on")
    args = parser.parse_args()
    machine, optim = Machine(), OptimConfig(name="muon")
    near = read_near_bytes_per_s(args.links, optim) if args.links else machine.near_bytes_per_s
    machine = dataclasses.replace(machine, near_bytes_per_s=near)
    if args.calibration:
        calibrations = read_calibrations(args.calibration, links=args.links)
        machine = calibrations[0].machine
    if args.check:
        if not args.calibration:
            parser.error("--check needs --calibration")
        for calibration in calibrations:
            print(check(calibration))
        return
    config = preset(args.preset)
    print(f"prediction for {args.preset}; elementwise {machine.elementwise_bytes_per_s / 1e12:.2f}"
          f" TB/s, NVLink {machine.near_bytes_per_s / 1e9:.0f} GB/s and InfiniBand"
          f" {machine.far_bytes_per_s / 1e9:.0f} GB/s each way, exchanges beside the kernels at"
          " full rate")  # fmt: skip
    unmeasured = sum(unmeasured_shapes(config, machine, optim).values())
    print(f"prediction: {unmeasured:.0%} of Newton-Schulz time is in shapes that were not measured")
    print(HEADINGS)
    for world in args.worlds:
        start = time.perf_counter()
        found = best_prediction(config, world, machine, optim)
        print(f"{row(found)}   ({time.perf_counter() - start:.0f} s to plan)", flush=True)
    print(f"the fewest GPUs for {args.goal_ms:g} ms, in multiples of {args.multiple}:")
    options = {"step_s": args.goal_ms * 1e-3, "multiple": args.multiple, "most": max(args.worlds)}
    met = False
    for found in search_fewest(config, machine, optim, **options):
        met = meets(found, args.goal_ms * 1e-3)
        print(row(found) + ("   <- the fewest" if met else ""), flush=True)
    if not met:
        print(f"prediction: none up to {max(args.worlds)}")


if __name__ == "__main__":
    main()
