"""One or two ranks of two_gpu_training.py: trains the named runs, a row of JSON lines for each."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megacomposer.kernels.bench import environment
from megacomposer.optim.qk_clip import QKClip
from megacomposer.optim.schedule import learning_rate
from megacomposer.runtime.config import RuntimeConfig
from megacomposer.runtime.process import (
    Process,
    end_process,
    end_process_on_error,
    seed_everything,
    start_process,
)
from megacomposer.train.config import RunConfig
from megacomposer.train.state import TrainState, build_state
from megacomposer.train.step import TrainStep

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from two_gpu_training_cases import run_named


def train(config: RunConfig, process: Process, *, saves: bool) -> dict[str, Any]:
    """All steps from the start or the checkpoint on, as train/loop.py does them."""
    started = time.perf_counter()
    seed_everything(config.runtime.seed)
    state = build_state(config, process)
    parts = (state.model, state.layout, state.shards)
    threshold, clip = config.optim.qk_clip_threshold, config.optim.clip_grad_norm
    qk_clip = QKClip(*parts, threshold=threshold) if threshold else None
    step = TrainStep(
        *parts, state.optimizer, clip_grad_norm=clip, device=process.device, qk_clip=qk_clip
    )
    row: dict[str, Any] = {name: [] for name in ("steps", "loss", "mtp_loss", "grad_norm")}
    with state.loader as loader:
        state.restore()
        while state.step < config.train.num_steps:
            rate = learning_rate(
                config.schedule, config.optim.lr, state.step, config.train.num_steps
            )
            result = step(loader.next_step(), lr=rate)
            state.step += 1
            state.trained_tokens += result.num_tokens
            row["steps"].append(state.step)
            for name in ("loss", "mtp_loss", "grad_norm"):
                row[name].append(getattr(result, name))
            if saves and state.step == config.train.num_steps // 2:
                state.save()
    reports: list[Any] = [None] * process.world_size
    torch.distributed.all_gather_object(reports, (row, digest_of(state)))
    assert all(report[0] == row for report in reports), "ranks report different losses"
    row["digest"] = [digest for _, digest in reports]
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def digest_of(state: TrainState) -> str:
    """Of every bit of this rank's weights and moments."""
    digest = hashlib.sha256()
    for _, tensor in {**state.model_tensors(), **state.optimizer.state_tensors()}.values():
        digest.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def end_layout() -> None:
    """End every process group but the world's: each run makes its own."""
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--data", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--folder", type=Path, required=True, help="of the run directories")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True, help="rows are appended to it")
    parser.add_argument("names", nargs="+")
    args = parser.parse_args()
    end_process_on_error()
    runtime = RuntimeConfig(device=args.device, collective_timeout_s=60.0)
    with start_process(runtime) as process:
        for name in args.names:
            run = run_named(name)
            config = run.config(args.folder, args.data, args.device, args.steps, args.seq_length)
            source = config.checkpoint.load_from
            if source is not None and not source.exists():
                row = {"failure": f"{run.expected.name} left no checkpoint"}
            else:
                row = train(config, process, saves=run.saves)
                end_layout()
            if process.is_main:
                row |= {"run": name, "ranks": process.world_size} | environment(process.device)
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, row.get("seconds"), row.get("failure", ""), flush=True)
    end_process(0)


if __name__ == "__main__":
    main()
