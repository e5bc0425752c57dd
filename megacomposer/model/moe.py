"""Mixture-of-experts layer: stacked experts and the expert-parallel dispatcher.

megatron-core's layer keeps its shape (router, shared expert, six dispatcher stages); the experts
and the dispatcher are ours. Shape letters: T tokens of this rank, K experts per token, N tokens
that this rank's experts get, E experts, L local experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer as CoreMoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megacomposer.kernels.grouped_mlp import grouped_swiglu
from megacomposer.kernels.moe_routing import RoutingMap, routing_map
from megacomposer.mesh.row_transport import RowTransport, TransportName, make_transport
from megacomposer.model.expert_exchange import ExpertExchange, plan_exchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """What megatron-core's stages hand to the experts in the place of row counts."""

    map: RoutingMap
    """Of the tokens that this rank's experts get, to them."""
    exchange: ExpertExchange | None
    """None without expert parallelism."""


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
        self, tokens_TH: torch.Tensor, routed: Routed, gates_NK: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The sum of each token's experts, weighted by its gates: [T, H]. The experts of other
        ranks are among them where `routed` has an exchange."""
        out_TH = grouped_swiglu(
            tokens_TH, self.gate_up, self.down, routed.map, gates_NK, routed.exchange
        )
        return out_TH, None


class ExpertDispatcher(MoETokenDispatcher):
    """Moves tokens to the ranks of their experts and back, in megatron-core's six stages.

    One copy per (token, rank), expanded to rows by the experts' gather. The first part of the
    tokens is sent in `token_dispatch`, the others when the experts begin; these wait for each part,
    and send its results back while they work on the next. Deterministic: stable maps, and float32
    sums in a fixed order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        transport: TransportName,
        parts: int,
    ) -> None:
        super().__init__(config, pg_collection)
        self.num_experts, self.parts = config.num_moe_experts, parts
        self.transport: RowTransport | None = None
        if self.ep_group.size() > 1:
            self.transport = make_transport(self.ep_group, transport)
        self.map: RoutingMap | None = None
        self.exchange: ExpertExchange | None = None
        self.tokens_per_expert_E: torch.Tensor | None = None
        """Tokens that this rank routed to each expert in the last forward, int64 [E]."""

    def dispatch_preprocess(
        self, hidden: torch.Tensor, ids_TK: torch.Tensor, gates_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plans the exchange, and returns tokens [T, H] and gates [T, K]. Waits for the device,
        once, for the counts of all ranks; without expert parallelism it does not."""
        self.hidden_shape, self.ids_TK = hidden.shape, ids_TK
        if self.transport is None:
            self.map = routing_map(ids_TK, self.num_experts, ids_rise=True)
            self.tokens_per_expert_E = self.map.rows_per_expert
        else:
            plan, self.tokens_per_expert_E = plan_exchange(
                ids_TK, self.num_experts, self.parts, self.ep_group
            )
            self.exchange = ExpertExchange(plan, self.transport)
        return hidden.reshape(-1, hidden.shape[-1]), gates_TK

    def token_dispatch(
        self, tokens_TH: torch.Tensor, gates_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends the first part of the tokens; without expert parallelism nothing moves."""
        if self.exchange is not None:
            self.exchange.start(tokens_TH)
        return tokens_TH, gates_TK

    def dispatch_postprocess(
        self, tokens_TH: torch.Tensor, gates_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Routed, torch.Tensor]:
        """The map of the tokens that come to the local experts, and their gates [N, K]."""
        # A layer keeps none of it until its next forward.
        exchange, map, ids_TK = self.exchange, self.map, self.ids_TK
        self.exchange = self.map = self.ids_TK = None
        gates_NK = gates_TK
        if exchange is not None:
            gates_NK, map = exchange.routing(gates_TK, ids_TK)
        return tokens_TH, Routed(map=map, exchange=exchange), gates_NK

    def combine_preprocess(self, out_TH: torch.Tensor) -> torch.Tensor:
        """Nothing: the experts have sent their results back."""
        return out_TH

    def token_combine(self, out_TH: torch.Tensor) -> torch.Tensor:
        """Nothing: results have come back and are summed."""
        return out_TH

    def combine_postprocess(self, out_TH: torch.Tensor) -> torch.Tensor:
        """Restores the hidden shape."""
        return out_TH.view(self.hidden_shape)


class MoELayer(CoreMoELayer):
    """megatron-core's MoE layer with our dispatcher, and a count of tokens per expert. The shared
    experts work while the tokens travel.

    `tokens_per_expert` [E] sums over forwards that build a graph until the training step clears it.
    (With full recomputation each token counts twice; only ratios are used.)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        transport: TransportName,
        parts: int,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, *args, pg_collection=groups, **kwargs)
        self.token_dispatcher = ExpertDispatcher(config, groups, transport=transport, parts=parts)
        self.tokens_per_expert = torch.zeros(
            config.num_moe_experts, dtype=torch.float32, device=torch.cuda.current_device()
        )

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> None:
        """megatron-core's first step, put off to `dispatch`."""
        self._shared_input = hidden_states

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            self.tokens_per_expert += self.token_dispatcher.tokens_per_expert_E
        dispatched = super().dispatch(hidden_states, probs)
        self._shared_output = super().shared_experts_compute(self._shared_input)
        del self._shared_input
        return dispatched

    def postprocess(self, output: torch.Tensor, shared_expert_output: None) -> torch.Tensor:
        shared, self._shared_output = self._shared_output, None
        return super().postprocess(output, shared)
