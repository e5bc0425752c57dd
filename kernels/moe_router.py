"""Router of a mixture-of-experts layer: from logits to expert ids and gates, and the router losses.

Everything here is a function of one token's own logits, in fp32 (or float64): how a batch is cut
into micro-batches or over ranks changes no choice. Nothing is read back to the host. Losses are
plain sums over tokens, so those of parts add up to that of the whole.
Shape suffixes: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from .dispatch import accumulation_dtype

_ID_BITS = 16
"""A sort key is (score, id): this many low bits hold the id, the bits above the score."""
_KEPT = 2**60
"""Above every key of a score."""
_EXCLUDED = -(2**60)
"""Below every key of a score."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How experts are chosen and weighted."""

    num_chosen: int
    """K."""
    score: Literal["softmax", "sigmoid"]
    """softmax: chosen by logit, gates are the softmax over the chosen logits. sigmoid: chosen by
    sigmoid plus bias, gates are the chosen sigmoids (without bias) divided by their sum
    (DeepSeek-V3, arXiv 2412.19437, equations 13-16); undivided for K = 1."""
    num_groups: int = 0
    """Equal groups of consecutive experts for group-limited choice; 0 has none."""
    topk_groups: int = 0
    """Groups a token may choose from: those with the largest sum of their best K / topk_groups
    choice scores (rounded down; DeepSeek-V3 section 2.1.2)."""
    scale: float = 1.0
    """Factor on the gates."""
    replay_threshold: float = 0.5
    """In 0..1; see `route`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """What `route` decided."""

    ids_TK: torch.Tensor
    """int64: the chosen experts of each token, distinct and rising."""
    gates_TK: torch.Tensor
    """fp32 (float64 for float64 logits): their weights; differentiable in the logits."""
    num_replayed: torch.Tensor
    """0-d int64: given ids that were used; 0 without given ids."""
    num_substituted: torch.Tensor
    """0-d int64: given ids, not counting negative ones, that were dropped for a candidate."""


def route(
    logits_TE: torch.Tensor,
    rule: RouterRule,
    bias_E: torch.Tensor | None = None,
    given_TK: torch.Tensor | None = None,
) -> Routing:
    """Choose K experts for each token, or take the given ones where they are plausible.

    Own choice: the K best choice scores c, of scores equal in fp32 the lower id. c is the logit
    (softmax), or the sigmoid plus the expert's bias; with groups, only experts of the chosen groups
    compete.

    Router replay: `given_TK` (integers, any order) are ids that another run chose, such as an
    inference engine. A given id is used if it is an expert, is the first of its kind for the token,
    and is plausible to this router. In probability space (p = softmax over all experts, or the
    biased sigmoid c itself), with p_K the K-th best of the router's own choice and r the rule's
    `replay_threshold`:

        softmax: p >= r p_K        sigmoid: c >= c_K - (1 - r) |c_K|

    The second is c >= r c_K unless a bias made c_K negative, where r c_K would be above c_K. So
    r = 0 takes every expert whose c is not negative, r = 1 none below the router's own. Groups do
    not bind given ids. Every other slot, negative ids (unknown token, padding) among them, goes to
    the best of the router's own candidates that the token does not have yet. Gates are always those
    of this router's logits. Given ids equal to the router's own choice change no bit.

    Args:
        logits_TE: fp32 or float64.
        bias_E: added to the sigmoid in the choice only; gets no gradient.
        given_TK: any integer dtype; values outside 0..E-1 count as no expert.

    Raises:
        ValueError: shapes or dtypes not as above, a softmax rule with a bias, or a rule that does
            not fit E.
    """
    _check(logits_TE, rule, bias_E, given_TK)
    with torch.no_grad():
        choice_TE = logits_TE if rule.score == "softmax" else logits_TE.sigmoid()
        if bias_E is not None:
            choice_TE = choice_TE + bias_E.to(choice_TE.dtype)
        keys_TE = _within_groups(_sort_keys(choice_TE), choice_TE, rule)
        ids_TK = keys_TE.topk(rule.num_chosen, dim=1, sorted=False).indices
        replayed = substituted = ids_TK.new_zeros(())
        if given_TK is not None:
            given_TK = given_TK.long()
            kept_TK = _plausible(choice_TE, ids_TK, given_TK, rule)
            ids_TK = _with_kept(keys_TE, given_TK, kept_TK)
            replayed = kept_TK.sum()
            substituted = ((given_TK >= 0) & ~kept_TK).sum()
        ids_TK = ids_TK.sort(dim=1).values
    return Routing(
        ids_TK=ids_TK,
        gates_TK=_gates(logits_TE, ids_TK, rule),
        num_replayed=replayed,
        num_substituted=substituted,
    )


def _gates(logits_TE: torch.Tensor, ids_TK: torch.Tensor, rule: RouterRule) -> torch.Tensor:
    """The weights [T, K] of these experts by the rule; ids of a token must be distinct."""
    logits_TK = _Pick.apply(logits_TE, ids_TK)
    if rule.score == "softmax":
        weights_TK = logits_TK.softmax(dim=1)
    else:
        weights_TK = logits_TK.sigmoid()
        if rule.num_chosen > 1:
            # All sigmoids of a token may underflow to 0.
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20)
    return weights_TK if rule.scale == 1.0 else weights_TK * rule.scale


def probability_sums(logits_TE: torch.Tensor, score: Literal["softmax", "sigmoid"]) -> torch.Tensor:
    """[E]: sum over tokens of each expert's probability, for `load_balance_loss`.

    Probabilities of a token are the softmax over all experts, or all sigmoids divided by their sum.
    """
    if score == "softmax":
        return logits_TE.softmax(dim=1).sum(dim=0)
    scores_TE = logits_TE.sigmoid()
    return (scores_TE / (scores_TE.sum(dim=1, keepdim=True) + 1e-20)).sum(dim=0)


def load_balance_loss(probability_sums_E: torch.Tensor, load_E: torch.Tensor) -> torch.Tensor:
    """E sum_e load[e] probability_sums[e]; over the number of tokens it is the Switch loss.

    (Fedus et al. 2021, arXiv 2101.03961, equation 4, over a global batch as in arXiv 2501.11873.)
    Linear in the probabilities: with `load` that of the whole batch, the values of parts of a batch
    add up to the value of the batch, and so do their gradients. 1 per token at even load.

    Args:
        probability_sums_E: as from `probability_sums`, of the part.
        load_E: share of the routed rows that each expert got, sums to 1; a constant.
    """
    return load_E.shape[0] * (load_E.detach() * probability_sums_E).sum()


def z_loss(logits_TE: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    return logits_TE.logsumexp(dim=1).square().sum()


class _Pick(torch.autograd.Function):
    """logits.gather(1, ids) whose backward writes instead of adding, for ids are distinct."""

    @staticmethod
    def forward(ctx: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_TK)
        ctx.num_experts = logits_TE.shape[1]
        return logits_TE.gather(1, ids_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids_TK,) = ctx.saved_tensors
        grad_TE = grad_TK.new_zeros(grad_TK.shape[0], ctx.num_experts)
        return grad_TE.scatter_(1, ids_TK, grad_TK), None


def _sort_keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 keys, distinct along the last dim, in the order of (score, lower index first).

    torch's top-k leaves open which of equal values it takes; keys are never equal.
    """
    # Adding 0 turns -0 into +0. Bits of negative floats fall as the value rises: flip all but sign.
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = scores.shape[-1] - 1
    return (ordered << _ID_BITS) + (last - torch.arange(last + 1, device=scores.device))


def _within_groups(
    keys_TE: torch.Tensor, choice_TE: torch.Tensor, rule: RouterRule
) -> torch.Tensor:
    """The keys with those of experts outside the token's best groups below all others."""
    if not rule.num_groups:
        return keys_TE
    tokens, experts = keys_TE.shape
    members_TGM = choice_TE.view(tokens, rule.num_groups, experts // rule.num_groups)
    best = members_TGM.topk(rule.num_chosen // rule.topk_groups, dim=-1).values.sum(dim=-1)
    groups = _sort_keys(best).topk(rule.topk_groups, dim=1, sorted=False).indices
    open_TG = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
    open_TE = open_TG[:, :, None].expand_as(members_TGM).reshape(tokens, experts)
    # Excluded ones stay distinct; none is ever needed, for the open groups hold K experts or more.
    return torch.where(open_TE, keys_TE, keys_TE.remainder(1 << _ID_BITS) + _EXCLUDED)


def _plausible(
    choice_TE: torch.Tensor, own_TK: torch.Tensor, given_TK: torch.Tensor, rule: RouterRule
) -> torch.Tensor:
    """bool [T, K]: the given ids that `route` uses."""
    worst_T1 = choice_TE.gather(1, own_TK).amin(dim=1, keepdim=True)
    fraction = rule.replay_threshold
    if rule.score == "softmax":
        # p / p_K = exp(logit - logit_K).
        threshold_T1 = worst_T1 + (math.log(fraction) if fraction > 0 else -math.inf)
    else:
        threshold_T1 = worst_T1 - (1.0 - fraction) * worst_T1.abs()
    last = choice_TE.shape[1] - 1
    is_expert_TK = (given_TK >= 0) & (given_TK <= last)
    choice_TK = choice_TE.gather(1, given_TK.clamp(0, last))
    same_TKK = given_TK[:, :, None] == given_TK[:, None, :]
    repeated_TK = same_TKK.tril(diagonal=-1).any(dim=2)
    return is_expert_TK & ~repeated_TK & (choice_TK >= threshold_T1)


def _with_kept(
    keys_TE: torch.Tensor, given_TK: torch.Tensor, kept_TK: torch.Tensor
) -> torch.Tensor:
    """The kept ids and, for the other slots, the best of the keys."""
    tokens, experts = keys_TE.shape
    # One column more takes the writes of ids that are not kept.
    is_kept = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=keys_TE.device)
    is_kept.scatter_(1, given_TK.where(kept_TK, experts), True)
    ids_E = torch.arange(experts, device=keys_TE.device)
    raised_TE = torch.where(is_kept[:, :experts], _KEPT + ids_E, keys_TE)
    return raised_TE.topk(given_TK.shape[1], dim=1, sorted=False).indices


def _check(
    logits_TE: torch.Tensor,
    rule: RouterRule,
    bias_E: torch.Tensor | None,
    given_TK: torch.Tensor | None,
) -> None:
    if logits_TE.dim() != 2 or logits_TE.dtype != accumulation_dtype(logits_TE.dtype):
        raise ValueError(
            "route: logits must be [T, E] in float32 or float64, got"
            f" {logits_TE.dtype} {tuple(logits_TE.shape)}"
        )
    experts, chosen, groups = logits_TE.shape[1], rule.num_chosen, rule.num_groups
    if not 1 <= chosen <= experts < 1 << _ID_BITS:
        raise ValueError(f"route: cannot choose {chosen} of {experts} experts")
    if not 0 <= rule.replay_threshold <= 1:
        raise ValueError(f"route: replay_threshold is {rule.replay_threshold}, not in 0..1")
    if groups:
        size, open_groups = experts // groups, rule.topk_groups
        fits = experts % groups == 0 and 1 <= open_groups <= min(groups, chosen)
        if not fits or chosen > open_groups * size:
            raise ValueError(
                f"route: cannot choose {chosen} of {experts} experts in {open_groups} of"
                f" {groups} groups"
            )
    if bias_E is not None and (rule.score != "sigmoid" or bias_E.shape != (experts,)):
        raise ValueError(
            f"route: a bias needs score 'sigmoid' and shape [{experts}], got {rule.score!r} and"
            f" {tuple(bias_E.shape)}"
        )
    if given_TK is not None:
        integer = not (given_TK.is_floating_point() or given_TK.dtype == torch.bool)
        if not integer or given_TK.shape != (logits_TE.shape[0], chosen):
            raise ValueError(
                f"route: given ids must be integers [{logits_TE.shape[0]}, {chosen}], got"
                f" {given_TK.dtype} {tuple(given_TK.shape)}"
            )
