"""What moe_router.py measures: shapes, rules, and the router of ours, torch and megatron-core.

A call takes fp32 logits [T, E] and returns gates and, with losses, the sum of the router losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megacomposer.kernels.moe_router import (
    RouterRule,
    load_balance_loss,
    probability_sums,
    route,
    z_loss,
)

Call = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
_SIGMOID = RouterRule(num_chosen=8, score="sigmoid")
# Tokens, experts, rule: Qwen3-30B-A3B, Kimi K2, and K2 with DeepSeek-V3's groups.
CASES = {
    "softmax": (32768, 128, RouterRule(num_chosen=8, score="softmax")),
    "sigmoid": (8192, 384, _SIGMOID),
    "groups": (8192, 384, dataclasses.replace(_SIGMOID, num_groups=8, topk_groups=4)),
}
_COEFF = 1e-3


class Case:
    """Logits of one shape and rule, and the ways to route them."""

    def __init__(self, name: str, tokens: int | None, device: torch.device) -> None:
        usual, experts, self.rule = CASES[name]
        self.name, self.shape = name, (tokens or usual, experts)
        torch.manual_seed(0)
        self.logits_TE = (2 * torch.randn(*self.shape, device=device)).requires_grad_()
        self.load_E = torch.rand(experts, device=device).softmax(0)
        self.bias_E = None
        if self.rule.score == "sigmoid":
            self.bias_E = torch.linspace(-0.1, 0.1, experts, device=device)
        near = self.logits_TE.detach() + 0.3 * torch.randn_like(self.logits_TE)
        self.given_TK = route(near, self.rule, self.bias_E).ids_TK

    def calls(self, *, losses: bool, replay: bool) -> dict[str, Callable[[], Call]]:
        """How to get each implementation's call; an import may fail."""
        found = {"ours": lambda: self._ours(losses, replay)}
        if losses:
            found["ours, torch.compile"] = lambda: _compiled(self._ours(losses, replay))
        if not replay:
            found |= {
                "torch": lambda: self._torch(losses),
                "torch.compile": lambda: _compiled(self._torch(losses)),
                "mcore": lambda: self._mcore(losses),
            }
        return found

    def bytes_moved(self, *, backward: bool) -> int:
        """Logits once a pass and their gradient once; int64 ids and fp32 gates once."""
        (tokens, experts), chosen = self.shape, self.rule.num_chosen
        return 4 * tokens * experts * (3 if backward else 1) + 12 * tokens * chosen

    def _ours(self, losses: bool, replay: bool) -> Call:
        rule, given_TK = self.rule, self.given_TK if replay else None

        def call(logits_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gates_TK = route(logits_TE, rule, self.bias_E, given_TK).gates_TK
            if not losses:
                return (gates_TK,)
            balance = load_balance_loss(probability_sums(logits_TE, rule.score), self.load_E)
            return gates_TK, _COEFF * (balance + z_loss(logits_TE))

        return call

    def _torch(self, losses: bool) -> Call:
        """As in most model files: of equal scores any is chosen, and ids come by falling score."""
        rule, experts = self.rule, self.shape[1]

        def call(logits_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
            softmax = rule.score == "softmax"
            scores_TE = logits_TE if softmax else logits_TE.sigmoid()
            choice_TE = scores_TE if self.bias_E is None else scores_TE + self.bias_E
            if rule.num_groups:
                members_TGM = choice_TE.unflatten(1, (rule.num_groups, -1))
                best_TG = members_TGM.topk(rule.num_chosen // rule.topk_groups).values.sum(2)
                groups = best_TG.topk(rule.topk_groups).indices
                closed_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, groups, False)
                choice_TE = members_TGM.masked_fill(closed_TG[:, :, None], -torch.inf).flatten(1)
            weights_TK = scores_TE.gather(1, choice_TE.topk(rule.num_chosen).indices)
            if softmax:
                gates_TK = weights_TK.softmax(1)
            else:
                gates_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
            if not losses:
                return (gates_TK,)
            if softmax:
                probs_TE = logits_TE.softmax(1)
            else:
                probs_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
            balance = experts * (self.load_E * probs_TE.sum(0)).sum()
            return gates_TK, _COEFF * (balance + logits_TE.logsumexp(1).square().sum())

        return call

    def _mcore(self, losses: bool) -> Call:
        """Its unfused functions. Its gates are [T, E]; getting ids from them is not timed."""
        from megatron.core.transformer.moe import moe_utils

        (tokens, experts), rule = self.shape, self.rule

        def call(logits_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gates_TE, chosen_TE = moe_utils.topk_routing_with_score_function(
                logits_TE,
                rule.num_chosen,
                num_groups=rule.num_groups or None,
                group_topk=rule.topk_groups or None,
                score_function=rule.score,
                expert_bias=self.bias_E,
            )
            if not losses:
                return (gates_TE,)
            _, scores_TE = moe_utils.compute_routing_scores_for_aux_loss(
                logits_TE, rule.num_chosen, rule.score
            )
            balance = moe_utils.switch_load_balancing_loss_func(
                scores_TE, chosen_TE.sum(0), tokens, rule.num_chosen, experts, _COEFF
            )
            return gates_TE, balance + moe_utils.z_loss_func(logits_TE, _COEFF)

        return call


def _compiled(call: Call) -> Call:
    torch._dynamo.reset()  # or the code of a case before counts towards the limit of recompiles
    return torch.compile(call, dynamic=False)
