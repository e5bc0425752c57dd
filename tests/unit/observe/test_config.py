"""ObserveConfig: settings that would do nothing, or something else."""

from __future__ import annotations

from typing import Any

import pytest

from megacomposer.observe.config import ObserveConfig


@pytest.mark.parametrize(
    ("field", "value", "others"),
    [
        ("log_interval_steps", 0, {}),
        ("profile_start_step", -1, {}),
        ("profile_num_steps", -2, {}),
        ("profile_ranks", (), {"profile_num_steps": 1}),
        ("profile_ranks", (0, -1), {}),
    ],
)
def test_setting_that_makes_no_sense_is_accepted(
    field: str, value: Any, others: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=rf"observe\.{field} is"):
        ObserveConfig(**{field: value}, **others)


def test_empty_rank_list_without_profiling_is_refused() -> None:
    assert ObserveConfig(profile_ranks=()).profile_num_steps == 0
