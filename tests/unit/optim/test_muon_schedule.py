from __future__ import annotations

from collections.abc import Iterator

import pytest

from megacomposer.optim.muon_schedule import run_tasks


def events(tasks: int, fillers: int, buffers: int) -> list[tuple[str, int]]:
    """What happens, in order."""
    seen: list[tuple[str, int]] = []

    def task(number: int) -> Iterator[None]:
        seen.append(("gather", number))
        yield
        seen.append(("scatter", number))
        yield
        seen.append(("end", number))

    fill = [lambda number=number: seen.append(("fill", number)) for number in range(fillers)]
    run_tasks([task(number) for number in range(tasks)], fill, buffers)  # type: ignore[misc]
    return seen


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 7])
def test_step_skips_something_or_holds_too_many_buffers(tasks: int, buffers: int) -> None:
    seen = events(tasks, 5, buffers)
    for event, count in (("gather", tasks), ("scatter", tasks), ("end", tasks), ("fill", 5)):
        assert [n for name, n in seen if name == event] == list(range(count))
    held = 0
    for event, _ in seen:
        held += {"gather": 1, "end": -1}.get(event, 0)
        assert held <= buffers


@pytest.mark.parametrize("buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
def test_last_exchange_is_waited_for_before_the_last_filler(tasks: int, buffers: int) -> None:
    seen = events(tasks, tasks + 1, buffers)
    assert seen.index(("fill", tasks)) < seen.index(("end", tasks - 1))


@pytest.mark.parametrize(("tasks", "buffers"), [(2, 2), (3, 3), (7, 3), (7, 4)])
def test_results_are_waited_for_before_the_next_exchange_is_computed(
    tasks: int, buffers: int
) -> None:
    seen = events(tasks, 0, buffers)
    for number in range(tasks - 1):
        assert seen.index(("scatter", number + 1)) < seen.index(("end", number))


@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
def test_order_of_collectives_depends_on_work_that_only_one_rank_has(tasks: int) -> None:
    orders = [
        [entry for entry in events(tasks, fillers, 3) if entry[0] in ("gather", "scatter")]
        for fillers in (0, 1, 20)
    ]
    assert orders[0] == orders[1] == orders[2]
