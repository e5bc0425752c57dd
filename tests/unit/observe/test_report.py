"""plot_loss: the figure holds what metrics.jsonl holds."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from megacomposer.observe.metrics import MetricsWriter
from megacomposer.observe.report import plot_loss


def write_run(run_dir: Path) -> None:
    with MetricsWriter(run_dir) as writer:
        writer.write(0, {"eval/loss": 5.5})
        for step in range(1, 11):
            loss = math.nan if step == 4 else 5.0 - 0.2 * step
            writer.write(step, {"train/loss": loss, "optim/lr": 0.001 * step})
            if step % 5 == 0:
                writer.write(step, {"eval/loss": 5.1 - 0.2 * step})


def test_figure_that_leaves_out_or_invents_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: object, **keywords: object) -> None:
        drawn.append(figure)
        save(figure, *arguments, **keywords)

    monkeypatch.setattr(Figure, "savefig", keep)
    write_run(tmp_path)
    path = plot_loss(tmp_path, bigram_nats_per_token=2.5)
    assert path == tmp_path / "report" / "loss.png"
    height, width, _ = image.imread(path).shape
    assert (width, height) == (1200, 825)
    (figure,) = drawn
    loss_axes, lr_axes = figure.axes
    train, held_out, baseline = loss_axes.get_lines()
    assert list(train.get_xdata()) == list(range(1, 11))
    assert math.isnan(train.get_ydata()[3])
    assert train.get_ydata()[-1] == 3.0
    assert list(held_out.get_xdata()) == [0, 5, 10]
    assert set(baseline.get_ydata()) == {2.5}
    assert loss_axes.get_ylabel() == "loss (nats per token)"
    labels = [text.get_text() for text in loss_axes.get_legend().get_texts()]
    assert labels == ["train", "held-out", "byte bigram 2.500"]
    assert (lr_axes.get_ylabel(), lr_axes.get_xlabel()) == ("learning rate", "step")
    assert list(lr_axes.get_lines()[0].get_ydata()) == [0.001 * step for step in range(1, 11)]
    assert "train 3.000 at step 10, held-out 3.100 at step 10" in loss_axes.get_title(loc="left")


def test_run_without_evaluation_or_learning_rate_that_cannot_be_drawn(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 3.0})
        writer.write(2, {"train/loss": math.inf})
    assert plot_loss(tmp_path).stat().st_size > 0


def test_run_without_loss_that_draws_an_empty_figure(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": math.nan, "optim/lr": 0.1})
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no finite train/loss"):
        plot_loss(tmp_path)
    assert not (tmp_path / "report").exists()


def test_missing_matplotlib_that_is_answered_with_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python does for "not installed"
    with pytest.raises(ValueError, match=re.escape("pip install megacomposer[plot]")):
        plot_loss(tmp_path)
