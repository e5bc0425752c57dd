"""Gradients, isolation, faults and precision of the real model on four ranks against one rank.

Every case runs in one job of four ranks and one job of one: importing megatron-core takes seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_cases import break_steps, examine, of_megatron_core, replay
from parallel_model import GQA, LENGTH, MLA, SEQUENCES, VOCABULARY, start_cpu_process

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from runner import run_distributed

RANKS = 4
TOLERANCE = 1e-5
"""Largest error of a gradient element, relative to the parameter's largest one; float32."""

DENSE = dataclasses.replace(MLA, num_experts=0, router_bias_update_rate=0.0)
TP2 = MeshConfig(tp=2, ep=2)
MODELS = {"mla": MLA, "gqa": GQA, "dense": DENSE}
CASES = {
    "mla, tp2 ep2": (MLA, TP2),
    "mla, ep4": (MLA, MeshConfig(ep=4)),
    "mla, ep2, tokens in 3 parts": (
        dataclasses.replace(MLA, moe_exchange_parts=3),
        MeshConfig(ep=2),
    ),
    "mla, cp2": (MLA, MeshConfig(cp=2)),
    "mla, dense 2 x 2, experts 2 x 2": (MLA, MeshConfig(dense_shard=2, expert_shard=2)),
    "mla, ep2, experts replicated": (MLA, MeshConfig(ep=2, expert_shard=1)),
    "mla, tp2 cp2 ep4, dense replicated": (MLA, MeshConfig(tp=2, cp=2, ep=4, dense_shard=1)),
    "gqa, tp2 ep2": (GQA, TP2),
    "gqa, cp2 ep2": (GQA, MeshConfig(cp=2, ep=2)),
    "gqa, dense 2 x 2, experts 4 wide": (GQA, MeshConfig(dense_shard=2)),
    "dense, cp2": (DENSE, MeshConfig(cp=2)),
}
ROUTING_CASES = ["mla, tp2 ep2", "mla, ep4"]
# Scores of a model that was not trained are close to each other, so the filter must be strict.
STRICT_MLA = dataclasses.replace(MLA, router_replay_threshold=0.9)
STRICT_GQA = dataclasses.replace(GQA, router_replay_threshold=0.9, router_z_loss_coeff=0.1)
REPLAY_CASES = {
    "mla, tp2 ep2, recomputed": (dataclasses.replace(STRICT_MLA, recompute="full"), TP2),
    "mla, tp2 cp2 ep4": (STRICT_MLA, MeshConfig(tp=2, cp=2, ep=4)),
    "gqa, cp2": (STRICT_GQA, MeshConfig(cp=2)),
}
# Layout, and what breaks on which one rank in one step each.
FAULT_CASES = {
    "tensor rank": (TP2, [("loss", 1)]),
    "expert rank": (MeshConfig(ep=4), [("loss", 2), ("expert gradient", 3)]),
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

# Ranks that agree in these are one group.
GROUPS: dict[str, Callable[[Layout], Any]] = {
    "tp": lambda x: (x.dp_rank, x.cp_rank),
    "cp": lambda x: (x.dp_rank, x.tp_rank),
    "dp_cp": lambda x: x.tp_rank,
    "ep": lambda x: (x.expert_replicate_rank, x.expert_shard_rank),
    "dense_shard": lambda x: (x.tp_rank, x.dense_replicate_rank),
    "dense_replicate": lambda x: (x.tp_rank, x.dense_shard_rank),
    "expert_shard": lambda x: (x.ep_rank, x.expert_replicate_rank),
    "expert_replicate": lambda x: (x.ep_rank, x.expert_shard_rank),
}


def cases_of_four() -> dict[str, Any]:
    """Everything that four ranks do, on this rank."""
    recomputed = dataclasses.replace(MLA, recompute="full")
    half = dataclasses.replace(MLA, dtype="bf16")
    with start_cpu_process() as process:
        return {
            **{
                name: examine(process, *case, routing=name in ROUTING_CASES)
                for name, case in CASES.items()
            },
            "recomputed": examine(process, recomputed, TP2),
            "megatron": of_megatron_core(process),
            "bf16": examine(process, half, TP2),
            "replay": {name: replay(process, *case) for name, case in REPLAY_CASES.items()},
            "faults": {name: break_steps(process, *case) for name, case in FAULT_CASES.items()},
        }


def cases_of_one() -> dict[str, Any]:
    """The same models on one rank: the references."""
    with start_cpu_process() as process:
        return {name: examine(process, config, MeshConfig()) for name, config in MODELS.items()}


def model_of(case: str) -> str:
    return case.partition(",")[0]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_distributed(cases_of_one, 1, init_process_group=False, timeout_s=600.0)[0]


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_distributed(cases_of_four, RANKS, init_process_group=False, timeout_s=900.0)


@pytest.mark.parametrize("case", CASES)
def test_gradient_depends_on_the_layout(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    expected = one[model_of(case)]["gradients"]
    found = four[0][case]["gradients"]
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not wrong


@pytest.mark.parametrize("model", PARTS)
def test_gradient_of_a_part_is_zero_or_not_compared(one: dict[str, Any], model: str) -> None:
    gradients = one[model]["gradients"]
    for part in PARTS[model]:
        names = [name for name in gradients if f"{part}." in f"{name}."]
        assert names, part
        for name in names:
            assert float(gradients[name].abs().max()) > 1e-5, name


@pytest.mark.parametrize("case", CASES)
def test_report_of_a_step_depends_on_the_layout_or_the_rank(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    expected = one[model_of(case)]["result"]
    results = [rank[case]["result"] for rank in four]
    assert all(result == results[0] for result in results)
    assert results[0].keys() == expected.keys()
    for name, value in expected.items():
        close = value if value is None else pytest.approx(value, rel=1e-6)
        assert results[0][name] == close, name


@pytest.mark.parametrize("case", CASES)
def test_norm_counts_an_element_twice_or_never(four: list[dict[str, Any]], case: str) -> None:
    outcome = four[0][case]
    squares = sum(float(value.double().square().sum()) for value in outcome["gradients"].values())
    assert outcome["result"]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_held_out_loss_differs_from_the_training_loss_of_the_same_batches(
    four: list[dict[str, Any]], case: str
) -> None:
    for rank in four:
        assert rank[case]["held_out"] == pytest.approx(rank[case]["result"]["loss"], rel=1e-6)


@pytest.mark.parametrize("case", [*MODELS, *CASES])
def test_evaluation_uses_weights_that_were_gathered_before_they_changed(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    outcomes = [one[case]] if case in one else [rank[case] for rank in four]
    for outcome in outcomes:
        # Without weights every token of the vocabulary is as likely.
        assert outcome["loss of zero weights"] == pytest.approx(math.log(VOCABULARY), rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_process_groups_differ_from_the_layouts_arithmetic(
    four: list[dict[str, Any]], case: str
) -> None:
    layouts = [
        Layout(CASES[case][1], world_size=RANKS, rank=rank, device_type="cpu")
        for rank in range(RANKS)
    ]
    for own, outcome in zip(layouts, four, strict=True):
        for name, ranks in outcome[case]["groups"].items():
            place = GROUPS[name]
            assert ranks == [x.rank for x in layouts if place(x) == place(own)], (name, own.rank)


@pytest.mark.parametrize("case", [*MODELS, *CASES])
def test_document_sees_another_one(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    outcomes = [one[case]["leaks"]] if case in one else [rank[case]["leaks"] for rank in four]
    assert any(bool(outcome["changed"].any()) for outcome in outcomes)
    for outcome in outcomes:
        difference, changed = outcome["after"] - outcome["before"], outcome["changed"]
        # Experts multiply other numbers of rows together, which may round a row differently.
        bound = 0.0 if model_of(case) == "dense" else 1e-6
        assert float(difference[:, ~changed].abs().max()) <= bound
        if bool(changed.any()):
            assert float(difference[0, changed].abs().max()) > 1e-3


@pytest.mark.parametrize("case", [*MODELS, "mla, tp2 ep2"])
def test_loss_of_a_document_depends_on_its_place_in_the_row(
    one: dict[str, Any], four: list[dict[str, Any]], case: str
) -> None:
    outcomes = [one[case]["leaks"]] if case in one else [rank[case]["leaks"] for rank in four]
    for outcome in outcomes:
        first, second = outcome["twins"].split(LENGTH, dim=1)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", ROUTING_CASES)
def test_rank_whose_experts_get_no_token_hangs_or_has_no_gradient(
    four: list[dict[str, Any]], case: str
) -> None:
    outcomes = [rank[case]["starved"] for rank in four]
    for outcome in outcomes:
        result = outcome["result"]
        assert not result["skipped"]
        assert 0 < result["loss"] < 10
        # Two of eight experts take everything.
        assert result["balance"]["train/expert_load_max_over_mean"] == pytest.approx(4.0)
        assert result["balance"]["train/expert_load_min_over_mean"] == 0.0
        sums = {name: float(grad.abs().sum()) for name, grad in outcome["gradients"].items()}
        assert len(sums) == 2 * 3  # gate_up and down of one decoder and two MTP layers
        if outcome["ep_rank"] > 0:
            assert set(sums.values()) == {0.0}
    busy = [outcome["gradients"] for outcome in outcomes if outcome["ep_rank"] == 0]
    for name in busy[0]:
        assert sum(float(gradients[name].abs().sum()) for gradients in busy) > 0, name


@pytest.mark.parametrize("case", FAULT_CASES)
def test_gradient_that_is_not_finite_on_one_rank_moves_some_ranks(
    four: list[dict[str, Any]], case: str
) -> None:
    faults = len(FAULT_CASES[case][1])
    for rank in four:
        outcome = rank["faults"][case]
        assert outcome["skipped"] == [False, *[True] * faults, False]
        first, *broken, last = outcome["norms"]
        assert 0 < first < 100
        assert 0 < last < 100
        assert not any(abs(norm) < float("inf") for norm in broken)
        assert outcome["changed"] == []
        # What was compared: weights, moments and biases, and a good step moves them.
        assert any(name.endswith("expert_bias") for name in outcome["names"])
        assert any(name.startswith("optim/") for name in outcome["names"])
        assert len(outcome["moved later"]) > len(outcome["names"]) * 0.8


def test_recomputation_changes_the_loss_or_a_gradient(four: list[dict[str, Any]]) -> None:
    kept, recomputed = four[0]["mla, tp2 ep2"], four[0]["recomputed"]
    assert recomputed["layer forwards"] == 2 * kept["layer forwards"] > 0
    assert recomputed["result"] == kept["result"]
    for name, value in kept["gradients"].items():
        assert torch.equal(recomputed["gradients"][name], value), name


def test_bf16_computes_in_float32_or_trains_bf16_weights(four: list[dict[str, Any]]) -> None:
    exact = four[0]["mla, tp2 ep2"]
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


@pytest.mark.parametrize("case", ROUTING_CASES)
def test_router_bias_moves_away_from_balance_or_ranks_disagree(
    four: list[dict[str, Any]], case: str
) -> None:
    outcomes = [rank[case]["balance"] for rank in four]
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
        for counts in outcome["counts after"]:
            assert not any(bool(count.any()) for count in counts.values())


def test_megatron_cores_layer_computes_something_else(
    one: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    found = four[0]["megatron"]
    assert "'megatron' with mesh.ep 2 needs a GPU" in found["error"]
    for name, value in one["mla"]["gradients"].items():
        error = float((found["gradients"][name] - value).abs().max() / value.abs().max())
        assert error <= TOLERANCE, name
    for name, value in one["mla"]["result"]["balance"].items():
        assert found["result"]["balance"][name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("case", REPLAY_CASES)
def test_replay_of_recorded_experts_changes_a_bit(four: list[dict[str, Any]], case: str) -> None:
    for rank in four:
        own = rank["replay"][case]["own"]
        assert "train/router_replayed_frac" not in own["metrics"]
        for name, share in (("again", 1.0), ("decoder only", None)):
            run = rank["replay"][case][name]
            assert torch.equal(run["ids"], own["ids"])
            assert torch.equal(run["losses"], own["losses"])
            for parameter, gradient in own["gradients"].items():
                assert torch.equal(run["gradients"][parameter], gradient), parameter
            assert run["metrics"]["train/router_substituted_frac"] == 0.0
            if share is not None:
                assert run["metrics"]["train/router_replayed_frac"] == share


@pytest.mark.parametrize("case", REPLAY_CASES)
def test_experts_of_another_router_are_ignored_or_taken_unchecked(
    four: list[dict[str, Any]], case: str
) -> None:
    for rank in four:
        outcome = rank["replay"][case]
        own, given, used = (outcome[name]["ids"] for name in ("own", "perturbed", "filtered"))
        assert torch.equal(used[:, ::4], own[:, ::4])  # where the ids are unknown
        elsewhere = torch.arange(used.shape[1]) % 4 > 0
        replayed = (used[:, elsewhere] == given[:, elsewhere]).all(dim=2)
        differing = (own[:, elsewhere] != given[:, elsewhere]).any(dim=2)
        assert bool((replayed & differing).any()), "no plausible other choice was taken"
        assert bool((~replayed & differing).any()), "no implausible one was replaced"
        metrics = outcome["filtered"]["metrics"]
        assert 0.0 < metrics["train/router_substituted_frac"] < 0.5
        assert 0.5 < metrics["train/router_replayed_frac"] < 0.75
        # The trainer's own router learns from the experts that it was given.
        for name, gradient in outcome["filtered"]["gradients"].items():
            if "router" in name and gradient.numel():
                assert bool(gradient.any())
                assert not torch.equal(gradient, outcome["own"]["gradients"][name])


@pytest.mark.parametrize("case", REPLAY_CASES)
def test_expert_ids_of_another_model_are_taken(four: list[dict[str, Any]], case: str) -> None:
    for rank in four:
        layers, choices, tokens = rank["replay"][case]["errors"]
        assert "do not fit a model of" in layers
        assert "do not fit a model of" in choices
        assert "must be [MoE layers, 32, K]" in tokens
