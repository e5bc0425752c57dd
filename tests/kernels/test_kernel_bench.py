"""The benchmark harness: labels, ratios and the JSON lines, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacomposer.kernels.bench import Row, Timing, benchmark, relative_error, report

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def _row(implementation: str, ms: float, op: str = "copy") -> Row:
    timing = Timing(median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=30, clock="cpu_wall")
    return Row(
        op=op,
        implementation=implementation,
        shape=(2, 3),
        dtype="bfloat16",
        timing=timing,
        bytes_moved=10**9,
    )


def test_cpu_time_is_labelled_as_such_and_counts_its_calls() -> None:
    calls = []
    timing = benchmark(lambda: calls.append(0), device=CPU, warmup=2)
    assert timing.clock == "cpu_wall"
    assert len(calls) == 32
    assert timing.p20_ms <= timing.median_ms <= timing.p80_ms


def test_too_few_repeats_and_a_graph_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats"):
        benchmark(lambda: None, device=CPU, repeats=29)
    with pytest.raises(ValueError, match="cuda_graph"):
        benchmark(lambda: None, device=CPU, cuda_graph=True)


def test_row_with_both_or_neither_rate_is_refused() -> None:
    timing = _row("ours", 1.0).timing
    for work in ({}, {"bytes_moved": 1, "flops": 1}):
        with pytest.raises(ValueError, match="exactly one"):
            Row(op="a", implementation="b", shape=(1,), dtype="c", timing=timing, **work)


def test_report_compares_with_the_best_peer_of_the_same_op_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        _row("ours", 2.0),
        _row("slow", 8.0),
        _row("fast", 4.0),
        _row("other", 1.0, op="another op"),
    ]
    path = tmp_path / "new" / "rows.jsonl"
    report(rows, device=CPU, json_path=path)
    report(rows[:1], device=CPU, json_path=path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 5
    assert [record["x_best_peer"] for record in records] == [2.0, 0.5, 2.0, None, None]
    assert records[0]["rate"] == pytest.approx(500.0)
    assert records[0]["rate_unit"] == "GB/s"
    assert records[0]["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "copy | ours | 2x3 | bfloat16 | 2.0000 (cpu_wall) | 500.0 GB/s" in printed


def test_relative_error_is_scale_free() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected * 1.1, expected) == pytest.approx(0.1)
    assert relative_error(expected * 1.1e-9, expected * 1e-9) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0


def test_rms_norm_script_appends_a_row_per_implementation_and_pass(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    script = ROOT / "scripts" / "bench" / "rms_norm.py"
    subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--json", str(path)],
        check=True,
        timeout=100,
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    seen = {(record["op"], record["implementation"]) for record in records}
    ops, names = ("rms_norm fwd", "rms_norm fwd+bwd"), ("ours", "torch")
    assert seen == {(op, name) for op in ops for name in names}
    assert all(record["error"] < 4e-3 for record in records)
