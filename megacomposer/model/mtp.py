"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k joins the trunk's (or the previous depth's) hidden state at position t with the embedding of
token t + k, runs one transformer layer and predicts token t + k + 1 with the shared head.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megacomposer.model.attention import ReplicatedLinear


class MTPLayer(MegatronModule):
    """One depth. Inputs and output are [T / tp, 1, H] (sequence-parallel)."""

    def __init__(
        self, config: TransformerConfig, layer_spec: ModuleSpec, layer_norm: Any, depth: int
    ) -> None:
        super().__init__(config=config)
        sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(layer_norm, config=config, **sizes)
        self.hnorm = build_module(layer_norm, config=config, **sizes)
        self.eh_proj = ReplicatedLinear(2 * config.hidden_size, config.hidden_size, config=config)
        self.transformer_layer = build_module(
            layer_spec, config=config, layer_number=config.num_layers + depth
        )
        self.final_layernorm = build_module(layer_norm, config=config, **sizes)

    def forward(
        self,
        hidden: torch.Tensor,
        embedding: torch.Tensor,
        *,
        attention_mask: Any,
        rotary_pos_emb: torch.Tensor,
    ) -> torch.Tensor:
        joined = torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)
        hidden, _ = self.transformer_layer(
            hidden_states=self.eh_proj(joined),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
        )
        return self.final_layernorm(hidden)
