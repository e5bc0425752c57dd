"""Mixture-of-experts layer: stacked experts and the expert-parallel dispatcher.

megatron-core's layer keeps its shape (router, shared expert, six dispatcher stages); the experts
and the dispatcher are ours. Shape letters: T local tokens, K experts per token, R = T * K routed
rows, P rows received by this rank's experts, E experts, L local experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer as CoreMoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megacomposer.kernels.grouped_mlp import grouped_swiglu
from megacomposer.kernels.moe_permute import combine, permute
from megacomposer.kernels.moe_routing import RoutingMap, routing_map
from megacomposer.mesh.collectives import all_to_all_rows


class StackedExperts(MegatronModule):
    """This rank's experts as two stacked weights: `gate_up` [L, 2I, H] and `down` [L, H, I]."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        intermediate, hidden = config.moe_ffn_hidden_size, config.hidden_size
        options = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.gate_up = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * intermediate, hidden, **options)
        )
        self.down = torch.nn.Parameter(
            torch.empty(num_local_experts, hidden, intermediate, **options)
        )

    def forward(
        self, tokens_NH: torch.Tensor, map: RoutingMap, probs_NK: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The sum of each token's experts, weighted by the routing probability: [N, H], in the
        order of the tokens. map: of the tokens to local experts."""
        return grouped_swiglu(tokens_NH, self.gate_up, self.down, map, probs_NK), None


class ExpertDispatcher(MoETokenDispatcher):
    """Moves tokens to the ranks of their experts and back, in megatron-core's six stages.

    One copy per (token, expert) over `all_to_all_single`; without expert parallelism nothing moves.
    Deterministic: stable sorts, and a fixed-order float32 sum in the combine.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        self.topk = config.moe_router_topk
        self.num_experts = config.num_moe_experts
        self.num_local_experts = self.num_experts // self.ep_group.size()
        self.tokens_per_expert_E: torch.Tensor | None = None
        """Tokens that this rank routed to each expert in the last forward, int64 [E]."""

    def dispatch_preprocess(
        self, hidden: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort one row per (token, expert) by expert. Returns rows [R, H] and probs [R]; without
        expert parallelism tokens [T, H] and probs [T, K], which the experts gather themselves."""
        self.hidden_shape = hidden.shape
        tokens_TH = hidden.reshape(-1, hidden.shape[-1])
        self.map: RoutingMap = routing_map(ids_TK, self.num_experts)
        self.tokens_per_expert_E = self.map.rows_per_expert
        if self.ep_group.size() == 1:
            return tokens_TH, gates_TK
        probs_R = gates_TK.reshape(-1)[self.map.order]
        return permute(tokens_TH, self.map), probs_R

    def token_dispatch(
        self, rows_RH: torch.Tensor, probs_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange counts, then rows, over the expert-parallel group."""
        size = self.ep_group.size()
        if size == 1:
            return rows_RH, probs_R
        counts = self.map.rows_per_expert.view(size, self.num_local_experts)
        received = torch.empty_like(counts)
        torch.distributed.all_to_all_single(received, counts.contiguous(), group=self.ep_group)
        self.received_counts = received
        self.send_rows: list[int] = counts.sum(1).tolist()
        self.receive_rows: list[int] = received.sum(1).tolist()
        rows = all_to_all_rows(rows_RH, self.send_rows, self.receive_rows, self.ep_group)
        probs = all_to_all_rows(probs_R, self.send_rows, self.receive_rows, self.ep_group)
        return rows, probs

    def dispatch_postprocess(
        self, rows_PH: torch.Tensor, probs_P: torch.Tensor
    ) -> tuple[torch.Tensor, RoutingMap, torch.Tensor]:
        """The map of the received rows, which come sorted by (source rank, expert), to experts."""
        if self.ep_group.size() == 1:
            return rows_PH, self.map, probs_P
        experts = torch.arange(self.num_local_experts, device=rows_PH.device)
        expert_of_row = torch.repeat_interleave(
            experts.repeat(self.ep_group.size()),
            self.received_counts.flatten(),
            output_size=rows_PH.shape[0],  # known: no wait for the device
        )
        return (
            rows_PH,
            routing_map(expert_of_row[:, None], self.num_local_experts),
            probs_P[:, None],
        )

    def combine_preprocess(self, rows_PH: torch.Tensor) -> torch.Tensor:
        """Nothing: the experts return rows in the order in which they came."""
        return rows_PH

    def token_combine(self, rows_PH: torch.Tensor) -> torch.Tensor:
        """Send every row back to the rank of its token."""
        if self.ep_group.size() == 1:
            return rows_PH
        return all_to_all_rows(rows_PH, self.receive_rows, self.send_rows, self.ep_group)

    def combine_postprocess(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Sum the K rows of each token in float32 and restore the hidden shape."""
        if self.ep_group.size() == 1:
            return rows_RH.view(self.hidden_shape)
        num_tokens = rows_RH.shape[0] // self.topk
        return combine(rows_RH, self.map, num_tokens).view(self.hidden_shape)


class MoELayer(CoreMoELayer):
    """megatron-core's MoE layer with our dispatcher, and a count of tokens per expert.

    `tokens_per_expert` [E] sums over forwards that build a graph until the training step clears it.
    (With full recomputation each token counts twice; only ratios are used.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        self.token_dispatcher = ExpertDispatcher(config, groups)
        self.tokens_per_expert = torch.zeros(
            config.num_moe_experts, dtype=torch.float32, device=torch.cuda.current_device()
        )

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            self.tokens_per_expert += self.token_dispatcher.tokens_per_expert_E
        return super().dispatch(hidden_states, probs)
