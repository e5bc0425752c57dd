"""Benchmark an optimizer step of a mid-size MoE on one GPU, or on the ranks of torchrun.

Sharded Muon beside AdamW and the Muon of others on the same tensors, where our time goes, and with
several ranks how much of it is exchanges that nothing hides. The file that --json writes, a line
for each mesh, calibrates muon_scale.py. Run with the root of the repository on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.core import parallel_state

from megacomposer.kernels.bench import environment, measured_copy_bandwidth
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.runtime.config import RuntimeConfig
from megacomposer.runtime.process import Process, end_process, end_process_on_error, start_process

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from muon_step_case import Record, run_case
from muon_step_model import Model
from muon_step_ranks import OPTIMIZERS


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    found.add_argument("--preset", default="qwen3_30b_a3b", help="of model/presets.py")
    found.add_argument("--layers", type=int, default=6, help="the preset is cut to so many")
    found.add_argument("--change", nargs="*", default=[], help="other fields, num_experts=96")
    found.add_argument("--meshes", nargs="+", default=["ep=1"], help="such as ep=2,dense_shard=1")
    found.add_argument("--optimizers", nargs="+", default=[*OPTIMIZERS], choices=[*OPTIMIZERS])
    found.add_argument("--o-proj", default="per_head", choices=["per_head", "whole"])
    found.add_argument("--reserved-sms", type=int, nargs="*", default=[], help="more to try")
    found.add_argument("--trace", type=Path, help="folder for a trace of each rank")
    found.add_argument("--json", type=Path, help="append the measurements to this file")
    return found


def main() -> None:
    args = parser().parse_args()
    settings = RuntimeConfig(device=args.device, deterministic=False)
    with start_process(settings) as process:
        if process.is_main:
            copy = measured_copy_bandwidth(process.device) / 1e9
            print(f"{environment(process.device)}; measured copy bandwidth: {copy:.0f} GB/s")
        rates: Record = {}
        for mesh in args.meshes:
            model = Model(
                args.preset,
                args.layers,
                process.device,
                split_output_heads=args.o_proj == "per_head",
                changes=_fields(args.change),
                layout=_layout(MeshConfig(**_fields(mesh.split(","))), process),
            )
            rates = run_case(args, mesh, model, process, rates)
            del model  # before the next one


def _layout(mesh: MeshConfig, process: Process) -> Layout:
    size, device_type = process.world_size, process.device.type
    layout = Layout(mesh, world_size=size, rank=process.rank, device_type=device_type)
    if size > 1:
        parallel_state.destroy_model_parallel()
        layout.start()
    return layout


def _fields(entries: list[str]) -> dict[str, int]:
    return {name: int(value) for name, value in (entry.split("=") for entry in entries)}


if __name__ == "__main__":
    end_process_on_error()
    main()
    end_process(0)
