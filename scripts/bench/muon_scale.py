"""Predict Muon's step of a preset on worlds of H200s that are not here, from the plan it would run.

Prints the shortest predicted step of a few layouts for each world, and the fewest GPUs for a goal.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from megacomposer.mesh.config import MeshConfig
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon_scale import (
    HEADINGS,
    best_prediction,
    meets,
    predict,
    preset,
    read_calibration,
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
    parser.add_argument("--check", action="store_true", help="predict the step calibrated on")
    args = parser.parse_args()
    machine, optim = Machine(), OptimConfig(name="muon")
    if args.calibration:
        calibration = read_calibration(args.calibration)
        machine = calibration.machine
        if args.check:
            found = predict(calibration.model, MeshConfig(), 1, machine, calibration.optim)
            print(f"prediction of the one-GPU step: {found.step_s * 1e3:.2f} ms; measured"
                  f" {calibration.step_s * 1e3:.2f} ms; prediction / measured"
                  f" {found.step_s / calibration.step_s:.3f}")  # fmt: skip
            return
    elif args.check:
        parser.error("--check needs --calibration")
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
