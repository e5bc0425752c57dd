#!/usr/bin/env python3
"""Plot a run and print its summary: `python scripts/report.py RUN_DIR [--event NAME]`.

The last line of stdout is one JSON object with first and last loss, held-out loss, steps and speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from megacomposer.data.bigram import byte_bigram_cross_entropy
from megacomposer.data.indexed import IndexedDataset
from megacomposer.observe.metrics import read_metrics
from megacomposer.observe.report import plot_loss
from megacomposer.train.config import RunConfig


def summarise(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """Losses in nats per token (of a byte tokenizer: per byte), speed as the median over steps."""
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "train/loss" in line]
    if not steps:
        raise ValueError(f"{run_dir} has no finished step yet")
    summary: dict[str, Any] = {
        "first_loss": steps[0]["train/loss"],
        "last_loss": steps[-1]["train/loss"],
        "steps": steps[-1]["step"],
        "tokens_per_s": round(statistics.median(line["perf/tokens_per_s"] for line in steps), 1),
    }
    heldout = [line["eval/loss"] for line in lines if "eval/loss" in line]
    if heldout:
        summary |= {"heldout_loss_start": heldout[0], "heldout_loss": heldout[-1]}
    if config.data.heldout_prefix and config.data.tokenizer == "byte":
        dataset = IndexedDataset(config.data.heldout_prefix)
        summary["heldout_bigram"] = round(byte_bigram_cross_entropy(dataset), 4)
    return summary | {"run_dir": str(run_dir)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--event", default="report", help="value of the summary's `event`")
    args = parser.parse_args()
    try:
        config = RunConfig.load(args.run_dir / "config.json")
        summary = summarise(args.run_dir, config)
        plot = plot_loss(args.run_dir, bigram_nats_per_token=summary.get("heldout_bigram"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"plot: {plot}")
    print(json.dumps({"event": args.event, **summary}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
