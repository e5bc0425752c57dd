"""metrics.jsonl: what survives crashes, resumes and values that JSON cannot hold."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megacomposer.observe import registry
from megacomposer.observe.metrics import METRICS, MetricsWriter, format_metrics, read_metrics

_ROOT = Path(__file__).resolve().parents[3]


def write_steps(run_dir: Path, steps: range, **arguments: Any) -> None:
    with MetricsWriter(run_dir, **arguments) as writer:
        for step in steps:
            writer.write(step, {"train/loss": 10.0 - step, "optim/lr": 0.5})


def steps_of(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir)]


def test_line_that_cannot_be_read_until_the_run_ends(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"train/loss": 2.5, "train/tokens": 10**12, "perf/mfu": numpy.float32(0.5)})
        (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert abs(record.pop("time_s") - time.time()) < 3600
    assert record == {
        "step": 7,
        "train/loss": 2.5,
        "train/tokens": 10**12,
        "perf/mfu": 0.5,
    }
    assert type(record["train/tokens"]) is int


def test_resumed_run_that_reports_its_repeated_steps_twice(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 7), resume_step=4)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    write_steps(tmp_path, range(1, 2), resume_step=0)
    assert steps_of(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_writer_that_drops_lines_it_was_not_told_to_drop(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(3, 4))  # such as an evaluation of a finished run
    assert steps_of(tmp_path) == [1, 2, 3, 3]
    write_steps(tmp_path, range(4, 5), resume_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("resume_step", [None, 2, 3])
def test_half_written_last_line_that_poisons_the_file(
    tmp_path: Path, resume_step: int | None
) -> None:
    write_steps(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):  # every place in the last line where a crash can cut
        path.write_bytes(whole[:cut])
        assert steps_of(tmp_path) == [1, 2]
    write_steps(tmp_path, range(3, 5), resume_step=resume_step)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_damage_in_the_middle_that_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for damage in (b'{"step": 2, "tra\n', b"\0\0\0\n", b"[2]\n", b'{"train/loss": 1}\n'):
        path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not"):
            read_metrics(path)
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not"):
            MetricsWriter(tmp_path, resume_step=1)
        assert path.read_bytes().startswith(b'{"step": 1}\n' + damage)


def test_missing_file_that_reads_as_a_run_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read metrics .*metrics\.jsonl: No such file"):
        read_metrics(tmp_path)


def test_value_that_is_not_finite_makes_a_line_no_json_parser_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megacomposer"), "propagate", True)
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": math.nan, "optim/grad_norm": math.inf, "optim/lr": 0.5})
        writer.write(2, {"train/loss": -math.inf})
        writer.write(3, {"train/loss": 1.0})
        assert writer.nonfinite_count == 3
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second, third = read_metrics(tmp_path)
    assert (first["train/loss"], first["optim/grad_norm"], first["optim/lr"]) == (None, None, 0.5)
    assert first["system/nonfinite_values"] == 2
    assert second["system/nonfinite_values"] == 3
    assert "system/nonfinite_values" not in third
    warnings = [record.getMessage() for record in caplog.records]
    assert [message.split(" ")[0] for message in warnings] == ["train/loss", "optim/grad_norm"]


def test_metric_that_nobody_has_described(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for name in ("train/lss", "loss", "eval/pass_frac", "train/*", "reward/part/a/b", "step"):
            with pytest.raises(AssertionError, match=re.escape(repr(name))):
                writer.write(1, {name: 1.0})
        writer.write(2, {"eval/pass_frac/swe_bench": 0.5, "reward/part/tests": 1.0})
    assert steps_of(tmp_path) == [2]


def test_tensor_whose_reading_would_stall_the_device(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(AssertionError, match="Tensor is not"):
        writer.write(1, {"train/loss": torch.tensor(1.0)})


def test_tensorboard_that_shows_other_values_than_the_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, range(1, 5), tensorboard=True)
    write_steps(tmp_path, range(3, 6), tensorboard=True, resume_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["optim/lr", "train/loss"]
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(r["step"], r["train/loss"]) for r in read_metrics(tmp_path)]


def test_tensorboard_that_is_missing_is_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what Python does for "not installed"
    with pytest.raises(ValueError, match=re.escape("pip install megacomposer[track]")):
        MetricsWriter(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_import_of_the_room_that_drags_slow_packages_in() -> None:
    room = sorted((_ROOT / "megacomposer" / "observe").glob("*.py"))
    imports = "".join(f"import megacomposer.observe.{path.stem}\n" for path in room)
    imports = imports.replace(".__init__", "")
    slow = "{'torch', 'numpy', 'matplotlib', 'rich', 'tensorboard'}"
    code = f"import sys\n{imports}print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_registry_entry_without_area_unit_or_place_in_the_docs() -> None:
    page = (_ROOT / "docs" / "observe.md").read_text(encoding="utf-8")
    for name, description in METRICS.items():
        assert re.fullmatch(r"[a-z]+/[a-z0-9_]+(/\*)?", name), name
        assert name.partition("/")[0] in registry.AREAS, name
        assert description.endswith("."), name
        assert "|" not in description, f"{name}: a bar ends a table cell"
        assert f"`{name}`" in page, f"docs/observe.md does not list {name}"
    assert registry.metric_table() in page, "docs/observe.md has another table than metric_table()"


def test_step_line_that_spreads_over_several_lines() -> None:
    line = format_metrics(12, {"train/loss": 2.34567, "train/tokens": 4096, "perf/mfu": 0.5})
    assert line == "step 12 | loss 2.346 | tokens 4096 | mfu 0.5"
