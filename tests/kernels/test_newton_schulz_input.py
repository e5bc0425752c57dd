"""The input passes of Newton-Schulz on the CPU: torch and interpreted Triton."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels.newton_schulz_input import power_of_two_scale


def test_torch_and_triton_agree_with_the_formulas(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("newton_schulz_input_cases.py")


@pytest.mark.parametrize(
    ("amax", "k"),
    [
        (1.0, 14),
        (1.999, 14),
        (2.0, 13),
        (0.5, 15),
        (2.0**-149, 126),
        (2.0**-112, 126),
        (2.0**-111, 125),
        (2.0**127, -113),
        (0.0, 0),
        (math.inf, 0),
        (math.nan, 0),
    ],
)
def test_scale_is_the_power_of_two_of_the_rule(amax: float, k: int) -> None:
    assert power_of_two_scale(torch.tensor([amax])).tolist() == [2.0**k]
