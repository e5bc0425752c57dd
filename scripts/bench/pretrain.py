"""End-to-end training speed: run a recipe through scripts/train.py and report its own metrics.

python scripts/bench/pretrain.py qwen3_moe_1gpu --nproc 1 -- --train.num_steps 50
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from megacomposer.observe.metrics import read_metrics

WARMUP_STEPS = 10
MEDIANS = (
    "perf/tokens_per_s",
    "perf/tflops_per_gpu",
    "perf/mfu",
    "time/step_s",
    "time/data_s",
    "perf/memory_peak_gib",
    "train/expert_load_max_over_mean",
)


def summarise(run_dir: Path) -> dict[str, float]:
    """Median of each metric after the warm-up, and the first, middle and last loss."""
    steps = [line for line in read_metrics(run_dir) if "train/loss" in line]
    timed = steps[WARMUP_STEPS:]
    if not timed:
        raise ValueError(f"{run_dir} has {len(steps)} steps; give more than {WARMUP_STEPS}")
    summary = {
        name: statistics.median(line[name] for line in timed)
        for name in MEDIANS
        if name in timed[0]
    }
    losses = [line["train/loss"] for line in steps]
    summary |= {"first_loss": losses[0], "middle_loss": losses[len(losses) // 2]}
    return summary | {"last_loss": losses[-1], "steps": len(losses)}


def device_and_versions() -> dict[str, str]:
    import megatron.core
    import torch

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, default=1, help="processes (one per GPU)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench"))
    parser.add_argument("--label", default="", help="what is special about this run")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, overrides = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    script = Path(__file__).parents[1] / "train.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.nproc), str(script), args.recipe]
    command += ["--run_dir", str(args.run_dir), *overrides]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    if code:
        return code
    row = {"recipe": args.recipe, "label": args.label, "nproc": args.nproc}
    row |= {"overrides": " ".join(overrides), **device_and_versions()}
    row |= summarise(args.run_dir)
    print(json.dumps(row))
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
