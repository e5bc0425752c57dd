from __future__ import annotations

import itertools
import math

import pytest

from megacomposer.optim.config import ScheduleConfig
from megacomposer.optim.schedule import learning_rate

PEAK = 3e-4


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_warmup_misses_the_peak_or_wastes_step_zero(kind: str) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=4)
    rates = [learning_rate(config, PEAK, step, 100) for step in range(5)]
    assert rates == pytest.approx([PEAK * k / 5 for k in (1, 2, 3, 4, 5)], rel=1e-12)
    assert rates[4] == PEAK


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
def test_run_without_warmup_starts_below_the_peak(kind: str) -> None:
    assert learning_rate(ScheduleConfig(kind=kind), PEAK, 0, 10) == PEAK


def test_constant_changes_after_warmup() -> None:
    config = ScheduleConfig(kind="constant", warmup_steps=2)
    assert {learning_rate(config, PEAK, step, 10) for step in (2, 5, 9, 10, 1000)} == {PEAK}


def test_cosine_corners_are_off() -> None:
    config = ScheduleConfig(kind="cosine", warmup_steps=10, min_lr_frac=0.1)
    assert learning_rate(config, PEAK, 10, 110) == PEAK
    assert learning_rate(config, PEAK, 60, 110) == pytest.approx(PEAK * 0.55)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(config, PEAK, 35, 110) == pytest.approx(PEAK * quarter)
    assert PEAK * 0.1 < learning_rate(config, PEAK, 109, 110) < PEAK * 0.101
    assert learning_rate(config, PEAK, 110, 110) == pytest.approx(PEAK * 0.1)
    assert learning_rate(config, PEAK, 500, 110) == pytest.approx(PEAK * 0.1)


@pytest.mark.parametrize(
    ("shape", "quarter_left_frac"), [("linear", 0.75), ("sqrt", 1 - math.sqrt(0.25))]
)
def test_wsd_corners_are_off(shape: str, quarter_left_frac: float) -> None:
    config = ScheduleConfig(
        kind="wsd", warmup_steps=5, min_lr_frac=0.2, wsd_decay_frac=0.2, wsd_decay_shape=shape
    )
    assert [learning_rate(config, PEAK, step, 100) for step in (5, 40, 79, 80)] == [PEAK] * 4
    assert learning_rate(config, PEAK, 81, 100) < PEAK
    quarter = 0.2 + 0.8 * quarter_left_frac
    assert learning_rate(config, PEAK, 85, 100) == pytest.approx(PEAK * quarter)
    assert PEAK * 0.2 < learning_rate(config, PEAK, 99, 100) < PEAK * 0.25
    assert learning_rate(config, PEAK, 100, 100) == pytest.approx(PEAK * 0.2)
    assert learning_rate(config, PEAK, 300, 100) == pytest.approx(PEAK * 0.2)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_learning_rate_rises_after_warmup_or_reaches_zero_in_the_run(kind: str, shape: str) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=3, wsd_decay_frac=0.5, wsd_decay_shape=shape)
    rates = [learning_rate(config, PEAK, step, 40) for step in range(40)]
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert min(rates) > 0.0


def test_one_step_run_fails() -> None:
    for kind in ("constant", "cosine", "wsd"):
        assert learning_rate(ScheduleConfig(kind=kind), PEAK, 0, 1) == PEAK


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", [10, 11])
def test_warmup_that_never_ends_is_accepted(kind: str, warmup_steps: int) -> None:
    config = ScheduleConfig(kind=kind, warmup_steps=warmup_steps)
    with pytest.raises(ValueError, match="warmup_steps"):
        learning_rate(config, PEAK, 0, 10)


def test_overlap_of_warmup_and_decay_is_accepted() -> None:
    config = ScheduleConfig(kind="wsd", warmup_steps=6, wsd_decay_frac=0.5)
    with pytest.raises(ValueError, match="overlap"):
        learning_rate(config, PEAK, 0, 10)
    assert learning_rate(config, PEAK, 6, 12) == PEAK


def test_negative_step_is_accepted() -> None:
    with pytest.raises(ValueError, match="step=-1"):
        learning_rate(ScheduleConfig(), PEAK, -1, 10)
