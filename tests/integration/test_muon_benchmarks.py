"""The benchmarks of an optimizer step and of links, and the prediction that is calibrated on them,
on a CPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def output_of(script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    result = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "scripts/bench" / script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_measured_step_is_not_what_the_prediction_reads(tmp_path) -> None:
    measured = tmp_path / "step.json"
    model = ("--device", "cpu", "--preset", "tiny", "--layers", "1")
    output_of("muon_step.py", *model, "--optimizers", "ours", "adamw", "--json", str(measured))
    record = json.loads(measured.read_text())
    assert set(record["steps"]) == {"ours", "adamw"}
    passes = record["passes"]
    assert {"update_momentum", "pack", "apply_update", "adamw of the others"} <= set(passes)
    assert all(entry["ms"] > 0 for entry in passes.values())
    line = output_of("muon_scale.py", "--calibration", str(measured), "--check")
    assert f"measured {record['step_ms']:.2f} ms" in line


def test_links_of_two_ranks_lack_what_the_prediction_reads(tmp_path) -> None:
    links = tmp_path / "links.jsonl"
    sizes = ("--largest-bytes", "4096", "--json", str(links))
    output_of("links.py", *sizes, launcher=TORCHRUN)
    rows = [json.loads(line) for line in links.read_text().splitlines()]
    ops = {"all_to_all", "exchange", "all_reduce", "reduce_scatter", "all_gather"}
    assert {(row["op"], row["bytes"]) for row in rows} == {(op, 4**n) for op in ops for n in (5, 6)}
    assert all(row["world_size"] == 2 and row["most_blocks"] == 0 for row in rows)
    for row in rows:
        crossed = {"exchange": 1.0, "all_reduce": 1.0}.get(row["op"], 0.5) * row["bytes"]
        assert row["bus_bytes_per_s"] == pytest.approx(crossed / row["ms"] * 1e3)


def test_step_of_two_ranks_lacks_its_exchanges_or_trace(tmp_path) -> None:
    """One layer of experts that both ranks store: results travel, and there is a mesh to plan."""
    measured, meshes = tmp_path / "step.jsonl", ("ep=2", "dense_shard=1,expert_shard=1")
    model = ("--preset", "tiny", "--layers", "1", "--optimizers", "ours", "adamw", "dion")
    small = (
        *("--change", "num_dense_layers=0", "num_experts=2", "mtp_num_layers=0", "vocab_size=8"),
        *("hidden_size=32", "moe_ffn_hidden_size=16", "shared_expert_ffn_hidden_size=16"),
    )
    files = ("--trace", str(tmp_path / "traces"), "--json", str(measured))
    options = (*model, *small, "--meshes", *meshes, *files)
    out = output_of("muon_step.py", *options, launcher=TORCHRUN)
    assert "dion | not run: dion not installed" in out
    records = [json.loads(line) for line in measured.read_text().splitlines()]
    assert [record["model"]["mesh"]["ep"] for record in records] == [2, 1]
    for record in records:
        assert {"ours", "adamw"} == set(record["steps"])
        for row in record["exchange"]:
            assert row["compute_ms"] > 0
            assert row["collectives"] > 1
            assert row["exposed"] == pytest.approx(1 - row["compute_ms"] / row["ms"])
    # Where both store everything, each sends half of the results to the other.
    whole = records[1]["model"]["muon_parameters"]
    assert records[1]["exchange"][0]["sent_bytes"] == pytest.approx(2 * whole / 2, rel=0.25)
    traces = sorted((tmp_path / "traces").iterdir())
    assert len(traces) == 4
    for path in traces:
        with gzip.open(path, "rt") as stream:
            names = {event["name"] for event in json.load(stream)["traceEvents"]}
        assert {"update_momentum", "orthogonalize_stacks", "apply_update"} <= names
    checked = output_of("muon_scale.py", "--calibration", str(measured), "--check").splitlines()
    assert [line.split(":")[0] for line in checked] == [
        "prediction of the 2-GPU step (tp 1, cp 1, ep 2, dense_shard 2, expert_shard 1)",
        "prediction of the 2-GPU step (tp 1, cp 1, ep 1, dense_shard 1, expert_shard 1)",
    ]
