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
    "frozen tokens": Case(tokens=(700, 900), parts=2, frozen=("x",), **BF16),
    "frozen experts": Case(tokens=(700, 900), frozen=("gate_up", "down"), **BF16),
}
SEEDS = [2, 3, 2]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[dict[str, Any]]]]:
    return run_distributed(on_gpus, 2, list(CASES.values()), SEEDS, init_process_group=False)


@pytest.mark.parametrize("transport", ["collective", "peer"])
@pytest.mark.parametrize("name", CASES)
def test_layer_over_gpus_differs_from_that_of_one(
    ranks: list[dict[str, list[dict[str, Any]]]], name: str, transport: str
) -> None:
    tolerance = 1e-5 if CASES[name].dtype == torch.float32 else 2e-2
    for index, seed in enumerate(SEEDS, start=list(CASES).index(name) * len(SEEDS)):
        for key, expected in on_one_rank(CASES[name], seed).items():
            got = torch.cat([rank[transport][index][key] for rank in ranks]).double()
            assert torch.isfinite(got).all()
            assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_transport_or_repetition_changes_a_bit(
    ranks: list[dict[str, list[dict[str, Any]]]], name: str
) -> None:
    first = list(CASES).index(name) * len(SEEDS)
    repeated = first + len(SEEDS) - 1
    for rank in ranks:
        expected = rank["collective"][first]
        for found in (rank["collective"][repeated], rank["peer"][first], rank["peer"][repeated]):
            for key in expected.keys() - {"sent", "pairs"}:
                assert torch.equal(found[key], expected[key]), key
