"""Gradients, isolation, faults and precision of the real model on four ranks against one rank.

Every case runs in one job of four ranks and one job of one: importing megatron-core takes seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from parallel_cases import balance, break_step, gradients, leaks, starve
from parallel_model import GQA, LENGTH, MLA, SEQUENCES, start_cpu_process
from runner import run_distributed

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout

RANKS = 4
TOLERANCE = 1e-5
"""Largest error of a gradient element, relative to the parameter's largest one; float32."""

DENSE = dataclasses.replace(MLA, num_experts=0, router_bias_update_rate=0.0)
TP2 = MeshConfig(tp=2, ep=2)
MODELS = {"mla": MLA, "gqa": GQA}
GRADIENT_CASES = {
    "tp2 ep2": TP2,
    "ep4": MeshConfig(ep=4),
    "cp2": MeshConfig(cp=2),
    "dense 2 x 2, experts 2 x 2": MeshConfig(dense_shard=2, expert_shard=2),
    "ep2, dense 1 x 4, experts replicated": MeshConfig(ep=2, expert_shard=1),
    "tp2 cp2 ep4, dense replicated": MeshConfig(tp=2, cp=2, ep=4, dense_shard=1),
}
LEAK_CASES = {
    "dense cp2": (DENSE, MeshConfig(cp=2)),
    "mla cp2 ep4": (MLA, MeshConfig(cp=2, ep=4)),
    "mla tp2 ep2": (MLA, TP2),
    "gqa cp2": (GQA, MeshConfig(cp=2)),
}
LEAK_CASES_OF_ONE = {
    "dense": (DENSE, MeshConfig()),
    "mla": (MLA, MeshConfig()),
    "gqa": (GQA, MeshConfig()),
}
STARVED_CASES = {"ep2": MeshConfig(ep=2), "ep4": MeshConfig(ep=4)}
# Layout, what breaks, and the one rank on which it does.
FAULT_CASES = {
    "loss of a data rank": (MeshConfig(ep=4), "loss", 2),
    "loss of a tensor rank": (TP2, "loss", 1),
    "one element of a rank's expert gradient": (MeshConfig(ep=4), "expert gradient", 3),
}
# Parts of the models whose gradients each take another path over the ranks.
PARTS = {
    "mla": [
        "embedding.word_embeddings",
        "output_layer",
        "linear_q_down_proj",
        "q_layernorm",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "kv_layernorm",
        "linear_kv_up_proj",
        "linear_proj",
        "input_layernorm",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "router",
        "experts.gate_up",
        "experts.down",
        "shared_experts.linear_fc1",
        "shared_experts.linear_fc2",
        "decoder.final_layernorm",
        "mtp.0.enorm",
        "mtp.0.hnorm",
        "mtp.0.eh_proj",
        "mtp.1.eh_proj",
        "mtp.1.final_layernorm",
    ],
    "gqa": [
        "embedding.word_embeddings",
        "linear_qkv",
        "q_layernorm",
        "k_layernorm",
        "linear_proj",
        "router",
        "experts.gate_up",
        "experts.down",
        "input_layernorm",
        "decoder.final_layernorm",
    ],
}


def cases_of_four() -> dict[str, Any]:
    """Everything that four ranks do, on this rank."""
    recomputed = dataclasses.replace(MLA, recompute="full")
    half = dataclasses.replace(MLA, dtype="bf16")
    with start_cpu_process() as process:
        return {
            "gradients": {
                (model, name): gradients(process, config, mesh)
                for model, config in MODELS.items()
                for name, mesh in GRADIENT_CASES.items()
            },
            "recomputed": gradients(process, recomputed, TP2),
            "bf16": gradients(process, half, TP2),
            "leaks": {name: leaks(process, *case) for name, case in LEAK_CASES.items()},
            "starved": {name: starve(process, mesh) for name, mesh in STARVED_CASES.items()},
            "faults": {name: break_step(process, *case) for name, case in FAULT_CASES.items()},
            "balance": balance(process, TP2),
        }


def cases_of_one() -> dict[str, Any]:
    """Everything that one rank does: the references."""
    with start_cpu_process() as process:
        return {
            "gradients": {
                model: gradients(process, config, MeshConfig()) for model, config in MODELS.items()
            },
            "leaks": {name: leaks(process, *case) for name, case in LEAK_CASES_OF_ONE.items()},
        }


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_distributed(cases_of_one, 1, init_process_group=False, timeout_s=600.0)[0]


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_distributed(cases_of_four, RANKS, init_process_group=False, timeout_s=900.0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradient_depends_on_the_layout(
    one: dict[str, Any], four: list[dict[str, Any]], model: str, case: str
) -> None:
    expected = one["gradients"][model]["gradients"]
    found = four[0]["gradients"][model, case]["gradients"]
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("model", MODELS)
def test_gradient_of_a_part_is_zero_or_not_compared(one: dict[str, Any], model: str) -> None:
    gradients = one["gradients"][model]["gradients"]
    for part in PARTS[model]:
        names = [name for name in gradients if f"{part}." in f"{name}."]
        assert names, part
        for name in names:
            assert float(gradients[name].abs().max()) > 1e-5, name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_report_of_a_step_depends_on_the_layout_or_the_rank(
    one: dict[str, Any], four: list[dict[str, Any]], model: str, case: str
) -> None:
    expected = one["gradients"][model]["result"]
    results = [rank["gradients"][model, case]["result"] for rank in four]
    assert all(result == results[0] for result in results)
    for name in ("loss", "mtp_loss", "grad_norm", "num_tokens", "skipped"):
        assert results[0][name] == pytest.approx(expected[name], rel=1e-6), name
    assert results[0]["balance"] == pytest.approx(expected["balance"], rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_norm_counts_an_element_twice_or_never(
    four: list[dict[str, Any]], model: str, case: str
) -> None:
    outcome = four[0]["gradients"][model, case]
    squares = sum(float(value.double().square().sum()) for value in outcome["gradients"].values())
    assert outcome["result"]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_held_out_loss_differs_from_the_training_loss_of_the_same_batches(
    four: list[dict[str, Any]], model: str, case: str
) -> None:
    outcome = four[0]["gradients"][model, case]
    assert outcome["held_out"] == pytest.approx(outcome["result"]["loss"], rel=1e-6)


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_process_groups_differ_from_the_layouts_arithmetic(
    four: list[dict[str, Any]], case: str
) -> None:
    layouts = [
        Layout(GRADIENT_CASES[case], world_size=RANKS, rank=rank, device_type="cpu")
        for rank in range(RANKS)
    ]
    keys = {
        "tp": lambda x: (x.dp_rank, x.cp_rank),
        "cp": lambda x: (x.dp_rank, x.tp_rank),
        "dp_cp": lambda x: x.tp_rank,
        "ep": lambda x: (x.expert_replicate_rank, x.expert_shard_rank),
        "dense_shard": lambda x: (x.tp_rank, x.dense_replicate_rank),
        "dense_replicate": lambda x: (x.tp_rank, x.dense_shard_rank),
        "expert_shard": lambda x: (x.ep_rank, x.expert_replicate_rank),
        "expert_replicate": lambda x: (x.ep_rank, x.expert_shard_rank),
    }
    for own, outcome in zip(layouts, four, strict=True):
        for name, ranks in outcome["gradients"]["mla", case]["groups"].items():
            same = [x.rank for x in layouts if keys[name](x) == keys[name](own)]
            assert ranks == same, (name, own.rank)


def leak_outcomes(one: dict[str, Any], four: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Outcome of each rank, by case."""
    outcomes = {name: [outcome] for name, outcome in one["leaks"].items()}
    return outcomes | {name: [rank["leaks"][name] for rank in four] for name in LEAK_CASES}


@pytest.mark.parametrize("case", [*LEAK_CASES_OF_ONE, *LEAK_CASES])
def test_document_sees_another_one(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    outcomes = leak_outcomes(one, four)[case]
    assert any(bool(outcome["changed"].any()) for outcome in outcomes)
    for outcome in outcomes:
        before, after, changed = outcome["before"], outcome["after"], outcome["changed"]
        others = (after - before)[:, ~changed].abs().max()
        # Experts multiply other numbers of rows together, which may round a row differently.
        assert float(others) <= (0.0 if case.startswith("dense") else 1e-6)
        if bool(changed.any()):
            assert float((after - before)[0, changed].abs().max()) > 1e-3


@pytest.mark.parametrize("case", [*LEAK_CASES_OF_ONE, "mla tp2 ep2"])
def test_loss_of_a_document_depends_on_its_place_in_the_row(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    for outcome in leak_outcomes(one, four)[case]:
        first, second = outcome["twins"].split(LENGTH, dim=1)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", STARVED_CASES)
def test_rank_whose_experts_get_no_token_hangs_or_has_no_gradient(
    four: list[dict[str, Any]], case: str
) -> None:
    for rank in four:
        outcome = rank["starved"][case]
        result = outcome["result"]
        assert not result["skipped"]
        assert result["loss"] == result["loss"] < 10
        # Two of eight experts take everything.
        assert result["balance"]["train/expert_load_max_over_mean"] == pytest.approx(4.0)
        assert result["balance"]["train/expert_load_min_over_mean"] == 0.0
        sums = {name: float(grad.abs().sum()) for name, grad in outcome["gradients"].items()}
        assert len(sums) == 2 * 3  # gate_up and down of one decoder and two MTP layers
        if outcome["ep_rank"] > 0:
            assert set(sums.values()) == {0.0}
    busy = [rank["starved"][case] for rank in four if rank["starved"][case]["ep_rank"] == 0]
    for name in busy[0]["gradients"]:
        assert sum(float(outcome["gradients"][name].abs().sum()) for outcome in busy) > 0, name


@pytest.mark.parametrize("case", FAULT_CASES)
def test_gradient_that_is_not_finite_on_one_rank_moves_some_ranks(
    four: list[dict[str, Any]], case: str
) -> None:
    for rank in four:
        outcome = rank["faults"][case]
        assert outcome["skipped"] == [False, True, False]
        first, broken, last = outcome["norms"]
        assert 0 < first < 100
        assert 0 < last < 100
        assert not abs(broken) < float("inf")
        assert outcome["changed"] == []
        assert any(name.endswith("expert_bias") for name in outcome["kinds"])
        assert any(name.startswith("optim/") for name in outcome["kinds"])
        # What the comparison above saw can change at all.
        assert len(outcome["moved"]) > len(outcome["kinds"]) * 0.8


def test_recomputation_changes_the_loss_or_a_gradient(four: list[dict[str, Any]]) -> None:
    kept, recomputed = four[0]["gradients"]["mla", "tp2 ep2"], four[0]["recomputed"]
    assert recomputed["result"] == kept["result"]
    for name, value in kept["gradients"].items():
        assert torch.equal(recomputed["gradients"][name], value), name


def test_bf16_computes_in_float32_or_trains_bf16_weights(four: list[dict[str, Any]]) -> None:
    exact = four[0]["gradients"]["mla", "tp2 ep2"]
    assert exact["dtypes"]["output"] == exact["dtypes"]["experts"] == torch.float32
    for rank in four:
        assert rank["bf16"]["dtypes"] == {
            "output": torch.bfloat16,
            "experts": torch.bfloat16,
            "master": {torch.float32},
        }
    half = four[0]["bf16"]
    assert half["result"]["loss"] == pytest.approx(exact["result"]["loss"], rel=5e-3)
    assert half["result"]["loss"] != exact["result"]["loss"]
    assert half["result"]["grad_norm"] == pytest.approx(exact["result"]["grad_norm"], rel=5e-2)
    for name, value in half["gradients"].items():
        assert value.dtype == torch.float32, name


def test_router_bias_moves_away_from_balance_or_ranks_disagree(
    four: list[dict[str, Any]],
) -> None:
    outcomes = [rank["balance"] for rank in four]
    assert len(outcomes[0]["counts"]) == 3
    for name in outcomes[0]["counts"]:
        total = sum(outcome["counts"][name] for outcome in outcomes)
        assert int(total.sum()) == SEQUENCES * LENGTH * MLA.experts_per_token
        expected = MLA.router_bias_update_rate * torch.sign(total.mean() - total)
        assert bool(expected.any())
        for outcome in outcomes:
            assert torch.equal(outcome["biases"][name], expected)
            assert torch.equal(outcome["biases after a skipped step"][name], expected)
    for outcome in outcomes:
        assert outcome["metrics"] == outcomes[0]["metrics"]
        assert not any(bool(count.any()) for count in outcome["cleared"].values())
