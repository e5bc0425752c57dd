"""The learning rate of a step, as a pure function: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from megacomposer.optim.config import ScheduleConfig


def learning_rate(config: ScheduleConfig, peak_lr: float, step: int, total_steps: int) -> float:
    """The learning rate of update number `step`, counting from 0, in a run of `total_steps`.

    Warm-up is linear from peak / (warmup_steps + 1) at step 0 (no update is wasted on a rate of 0)
    to the peak at step `warmup_steps`. A decay would arrive at min_lr_frac * peak at step
    `total_steps`, one after the last, and stays there beyond.

    Raises:
        ValueError: the warm-up, or warm-up plus decay, does not fit the run; or a negative step.
    """
    warmup_steps = config.warmup_steps
    if step < 0:
        raise ValueError(f"step={step} must be at least 0")
    if warmup_steps >= total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} does not fit a run of {total_steps} steps; "
            "lower schedule.warmup_steps or train longer"
        )
    decay_steps = _decay_steps(config, total_steps)
    if warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and the decay of {decay_steps} steps overlap in a run of "
            f"{total_steps}; lower schedule.warmup_steps or schedule.wsd_decay_frac"
        )
    if step < warmup_steps:
        return peak_lr * (step + 1) / (warmup_steps + 1)
    decay_start = total_steps - decay_steps
    if decay_steps == 0 or step <= decay_start:
        return peak_lr
    progress_frac = min((step - decay_start) / decay_steps, 1.0)
    remaining_frac = _decayed(config, progress_frac)
    return peak_lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * remaining_frac)


def _decay_steps(config: ScheduleConfig, total_steps: int) -> int:
    if config.kind == "constant":
        return 0
    if config.kind == "cosine":
        return total_steps - config.warmup_steps
    return max(1, round(config.wsd_decay_frac * total_steps))


def _decayed(config: ScheduleConfig, progress_frac: float) -> float:
    """What is left of the peak above the minimum, from 1 at progress 0 to 0 at progress 1."""
    if config.kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress_frac))
    if config.wsd_decay_shape == "linear":
        return 1.0 - progress_frac
    return 1.0 - math.sqrt(progress_frac)
