"""Router of a MoE layer: logits, choice with or without replay, losses, and what balance needs.

Shape letters: T tokens of this rank (sequence-parallel: 1/tp of the row), K experts per token,
E experts, H hidden, M MoE layers of the model.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megacomposer.kernels.moe_router import (
    RouterRule,
    load_balance_loss,
    probability_sums,
    route,
    z_loss,
)


class Router(MegatronModule):
    """Chooses K experts for each token. Weight `weight` [E, H]; all arithmetic in float32, but for
    the logits' gradient on tensor cores, which keeps 16 bits.

    The losses' gradients come in with the gates: means over the tokens of the global batch, whose
    number `start_step` tells. Sums for their values are in `statistics`.
    """

    expert_bias: torch.Tensor | None
    """[E]: added to the scores in the choice; train/balance.py moves it. None without a bias."""
    expert_load: torch.Tensor | None
    """[E]: each expert's share of the routed rows of the last step's global batch, 1 / E before the
    first; train/balance.py writes it. None without an auxiliary loss."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        replay_threshold: float,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        device = torch.cuda.current_device()
        num_experts = config.num_moe_experts
        self.tp_group = pg_collection.tp
        self.aux_loss_coeff = float(config.moe_aux_loss_coeff or 0.0)
        self.z_loss_coeff = float(config.moe_z_loss_coeff or 0.0)
        self.rule = RouterRule(
            num_chosen=config.moe_router_topk,
            score=config.moe_router_score_function,
            num_groups=config.moe_router_num_groups or 0,
            topk_groups=config.moe_router_group_topk or 0,
            scale=config.moe_router_topk_scaling_factor or 1.0,
            replay_threshold=replay_threshold,
        )
        self.weight = torch.nn.Parameter(
            torch.empty(num_experts, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        # megatron-core's mark of weights that see this TP rank's tokens only.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        biased = config.moe_router_enable_expert_bias
        self.register_buffer(
            "expert_bias", torch.zeros(num_experts, device=device) if biased else None
        )
        even = torch.full((num_experts,), 1.0 / num_experts, device=device)
        self.register_buffer("expert_load", even if self.aux_loss_coeff else None)
        self.statistics = torch.zeros(num_experts + 4, device=device)
        """Sums over forwards that build a graph, cleared each step: probabilities of each expert
        [E] (with an auxiliary loss), z-loss, tokens, replayed ids, substituted ids. (With full
        recomputation each counts twice; only ratios are used.)"""
        self.step_tokens = 0
        """Tokens of the global batch; 0 outside a training step."""
        self.moe_index: int | None = None
        """This layer's place among the model's MoE layers, MTP depths last."""
        self.given_ids_TK: torch.Tensor | None = None
        """Router replay of the running forward; set by RoutedLayer."""
        self.replayed = False
        """Whether any forward since the last `start_step` had given ids."""

    def set_layer_number(self, layer_number: int) -> None:
        """megatron-core's layer calls it; nothing here depends on it."""

    def start_step(self, num_tokens: int) -> None:
        """Forget the last step's sums; `num_tokens` is the token count of the global batch."""
        self.step_tokens, self.replayed = num_tokens, False
        self.statistics.zero_()

    def forward(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, H] -> gates [T, K] float32 and expert ids [T, K] int64, rising for each token.

        Raises:
            ValueError: a router loss outside a training step, whose size would be unknown.
        """
        assert padding_mask is None, "packed rows have no padding mask"
        logits_TE = _Logits.apply(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        routing = route(logits_TE, self.rule, self.expert_bias, self.given_ids_TK)
        gates_TK = routing.gates_TK
        if torch.is_grad_enabled():
            self.replayed |= self.given_ids_TK is not None
            self.statistics[-3] += logits_TE.shape[0]
            self.statistics[-2] += routing.num_replayed
            self.statistics[-1] += routing.num_substituted
            gates_TK = self._with_losses(gates_TK, logits_TE)
        return gates_TK, routing.ids_TK

    def _with_losses(self, gates_TK: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
        """The gates, unchanged, with the gradients of the router losses behind them."""
        if not self.aux_loss_coeff and not self.z_loss_coeff:
            return gates_TK
        if not self.step_tokens:
            raise ValueError(
                "router losses are means over a training step's tokens: call"
                " RouterBalance.start_step before the forward, or run it under torch.no_grad"
            )
        loss = logits_TE.new_zeros(())
        if self.aux_loss_coeff:
            assert self.expert_load is not None
            sums_E = probability_sums(logits_TE, self.rule.score)
            self.statistics[: sums_E.shape[0]] += sums_E.detach()
            # The shares are those of the step before: those of this one are known only after its
            # last micro-batch. Shares of the micro-batch instead would make losses depend on how a
            # step is cut, and push every micro-batch to even load by itself.
            loss = loss + self.aux_loss_coeff * load_balance_loss(sums_E, self.expert_load)
        if self.z_loss_coeff:
            squares = z_loss(logits_TE)
            self.statistics[-4] += squares.detach()
            loss = loss + self.z_loss_coeff * squares
        return _AddLoss.apply(gates_TK, loss / self.step_tokens)


class RoutedLayer(TransformerLayer):
    """megatron-core's layer, which gives its router the micro-batch's expert ids for this call.

    They come as an argument of the call, so a recomputation in backward replays the same ones.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        router = getattr(self.mlp, "router", None)
        ids_MTK = kwargs["attention_mask"].expert_ids_MTK
        if not isinstance(router, Router) or ids_MTK is None:
            return super().forward(*args, **kwargs)
        assert router.moe_index is not None
        # A decoder without the MTP depths may be replayed: those route by themselves.
        if router.moe_index < ids_MTK.shape[0]:
            parts = ids_MTK[router.moe_index].chunk(router.tp_group.size())
            router.given_ids_TK = parts[router.tp_group.rank()]
        try:
            return super().forward(*args, **kwargs)
        finally:
            router.given_ids_TK = None


class _Logits(torch.autograd.Function):
    """x W^T in float32; keeps x and W in their own dtype for backward instead of float32 copies."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        return _wide_product(x_TH, weight_EH.t())

    @staticmethod
    def backward(
        ctx: Any, grad_TE: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_TH, weight_EH = ctx.saved_tensors
        parts, dx, dweight = _parts(grad_TE, x_TH), None, None
        if ctx.needs_input_grad[0]:
            dx_parts = [_wide_product(part, weight_EH) for part in parts]
            dx = functools.reduce(torch.add, dx_parts).to(x_TH.dtype)
        if ctx.needs_input_grad[1]:
            dweight_parts = [_wide_product(part.t(), x_TH) for part in parts]
            dweight = functools.reduce(torch.add, dweight_parts).to(weight_EH.dtype)
        return dx, dweight


def _on_tensor_cores(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b in float32. A product of two bfloat16 numbers is exact in it, so on tensor cores only the
    sum errs: 2e-6 of the norm for 2048 terms, a thousandth of what rounding x to bfloat16 cost."""
    if _on_tensor_cores(b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _parts(grad: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of which grad is the sum: for tensor cores, in bfloat16 what it rounds to and the rest, which
    keep 16 of its 24 bits."""
    if not _on_tensor_cores(like):
        return (grad,)
    rounded = grad.to(like.dtype)
    return rounded, (grad - rounded).to(like.dtype)


class _AddLoss(torch.autograd.Function):
    """Returns its first argument; backward gives the loss the gradient 1."""

    @staticmethod
    def forward(ctx: Any, gates_TK: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return gates_TK.view_as(gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad_TK, grad_TK.new_ones(())
