"""metrics.jsonl: one JSON object per reported step, written by rank 0, readable at any moment."""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megacomposer.observe.logging import get_logger
from megacomposer.observe.registry import METRICS as METRICS
from megacomposer.observe.registry import is_registered

FILE_NAME = "metrics.jsonl"
_BOOKKEEPING = ("step", "time_s")

_logger = get_logger(__name__)


class MetricsWriter:
    """Appends metrics to `run_dir/metrics.jsonl` and, if asked, to TensorBoard events.

    Construct it on rank 0 only. An existing file is continued. `resume_step` is the step of the
    checkpoint that the run continues from: lines of later steps are dropped, since those steps are
    about to be run again (pass 0 to start over). A last line that a crash cut short is dropped in
    any case.

    Raises ValueError if the file holds anything else than metrics, and if `tensorboard` is asked
    for but not installed.
    """

    def __init__(
        self, run_dir: Path, *, tensorboard: bool = False, resume_step: int | None = None
    ) -> None:
        self._sink = _TensorBoardSink(Path(run_dir), resume_step) if tensorboard else None
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.nonfinite_count = 0
        """NaN or infinite values written as null by this writer."""
        self._warned: set[str] = set()
        if self.path.exists():
            _truncate(self.path, resume_step)
        # unbuffered: each line is one write, so readers and crashes see whole lines
        self._file: IO[bytes] = self.path.open("ab", buffering=0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step": step, "time_s": <Unix time>, **metrics}` as one line.

        A value that is not finite becomes null, is counted in `nonfinite_count` and the line's
        `system/nonfinite_values`, and is warned about once per name. Values are Python or numpy
        numbers: a tensor is refused, since reading it would stall the device unseen.
        """
        line: dict[str, Any] = {"step": step, "time_s": round(time.time(), 3)}
        nonfinite_before = self.nonfinite_count
        for name, value in metrics.items():
            assert is_registered(name), f"{name!r} is not in megacomposer.observe.registry.METRICS"
            line[name] = self._finite_or_none(step, name, value)
        if self.nonfinite_count > nonfinite_before:
            line["system/nonfinite_values"] = self.nonfinite_count
        self._file.write((json.dumps(line, allow_nan=False) + "\n").encode())
        if self._sink is not None:
            self._sink.write(line)

    def close(self) -> None:
        self._file.close()
        if self._sink is not None:
            self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _finite_or_none(self, step: int, name: str, value: float) -> int | float | None:
        assert isinstance(value, numbers.Real), f"{name}: {type(value).__name__} is not a number"
        if isinstance(value, numbers.Integral):
            return int(value)
        if math.isfinite(value):
            return float(value)
        self.nonfinite_count += 1
        if name not in self._warned:
            self._warned.add(name)
            _logger.warning(
                "%s is %s at step %d; it is written as null, now and without another warning"
                " whenever this happens again",
                name,
                float(value),
                step,
            )
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, or of the one in a run directory, oldest first.

    A last line that is still being written is left out. Raises ValueError naming the file if it is
    missing, or the line that is not metrics.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read metrics {path}: {error.strerror}") from error
    return [record for _, record in _parse(content, path)]


def format_metrics(step: int, metrics: dict[str, float]) -> str:
    """One short line for the log: `step 12 | loss 2.345 | lr 0.0003 | tokens_per_s 1.2e+05`."""
    parts = [f"step {step}"]
    for name, value in metrics.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{name.partition('/')[2]} {shown}")
    return " | ".join(parts)


def _parse(content: bytes, path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each complete line with its record; a line is complete once its newline is there."""
    *lines, _cut_short = content.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path}:{number} is not a line of metrics: it has no step")
        parsed.append((line + b"\n", record))
    return parsed


def _truncate(path: Path, resume_step: int | None) -> None:
    content = path.read_bytes()
    kept = b"".join(
        line
        for line, record in _parse(content, path)
        if resume_step is None or record["step"] <= resume_step
    )
    if kept == content:
        return
    partial = path.with_name(f"{path.name}.incomplete")
    with partial.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class _TensorBoardSink:
    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "observe.tensorboard is on but TensorBoard is not installed;"
                " pip install megacomposer[track], or turn it off"
            ) from error
        # events from purge_step on are hidden by TensorBoard, as they are dropped from the file
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name not in _BOOKKEEPING and value is not None:
                self._writer.add_scalar(name, value, line["step"], walltime=line["time_s"])

    def close(self) -> None:
        self._writer.close()
