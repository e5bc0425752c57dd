"""One model on one mesh: everything that muon_step.py measures and prints of it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from muon_step_model import Model, newton_schulz_rows, pass_times
from muon_step_ranks import exchange_times, time_steps, trace

from megacomposer.kernels.bench import environment, measured_copy_bandwidth
from megacomposer.runtime.process import Process

Record = dict[str, Any]


def run_case(
    args: argparse.Namespace, mesh: str, model: Model, process: Process, rates: Record
) -> Record:
    """Measures on all ranks; rank 0 prints, and appends the record to the file.

    rates: what an earlier mesh found of passes and Newton-Schulz, or empty. Returns this.
    """

    def say(text: str) -> None:
        if process.is_main:
            print(text, flush=True)

    record: Record = {"model": model.describe()} | environment(process.device)
    say(f"{mesh} on {process.world_size} ranks: {json.dumps(record['model'])}")
    names = [*args.optimizers]
    record["steps"] = steps = {}
    if process.world_size > 1 and "ours" in names:
        names.remove("ours")
        record["exchange"] = _exchanges(args, model, say)
        default = record["model"]["muon_reserved_sms"]
        rows = {row["reserved_sms"]: row for row in record["exchange"]}
        steps["ours"] = rows[default]
    steps |= _steps(names, model, say)
    record["step_ms"] = steps["ours"]["ms"] if "ours" in steps else None
    if not rates:
        rates = _rates(model, say)
    record |= rates
    if args.trace is not None:
        name = f"muon_step_{mesh.replace('=', '').replace(',', '_')}_rank{process.rank}.json.gz"
        record["trace"] = trace(model, args.trace / name)
        say(f"one step, ms: {record['trace']}")
    if args.json is not None and process.is_main:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with args.json.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
    return rates


def _steps(names: list[str], model: Model, say: Any) -> Record:
    say("optimizer | ms a step (p20 to p80) | peak GiB")
    steps: Record = {}
    for name in names:
        found = time_steps(name, model)
        if isinstance(found, str):
            say(f"{name} | not run: {found}")
            continue
        steps[name] = found
        spread = f"{found['p20_ms']:.2f} to {found['p80_ms']:.2f}"
        say(f"{name} | {found['ms']:.2f} ({spread}) | {found['peak_gib']:.1f}")
    return steps


def _exchanges(args: argparse.Namespace, model: Model, say: Any) -> list[Record]:
    """Exposed is what the exchanges add to the slower rank's compute, over the step: with as many
    multiprocessors for the compute as in the step, and with all of them."""
    say(
        "multiprocessors for exchanges | exchanges | MB out of a rank | step ms | compute ms"
        " | exposed | exposed, all multiprocessors computing | peak GiB"
    )
    default = model.muon_config().muon_reserved_sms
    numbers = dict.fromkeys((0, default, *args.reserved_sms))
    found = [exchange_times(model, number) for number in numbers]
    for row in found:
        row["exposed_of_all"] = (row["ms"] - found[0]["compute_ms"]) / row["ms"]
        say(
            f"{row['reserved_sms']} | {row['collectives']:.0f} | {row['sent_bytes'] / 1e6:.0f}"
            f" | {row['ms']:.2f} | {row['compute_ms']:.2f} | {row['exposed']:.1%}"
            f" | {row['exposed_of_all']:.1%} | {row['peak_gib']:.1f}"
        )
    return found


def _rates(model: Model, say: Any) -> Record:
    copy = measured_copy_bandwidth(model.device)
    say("pass of ours | ms | GB/s | % of copy")
    passes = pass_times(model)
    for name, entry in passes.items():
        rate = entry["bytes"] / (entry["ms"] * 1e-3) if entry["bytes"] else 0.0
        shown = f"{rate / 1e9:.0f} | {rate / copy:.0%}" if rate else "- | -"
        say(f"{name} | {entry['ms']:.2f} | {shown}")
    elementwise = [entry for entry in passes.values() if entry["bytes"]]
    total_s = sum(entry["ms"] for entry in elementwise) * 1e-3
    rows = newton_schulz_rows(model)
    say("Newton-Schulz: rows x columns | batch | ms")
    for row in rows:
        say(f"{row['rows']} x {row['columns']} | {row['batch']} | {row['ms']:.3f}")
    return {
        "passes": passes,
        "elementwise_bytes_per_s": sum(entry["bytes"] for entry in elementwise) / total_s,
        "newton_schulz": rows,
    }
