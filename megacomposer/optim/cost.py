"""What orthogonalising a matrix costs on one H200: the weights of Muon's plan."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("newton_schulz_h200.json")
MEASURED_STEPS = 5
"""Newton-Schulz steps of every row of a measured table."""
UNMEASURED_FLOPS_PER_S = 600e12
"""Assumed where a table is empty: about 3/4 of what one H200's float16 matmul reaches."""
# Steps before the first restart of the gram form and between later ones, as in
# kernels/newton_schulz.py for the default coefficients.
_FIRST_SEGMENT, _LATER_SEGMENTS = 2, 3

# Read and written per float32 element by each pass, the wire's bytes left out.
MOMENTUM_BYTES = 12  # gradient, momentum in and out
PACK_BYTES = 8  # gradient, momentum
APPLY_BYTES = 8  # parameter in and out
ADAMW_BYTES = 28  # gradient, and two moments and the parameter in and out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What one H200 and its links carry."""

    elementwise_bytes_per_s: float = 3.7e12
    """Of the passes over momentum, gradient and parameter: 0.9 of a copy, until calibrated."""
    near_bytes_per_s: float = 360e9
    """NVLink of one GPU, each way."""
    far_bytes_per_s: float = 45e9
    """InfiniBand of one GPU (400 Gbit/s), each way."""
    gpus_per_node: int = 8
    """Ranks of a node are consecutive."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredShape:
    """One row of a table: the time of a batch of equal matrices."""

    rows: int
    columns: int
    batch: int
    ms: float

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "batch", "ms"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"a measured Newton-Schulz shape has {name} = {getattr(self, name)}; it must be"
                    " > 0"
                )

    @property
    def cost_s(self) -> float:
        """Seconds for one matrix of the batch."""
        return self.ms * 1e-3 / self.batch


Table = Sequence[MeasuredShape]


def table_from_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[MeasuredShape, ...]:
    """A table from JSON rows {rows, columns, batch, ms}; other keys are ignored.

    Raises:
        ValueError: a key is missing or a value is not positive.
    """
    names = [field.name for field in dataclasses.fields(MeasuredShape)]
    for row in rows:
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(f"a measured Newton-Schulz shape lacks {missing}: {dict(row)}")
    return tuple(MeasuredShape(**{name: row[name] for name in names}) for row in rows)


@functools.cache
def measured_table() -> tuple[MeasuredShape, ...]:
    """The table that comes with the package."""
    return table_from_rows(json.loads(MEASURED.read_text()))


def newton_schulz_flops(rows: int, columns: int, steps: int) -> float:
    """Floating-point operations for one matrix in gram form, with a triangle of symmetric products.

    With m the shorter and n the longer side, a segment between restarts takes 3 m^2 n and
    (4 steps - 3) m^3: 6 m^2 n + 14 m^3 for five steps in two segments.
    """
    m, n = float(min(rows, columns)), float(max(rows, columns))
    segments = 1 + max(0, -(-(steps - _FIRST_SEGMENT) // _LATER_SEGMENTS))
    return 3 * segments * m * m * n + (4 * steps - 3 * segments) * m**3


def newton_schulz_cost_s(
    rows: int, columns: int, *, steps: int, table: Table | None = None
) -> float:
    """Seconds for one matrix in a large batch, gram form, on one H200.

    The largest measured batch of the shape (or of its transpose) where the table has one. Otherwise
    its FLOPs at the rate of the measured shapes next to it in FLOPs, interpolated in logarithms
    and constant beyond them; at `UNMEASURED_FLOPS_PER_S` where the table is empty.

    Args:
        table: None for the one that comes with the package.
    """
    if table is None:
        return _package_cost_s(rows, columns, steps)
    return _cost_s(rows, columns, steps, table)


@functools.cache
def _package_cost_s(rows: int, columns: int, steps: int) -> float:
    return _cost_s(rows, columns, steps, measured_table())


def _cost_s(rows: int, columns: int, steps: int, table: Table) -> float:
    flops = newton_schulz_flops(rows, columns, steps)
    if not table:
        return flops / UNMEASURED_FLOPS_PER_S
    for shape in ((rows, columns), (columns, rows)):
        same = [row for row in table if (row.rows, row.columns) == shape]
        if same:
            best = max(same, key=lambda row: row.batch)
            return best.cost_s * flops / newton_schulz_flops(rows, columns, MEASURED_STEPS)
    size = newton_schulz_flops(rows, columns, MEASURED_STEPS)
    return flops / _interpolated_rate(size, table)


def _interpolated_rate(flops: float, table: Table) -> float:
    """FLOPs per second of a matrix of that many FLOPs at `MEASURED_STEPS` steps."""
    points: dict[float, tuple[int, float]] = {}
    for row in table:
        size = newton_schulz_flops(row.rows, row.columns, MEASURED_STEPS)
        # of equal sizes the largest batch, as for a shape that was measured
        points[size] = max(points.get(size, (0, 0.0)), (row.batch, size / row.cost_s))
    sizes = sorted(points)
    above = bisect.bisect_left(sizes, flops)
    if above in (0, len(sizes)):
        return points[sizes[min(above, len(sizes) - 1)]][1]
    low, high = sizes[above - 1], sizes[above]
    weight = math.log(flops / low) / math.log(high / low)
    return math.pow(points[low][1], 1 - weight) * math.pow(points[high][1], weight)
