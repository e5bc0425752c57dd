"""Router: choice, gates, losses and replay, against float64 and megatron-core's TopKRouter."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from megacomposer.kernels.moe_router import (
    RouterRule,
    load_balance_loss,
    probability_sums,
    route,
    z_loss,
)

TOKENS, EXPERTS = 97, 16
SOFTMAX = RouterRule(num_chosen=4, score="softmax", scale=1.5)
SIGMOID = RouterRule(num_chosen=4, score="sigmoid", scale=2.5)
RULES = {
    "softmax": SOFTMAX,
    "sigmoid": SIGMOID,
    "softmax, groups": dataclasses.replace(SOFTMAX, num_groups=4, topk_groups=2),
    "sigmoid, groups": dataclasses.replace(SIGMOID, num_groups=8, topk_groups=3),
    "sigmoid, one": dataclasses.replace(SIGMOID, num_chosen=1),
    "sigmoid, all": dataclasses.replace(SIGMOID, num_chosen=EXPERTS),
}


def logits_of(seed: int, *, tokens: int = TOKENS, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(tokens, EXPERTS, generator=generator)


def bias_of(rule: RouterRule) -> torch.Tensor | None:
    if rule.score == "softmax":
        return None
    # Some larger than any score, some that make the choice score negative.
    return 0.8 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(9))


def choice_scores(
    logits_TE: torch.Tensor, rule: RouterRule, bias_E: torch.Tensor | None
) -> list[list[float]]:
    """float32 scores as Python numbers; the choice compares these."""
    scores = logits_TE if rule.score == "softmax" else torch.sigmoid(logits_TE)
    return (scores if bias_E is None else scores + bias_E).tolist()


def ranking(scores: list[float], rule: RouterRule) -> list[int]:
    """The experts that compete for one token, best first; the first K are the own choice."""
    candidates = list(range(len(scores)))
    if rule.num_groups:
        size = len(scores) // rule.num_groups
        best = [
            sum(sorted(scores[g * size : (g + 1) * size])[-(rule.num_chosen // rule.topk_groups) :])
            for g in range(rule.num_groups)
        ]
        groups = sorted(range(rule.num_groups), key=lambda g: (-best[g], g))[: rule.topk_groups]
        candidates = [e for e in candidates if e // size in groups]
    return sorted(candidates, key=lambda e: (-scores[e], e))


def expected_ids(scores: list[float], rule: RouterRule) -> list[int]:
    """The own choice for one token."""
    return sorted(ranking(scores, rule)[: rule.num_chosen])


@pytest.mark.parametrize("name", RULES)
def test_choice_or_gates_differ_from_the_formula_in_float64(name: str) -> None:
    rule, logits = RULES[name], logits_of(0)
    bias = bias_of(rule)
    routing = route(logits, rule, bias)
    scores = choice_scores(logits, rule, bias)
    for token in range(TOKENS):
        ids = expected_ids(scores[token], rule)
        assert routing.ids_TK[token].tolist() == ids
        exact = [float(logits[token, e]) for e in ids]
        raw = [math.exp(x) if rule.score == "softmax" else 1 / (1 + math.exp(-x)) for x in exact]
        total = sum(raw) if rule.num_chosen > 1 else 1.0
        gates = [rule.scale * value / total for value in raw]
        assert routing.gates_TK[token].tolist() == pytest.approx(gates, rel=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_choice_gates_or_gradient_differ_from_megatron_core(name: str) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    rule, bias = RULES[name], bias_of(RULES[name])
    ours, theirs = (logits_of(1).requires_grad_() for _ in range(2))
    routing = route(ours, rule, bias)
    probs, chosen = topk_routing_with_score_function(
        theirs,
        rule.num_chosen,
        num_groups=rule.num_groups or None,
        group_topk=rule.topk_groups or None,
        scaling_factor=rule.scale,
        score_function=rule.score,
        expert_bias=bias,
    )
    assert torch.equal(torch.zeros_like(chosen).scatter_(1, routing.ids_TK, True), chosen)
    found = torch.zeros_like(probs).scatter(1, routing.ids_TK, routing.gates_TK)
    torch.testing.assert_close(found, probs, rtol=1e-6, atol=0)
    upstream = logits_of(2)
    (found * upstream).sum().backward()
    (probs * upstream).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_differ_from_megatron_cores(score: str) -> None:
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        switch_load_balancing_loss_func,
        z_loss_func,
    )

    rule = {"softmax": SOFTMAX, "sigmoid": SIGMOID}[score]
    ours, theirs = (logits_of(3).requires_grad_() for _ in range(2))
    load = route(ours, rule).ids_TK.flatten().bincount(minlength=EXPERTS).float()
    found = load_balance_loss(probability_sums(ours, rule.score), load / load.sum()) / TOKENS
    found = 0.3 * found + 0.7 * z_loss(ours) / TOKENS
    chosen, scores = compute_routing_scores_for_aux_loss(theirs, rule.num_chosen, score)
    expected = switch_load_balancing_loss_func(
        scores, chosen.sum(dim=0), TOKENS, rule.num_chosen, EXPERTS, 0.3
    ) + z_loss_func(theirs, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    expected.backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["softmax, groups", "sigmoid, groups"])
def test_gradient_of_gates_or_losses_is_not_the_derivative(name: str) -> None:
    rule, bias = RULES[name], bias_of(RULES[name])
    logits = logits_of(4, tokens=5).double().requires_grad_()
    given = route(logits_of(5, tokens=5).double(), rule, bias).ids_TK
    load = torch.rand(EXPERTS, dtype=torch.float64)

    def outputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = probability_sums(x, rule.score)
        replayed = route(x, rule, bias, given).gates_TK
        return route(x, rule, bias).gates_TK, replayed, load_balance_loss(sums, load), z_loss(x)

    assert torch.autograd.gradcheck(outputs, (logits,))


def test_equal_scores_go_to_higher_ids_or_change_with_the_batch() -> None:
    logits = torch.zeros(3000, EXPERTS)
    logits[:, 1::2] = -0.0
    for rule in (SOFTMAX, SIGMOID):
        assert (route(logits, rule).ids_TK == torch.arange(4)).all()
    grouped = route(logits, RULES["sigmoid, groups"]).ids_TK
    assert (grouped == torch.arange(4)).all()
    # Few distinct values, so that most tokens have a tie at the K-th place.
    coarse = logits_of(6, tokens=3000).round()
    for name, rule in RULES.items():
        whole = route(coarse, rule, bias_of(rule))
        parts = [route(part, rule, bias_of(rule)) for part in coarse.split(7)]
        assert torch.equal(whole.ids_TK, torch.cat([part.ids_TK for part in parts])), name
        assert torch.equal(whole.gates_TK, torch.cat([part.gates_TK for part in parts])), name
        scores = choice_scores(coarse[:50], rule, bias_of(rule))
        expected = [expected_ids(row, rule) for row in scores]
        assert whole.ids_TK[:50].tolist() == expected, name


def test_losses_depend_on_how_the_batch_is_cut() -> None:
    """Micro-batches and ranks alike: parts add up, in value and in gradient."""
    logits = logits_of(7, tokens=96)
    load = route(logits, SOFTMAX).ids_TK.flatten().bincount(minlength=EXPERTS).float()

    def run(pieces: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        value = torch.zeros(())
        for part in leaf.split(list(pieces)):
            sums = probability_sums(part, "softmax")
            loss = (load_balance_loss(sums, load / load.sum()) + 0.1 * z_loss(part)) / len(logits)
            loss.backward()
            value += loss.detach()
        assert leaf.grad is not None
        return value, leaf.grad

    whole, gradient = run((96,))
    for pieces in ((48, 48), (1, 90, 5), (0, 96), (12,) * 8):
        value, part = run(pieces)
        torch.testing.assert_close(value, whole, rtol=1e-6, atol=0)
        assert torch.equal(part, gradient)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_replay_of_the_own_choice_changes_a_bit(name: str, threshold: float) -> None:
    rule = dataclasses.replace(RULES[name], replay_threshold=threshold)
    logits = logits_of(8).round(decimals=1).requires_grad_()
    own = route(logits, rule, bias_of(rule))
    order = torch.randperm(rule.num_chosen, generator=torch.Generator().manual_seed(0))
    again = route(logits, rule, bias_of(rule), own.ids_TK[:, order].int())
    assert torch.equal(again.ids_TK, own.ids_TK)
    assert torch.equal(again.gates_TK, own.gates_TK)
    gradients = [torch.autograd.grad(r.gates_TK.square().sum(), logits)[0] for r in (own, again)]
    assert torch.equal(*gradients)
    assert (int(again.num_replayed), int(again.num_substituted)) == (TOKENS * rule.num_chosen, 0)
    assert (int(own.num_replayed), int(own.num_substituted)) == (0, 0)


def expected_replay(
    scores: list[float], probabilities: list[float], given: list[int], rule: RouterRule
) -> tuple[list[int], int, int]:
    """Ids, replayed and substituted for one token, spelled out in probability space."""
    ranked = ranking(scores, rule)
    worst = min(probabilities[e] for e in ranked[: rule.num_chosen])
    threshold = worst - (1 - rule.replay_threshold) * abs(worst)
    kept: list[int] = []
    for e in given:
        if 0 <= e < EXPERTS and e not in kept and probabilities[e] >= threshold:
            kept.append(e)
    free = [e for e in ranked if e not in kept]
    chosen = kept + free[: rule.num_chosen - len(kept)]
    return sorted(chosen), len(kept), sum(e >= 0 for e in given) - len(kept)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "softmax, groups", "sigmoid, one"])
@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_replay_keeps_implausible_ids_or_drops_plausible_ones(name: str, threshold: float) -> None:
    rule = dataclasses.replace(RULES[name], replay_threshold=threshold)
    logits, bias = logits_of(10), bias_of(rule)
    generator = torch.Generator().manual_seed(11)
    near = route(logits + 0.3 * torch.randn(logits.shape, generator=generator), rule, bias).ids_TK
    wild = torch.randint(-2, EXPERTS + 2, near.shape, generator=generator)
    given = torch.where(torch.rand(near.shape, generator=generator) < 0.7, near, wild)
    found = route(logits, rule, bias, given)
    scores = choice_scores(logits, rule, bias)
    spread = logits.double().softmax(dim=1).tolist() if rule.score == "softmax" else scores
    expected = [
        expected_replay(scores[t], spread[t], given[t].tolist(), rule) for t in range(TOKENS)
    ]
    assert found.ids_TK.tolist() == [ids for ids, _, _ in expected]
    assert int(found.num_replayed) == sum(kept for _, kept, _ in expected)
    assert int(found.num_substituted) == sum(dropped for _, _, dropped in expected)
    assert 0 < int(found.num_replayed) < TOKENS * rule.num_chosen


def test_replay_rule_at_its_edges() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -9.0, -9.0]])
    rule = RouterRule(num_chosen=2, score="softmax", replay_threshold=0.36)

    def ids(given: list[int], **changes: float) -> list[int]:
        changed = dataclasses.replace(rule, **changes)  # type: ignore[arg-type]
        return route(logits, changed, None, torch.tensor([given])).ids_TK.tolist()[0]

    # The own choice is 0, 1; expert 2 has exp(-1) = 0.368 of expert 1's probability.
    assert ids([2, 0]) == [0, 2]
    assert ids([2, 0], replay_threshold=0.37) == [0, 1]
    assert ids([4, 5]) == [0, 1]
    assert ids([4, 5], replay_threshold=0.0) == [4, 5]
    assert ids([2, 2]) == [0, 2]  # a duplicate
    assert ids([-1, 2]) == [0, 2]  # unknown
    assert ids([-1, -1]) == [0, 1]  # padding
    assert ids([99, 2]) == [0, 2]  # no expert
    # A bias that makes the K-th score negative must not make the own choice implausible.
    biased = dataclasses.replace(SIGMOID, num_chosen=2, replay_threshold=0.5)
    negative = torch.full((6,), -2.0)
    found = route(logits, biased, negative, torch.tensor([[0, 1]]))
    assert (found.ids_TK.tolist(), int(found.num_substituted)) == ([[0, 1]], 0)


def test_no_token_or_not_finite_logits_break_the_choice() -> None:
    for rule in RULES.values():
        empty = torch.zeros(0, EXPERTS, requires_grad=True)
        routing = route(
            empty, rule, bias_of(rule), torch.zeros(0, rule.num_chosen, dtype=torch.int)
        )
        routing.gates_TK.sum().backward()
        assert routing.ids_TK.shape == (0, rule.num_chosen)
        assert empty.grad is not None
        broken = logits_of(12)
        broken[0], broken[1], broken[2, 3] = float("nan"), float("-inf"), float("inf")
        ids = route(broken, rule, bias_of(rule), torch.full((TOKENS, rule.num_chosen), 3)).ids_TK
        assert bool(((ids >= 0) & (ids < EXPERTS)).all())
        assert bool((ids.diff(dim=1) > 0).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.bfloat16)}, "float32 or float64"),
        ({"logits": torch.zeros(4)}, r"\[T, E\]"),
        ({"rule": {"num_chosen": 5}}, "cannot choose 5 of 4"),
        ({"rule": {"replay_threshold": 1.5}}, "replay_threshold is 1.5"),
        ({"rule": {"num_groups": 3, "topk_groups": 1}}, "cannot choose 2 of 4 experts in 1 of 3"),
        ({"rule": {"num_groups": 4, "topk_groups": 1}}, "cannot choose 2 of 4 experts in 1 of 4"),
        ({"bias": torch.zeros(4)}, "needs score 'sigmoid'"),
        ({"given": torch.zeros(2, 3, dtype=torch.int64)}, r"given ids must be integers \[2, 2\]"),
        ({"given": torch.zeros(2, 2)}, "given ids must be integers"),
    ],
)
def test_wrong_input_is_taken(changes: dict, message: str) -> None:
    given = {"logits": torch.zeros(2, 4), "bias": None, "given": None, "rule": {}} | changes
    rule = dataclasses.replace(SOFTMAX, num_chosen=2)
    case = SimpleNamespace(**given)
    with pytest.raises(ValueError, match=message):
        route(case.logits, dataclasses.replace(rule, **case.rule), case.bias, case.given)
