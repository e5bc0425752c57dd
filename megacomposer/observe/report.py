"""Figures of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacomposer.observe.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = tuple[list[int], list[float]]
"""Steps, and a value at each."""

# One hue per thing shown; told apart in greyscale by shape and dash as well.
_TRAIN_COLOR = "#2a6fbb"
_EVAL_COLOR = "#c2410c"
_BASELINE_COLOR = "#555555"
_GRID_COLOR = "#dddddd"


def plot_loss(run_dir: Path, *, bigram_nats_per_token: float | None = None) -> Path:
    """Draws `report/loss.png` in the run directory and returns its path.

    Above: training loss (line) and held-out loss (points) in nats per token over steps, and, if
    given, the cross entropy of a byte-bigram model of the same data (dashed). That baseline is
    comparable where a token is a byte, or once converted to nats per token. Below: learning rate.

    Raises ValueError if metrics.jsonl is missing or has no `train/loss`, or without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ValueError("figures need matplotlib; pip install megacomposer[plot]") from error

    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    train = _series(records, "train/loss")
    if not any(map(math.isfinite, train[1])):
        raise ValueError(f"{run_dir / 'metrics.jsonl'} has no finite train/loss to draw")

    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # Agg: no display needed
    grid = figure.add_gridspec(2, 1, height_ratios=[3.2, 1])
    loss_axes = figure.add_subplot(grid[0])
    lr_axes = figure.add_subplot(grid[1], sharex=loss_axes)

    held_out = _series(records, "eval/loss")
    _draw_losses(loss_axes, train, held_out, bigram_nats_per_token)
    loss_axes.set_title(_title(run_dir, train, held_out), loc="left", fontsize=11)
    lr_axes.plot(*_series(records, "optim/lr"), color=_TRAIN_COLOR, linewidth=1.4)
    lr_axes.set_ylabel("learning rate")
    lr_axes.set_ylim(bottom=0)
    lr_axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    lr_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    lr_axes.set_xlabel("step")
    lr_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, lr_axes):
        axes.grid(color=_GRID_COLOR, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels()

    path = run_dir / "report" / "loss.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw_losses(axes: Axes, train: Series, held_out: Series, bigram: float | None) -> None:
    axes.plot(*train, color=_TRAIN_COLOR, linewidth=1.4, label="train")
    if held_out[0]:
        points: dict[str, Any] = {
            "linestyle": "none",
            "marker": "o",
            "markersize": 5,
            "markeredgecolor": "white",
        }
        axes.plot(*held_out, color=_EVAL_COLOR, label="held-out", **points)
    if bigram is not None:
        dashed: dict[str, Any] = {"linestyle": (0, (5, 3)), "linewidth": 1.2}
        axes.axhline(bigram, color=_BASELINE_COLOR, label=f"byte bigram {bigram:.3f}", **dashed)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False, loc="upper right")
    axes.tick_params(labelbottom=False)


def _series(records: list[dict[str, Any]], name: str) -> Series:
    """Steps and values of the lines that report `name`; null is NaN, which leaves a gap."""
    points = [(r["step"], math.nan if r[name] is None else r[name]) for r in records if name in r]
    return [step for step, _ in points], [value for _, value in points]


def _title(run_dir: Path, train: Series, held_out: Series) -> str:
    title = f"{run_dir.resolve().name}: train {train[1][-1]:.3f} at step {train[0][-1]}"
    if held_out[0]:
        title += f", held-out {held_out[1][-1]:.3f} at step {held_out[0][-1]}"
    return title
