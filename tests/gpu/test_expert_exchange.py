"""The exchange of an expert layer between two GPUs, over NCCL and through peer memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_exchange_cases import Case, on_gpus, on_one_rank

from runner import run_distributed

pytestmark = pytest.mark.multi_gpu
BF16 = {"dtype": torch.bfloat16}
CASES = {
    "small": Case(tokens=(40, 24)),
    "growing": Case(tokens=(700, 900), **BF16),
    "in parts": Case(tokens=(700, 900), parts=4, **BF16),
    "rank without tokens": Case(tokens=(0, 90), parts=2, **BF16),
    "one rank's experts get none": Case(tokens=(64, 31), routing="first four", **BF16),
    "all to one expert": Case(tokens=(300, 200), routing="one", parts=2, **BF16),
}
REPEATS = 3


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[dict[str, Any]]]]:
    return run_distributed(on_gpus, 2, list(CASES.values()), REPEATS, init_process_group=False)


@pytest.mark.parametrize("transport", ["collective", "peer"])
@pytest.mark.parametrize("name", CASES)
def test_layer_over_gpus_differs_from_that_of_one(
    ranks: list[dict[str, list[dict[str, Any]]]], name: str, transport: str
) -> None:
    exact, index = on_one_rank(CASES[name]), list(CASES).index(name) * REPEATS
    tolerance = 1e-5 if CASES[name].dtype == torch.float32 else 2e-2
    for key, expected in exact.items():
        got = torch.cat([rank[transport][index][key] for rank in ranks]).double()
        assert torch.isfinite(got).all()
        assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_transport_or_repetition_changes_a_bit(
    ranks: list[dict[str, list[dict[str, Any]]]], name: str
) -> None:
    index = list(CASES).index(name) * REPEATS
    for rank in ranks:
        first = rank["collective"][index]
        for repeat in range(REPEATS):
            for transport in ("collective", "peer"):
                other = rank[transport][index + repeat]
                for key in ("out", "x", "gate_up", "down", "gates"):
                    assert torch.equal(first[key], other[key]), (transport, repeat, key)
