"""ProfilerWindow: which steps are traced, and whether the trace can be opened."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacomposer.observe.config import ObserveConfig
from megacomposer.observe.profiler import ProfilerWindow

# torch says so where the window has no step before it to warm up in
cold_start = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")


def train(
    run_dir: Path, steps: range, *, rank: int = 0, start: int = 3, num: int = 2
) -> ProfilerWindow:
    config = ObserveConfig(profile_start_step=start, profile_num_steps=num, profile_ranks=(0, 2))
    with ProfilerWindow(config, run_dir, rank) as window:
        for step in steps:
            window.step(step)
            with torch.profiler.record_function(f"work of step {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    return window


def traced_steps(path: Path | None) -> list[int]:
    assert path is not None
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: dict[str, Any] = json.load(file)
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert "aten::mm" in names
    steps = {name.removeprefix("work of step ") for name in names if name.startswith("work of")}
    return sorted(map(int, steps))


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("**/*") if path.is_file())


@pytest.mark.filterwarnings("error:Profiler won't be using warmup")
def test_trace_of_other_steps_than_were_asked_for(tmp_path: Path) -> None:
    window = train(tmp_path, range(1, 8), rank=2)
    assert window.path == tmp_path / "profiles" / "rank2_step3-4.json.gz"
    assert traced_steps(window.path) == [3, 4]
    assert files(tmp_path) == ["rank2_step3-4.json.gz"]


@cold_start
@pytest.mark.parametrize(
    ("steps", "start", "name", "traced"),
    [
        (range(1, 5), 3, "rank0_step3-4.json.gz", [3, 4]),  # the run ends with the window
        (range(1, 4), 3, "rank0_step3-3.json.gz", [3]),  # the run ends inside it
        (range(4, 9), 3, "rank0_step4-4.json.gz", [4]),  # resumed inside it
        (range(5), 0, "rank0_step0-1.json.gz", [0, 1]),  # no step before it to warm up in
        (range(1, 5), 1, "rank0_step1-2.json.gz", [1, 2]),
    ],
)
def test_run_that_starts_or_ends_inside_the_window_loses_its_trace(
    tmp_path: Path, steps: range, start: int, name: str, traced: list[int]
) -> None:
    window = train(tmp_path, steps, start=start)
    assert files(tmp_path) == [name]
    assert traced_steps(window.path) == traced


@pytest.mark.parametrize(
    ("steps", "rank", "num"),
    [
        (range(1, 8), 1, 2),  # a rank that is not asked
        (range(1, 8), 0, 0),  # off
        (range(5, 9), 0, 2),  # resumed after the window
        (range(1, 2), 0, 2),  # over before it
        (range(1, 3), 0, 2),  # over while warming up
    ],
)
def test_trace_that_nobody_asked_for(tmp_path: Path, steps: range, rank: int, num: int) -> None:
    assert train(tmp_path, steps, rank=rank, num=num).path is None
    assert files(tmp_path) == []


@cold_start
def test_failed_step_that_blocks_every_later_profile(tmp_path: Path) -> None:
    config = ObserveConfig(profile_start_step=1, profile_num_steps=2)

    def fail_in_window() -> None:
        with ProfilerWindow(config, tmp_path, 0) as window:
            window.step(1)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_in_window()
    assert files(tmp_path) == []
    assert traced_steps(train(tmp_path, range(1, 8)).path) == [3, 4]
