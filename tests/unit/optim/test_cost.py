"""The cost of a matrix: the formulas, the measured table, and what lies between its rows."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from megacomposer.kernels.newton_schulz import _segments, step_coefficients
from megacomposer.optim.cost import (
    MEASURED,
    UNMEASURED_FLOPS_PER_S,
    MeasuredShape,
    measured_table,
    newton_schulz_cost_s,
    newton_schulz_flops,
    table_from_rows,
)

TABLE = table_from_rows(
    [
        {"rows": 128, "columns": 512, "batch": 64, "ms": 0.64},
        {"rows": 1024, "columns": 4096, "batch": 8, "ms": 4.0},
        {"rows": 1024, "columns": 4096, "batch": 1, "ms": 1.0},
    ]
)


@pytest.mark.parametrize(
    ("steps", "square_long", "cubic"), [(1, 3, 1), (2, 3, 5), (3, 6, 6), (5, 6, 14), (10, 12, 28)]
)
def test_formula_counts_another_number_of_products(
    steps: int, square_long: int, cubic: int
) -> None:
    m, n = 3, 7
    expected = square_long * m**2 * n + cubic * m**3
    assert newton_schulz_flops(m, n, steps) == expected
    assert newton_schulz_flops(n, m, steps) == expected


def gram_products(steps: int) -> tuple[int, int]:
    """Products with the long side, a triangle as one, and triangles of m x m, step by step."""
    long, cubic = 0, 0
    starts = [0, *range(2, steps, 3)]
    for step in range(steps):
        first, last = step in starts, step + 1 in (*starts, steps)
        long += first  # R = X X^T, a triangle
        long += 2 * last  # X <- Q X, all of it
        cubic += 1  # R^2
        cubic += not first  # Q Z
        cubic += 2 * (not last)  # R <- Z R Z
    return long, cubic


@pytest.mark.parametrize("steps", range(1, 12))
def test_general_formula_differs_from_walking_through_the_steps(steps: int) -> None:
    long, cubic = gram_products(steps)
    assert newton_schulz_flops(2, 5, steps) == long * 4 * 5 + cubic * 8


def test_measured_shape_costs_its_share_of_the_largest_batch() -> None:
    assert newton_schulz_cost_s(1024, 4096, steps=5, table=TABLE) == pytest.approx(0.5e-3)
    assert newton_schulz_cost_s(4096, 1024, steps=5, table=TABLE) == pytest.approx(0.5e-3)
    ratio = newton_schulz_flops(1024, 4096, 3) / newton_schulz_flops(1024, 4096, 5)
    assert newton_schulz_cost_s(1024, 4096, steps=3, table=TABLE) == pytest.approx(0.5e-3 * ratio)


def test_own_orientation_is_preferred_to_the_transpose() -> None:
    table = (*TABLE, MeasuredShape(rows=4096, columns=1024, batch=4, ms=4.0))
    assert newton_schulz_cost_s(4096, 1024, steps=5, table=table) == pytest.approx(1e-3)
    assert newton_schulz_cost_s(1024, 4096, steps=5, table=table) == pytest.approx(0.5e-3)


def rate(rows: int, columns: int) -> float:
    cost = newton_schulz_cost_s(rows, columns, steps=5, table=TABLE)
    return newton_schulz_flops(rows, columns, 5) / cost


def test_shape_between_measured_ones_runs_at_a_rate_between_theirs() -> None:
    small, large = rate(128, 512), rate(1024, 4096)
    assert small < large
    assert rate(64, 256) == pytest.approx(small)
    assert rate(4096, 4096) == pytest.approx(large)
    # same aspect: the geometric middle of the FLOPs is that of the sides
    side = math.isqrt(128 * 1024)
    assert rate(side, 4 * side) == pytest.approx(math.sqrt(small * large), rel=1e-2)
    rates = [rate(rows, 4 * rows) for rows in range(128, 1025, 64)]
    assert rates == sorted(rates)


def test_without_measurements_cost_is_flops_at_the_assumed_rate() -> None:
    cost = newton_schulz_cost_s(2048, 7168, steps=5, table=())
    assert cost == newton_schulz_flops(2048, 7168, 5) / UNMEASURED_FLOPS_PER_S
    assert newton_schulz_flops(2048, 7168, 5) == pytest.approx(300.6e9, rel=1e-3)


def test_table_of_the_package_is_readable_and_plausible() -> None:
    assert json.loads(MEASURED.read_text()) == [
        {"rows": row.rows, "columns": row.columns, "batch": row.batch, "ms": row.ms}
        for row in measured_table()
    ]
    shapes = [(2048, 7168), (7168, 128), (192, 1536), (7168, 18432)]
    costs = [newton_schulz_cost_s(*shape, steps=5) for shape in shapes]
    for shape, cost in zip(shapes, costs, strict=True):
        achieved = newton_schulz_flops(*shape, 5) / cost
        assert 1e12 < achieved < 990e12, (shape, achieved)  # the dense float16 peak of an H200
    by_flops = sorted(shapes, key=lambda shape: newton_schulz_flops(*shape, 5))
    ordered = [costs[shapes.index(shape)] for shape in by_flops]
    assert all(low < high for low, high in itertools.pairwise(ordered))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"rows": 1, "columns": 2, "ms": 1.0}, r"lacks \['batch'\]"),
        ({"rows": 0, "columns": 2, "batch": 1, "ms": 1.0}, "rows = 0"),
        ({"rows": 1, "columns": 2, "batch": 1, "ms": float("nan")}, "ms = nan"),
    ],
)
def test_bad_row_is_refused_with_its_field(row: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table_from_rows([row])


@pytest.mark.parametrize("steps", range(1, 12))
def test_formula_restarts_elsewhere_than_the_kernel(steps: int) -> None:
    segments = _segments("kj", step_coefficients("kj", steps), torch.float16)
    m, n = 3, 7
    cubic = sum(4 * len(segment) - 3 for segment in segments)
    expected = 3 * len(segments) * m**2 * n + cubic * m**3
    assert newton_schulz_flops(m, n, steps) == expected
