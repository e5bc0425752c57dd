"""The expert layer spread over four gloo ranks against the same layer on one, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_exchange_cases import EXPERTS, Case, on_gloo, on_one_rank

from runner import run_distributed

RANKS = 4
CASES = {
    "even": Case(tokens=(6, 6, 6, 6)),
    "uneven": Case(tokens=(1, 13, 4, 7)),
    "rank without tokens": Case(tokens=(5, 0, 9, 3)),
    "rank without tokens, in parts": Case(tokens=(5, 0, 9, 3), parts=3),
    "ranks whose experts get none": Case(tokens=(4, 3, 2, 5), routing="first four"),
    "all to one expert, in parts": Case(tokens=(4, 3, 2, 5), routing="one", parts=2),
    "more parts than tokens": Case(tokens=(2, 1, 3, 2), parts=5),
    "no tokens at all": Case(tokens=(0, 0, 0, 0), parts=2),
    "frozen tokens": Case(tokens=(5, 0, 9, 3), parts=2, frozen=("x",)),
    "frozen experts": Case(tokens=(5, 0, 9, 3), frozen=("gate_up", "down")),
    "frozen router": Case(tokens=(5, 0, 9, 3), frozen=("gates",)),
}


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_distributed(on_gloo, RANKS, list(CASES.values()))


@pytest.mark.parametrize("name", CASES)
def test_layer_over_ranks_differs_from_that_of_one(
    ranks: list[list[dict[str, Any]]], name: str
) -> None:
    index, exact = list(CASES).index(name), on_one_rank(CASES[name])
    for key, expected in exact.items():
        got = torch.cat([rank[index][key] for rank in ranks])
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_token_travels_more_than_once_to_a_rank(
    ranks: list[list[dict[str, Any]]], name: str
) -> None:
    case, index = CASES[name], list(CASES).index(name)
    ids = case.ids()
    distinct = [len(set(row)) for row in (ids // (EXPERTS // RANKS)).tolist()]
    assert sum(rank[index]["sent"] for rank in ranks) == sum(distinct)
    loads = sum(rank[index]["pairs"] for rank in ranks)
    assert loads.tolist() == torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
