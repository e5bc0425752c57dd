"""The order in which exchanges and local work follow each other: the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

Task = Generator[None, None, None]
"""An exchange: yields once its gather has started, again once its scatter has, then ends."""


def run_tasks(tasks: Sequence[Task], fillers: Sequence[Callable[[], None]], buffers: int) -> None:
    """Runs all tasks, at most `buffers` at a time, and the fillers while exchanges are under way.

    Before one is computed, the gathers of the next have started; where the buffers allow, its
    results are taken in only after the next one is computed. Fillers, which communicate with
    nobody, are spread over the waits; the last of them comes before the last results.
    """
    lag = 1 if buffers >= min(3, len(tasks)) else 0
    waits = len(tasks) + 1
    started = finished = filled = 0
    for current, task in enumerate(tasks):
        while finished < current - lag:
            _finish(tasks[finished])
            finished += 1
        while started < min(len(tasks), finished + buffers):
            next(tasks[started])
            started += 1
        filled = _fill(fillers, filled, -(-len(fillers) * (current + 1) // waits))
        next(task)
    _fill(fillers, filled, len(fillers))
    for task in tasks[finished:]:
        _finish(task)


def _fill(fillers: Sequence[Callable[[], None]], filled: int, end: int) -> int:
    for filler in fillers[filled:end]:
        filler()
    return end


def _finish(task: Task) -> None:
    ended = next(task, "ended")
    assert ended == "ended"
