"""A progress bar for a person who watches; silent in files, pipes and batch jobs."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any


class ProgressBar:
    """Counts units of work; shows them when there is somebody to see it."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        self._show = show

    @property
    def visible(self) -> bool:
        return self._show is not None

    def advance(self, **fields: Any) -> None:
        """One unit is done; `fields` replace the text beside the bar (floats to 4 digits)."""
        if self._show is not None:
            self._show("  ".join(f"{name} {_short(value)}" for name, value in fields.items()))


@contextlib.contextmanager
def progress_bar(
    total: int, enabled: bool, *, completed: int = 0, unit: str = "step"
) -> Iterator[ProgressBar]:
    """A bar over `total` units of which `completed` are done, e.g. by the run that is resumed.

    It is drawn only if `enabled` (pass False on every rank but 0), stderr is a terminal and rich is
    installed; otherwise `advance` does nothing.
    """
    if not (enabled and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield ProgressBar(None)
        return

    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn(unit),
        rich.progress.MofNCompleteColumn(),
        rich.progress.BarColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[text]}", markup=False),
    )
    progress = rich.progress.Progress(
        *columns,
        console=rich.console.Console(file=sys.stderr),
        redirect_stdout=sys.stdout.isatty(),  # what is piped elsewhere must arrive there
    )
    with progress:
        task = progress.add_task(unit, total=total, completed=completed, text="")
        yield ProgressBar(lambda text: progress.update(task, advance=1, text=text))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
