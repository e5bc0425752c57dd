"""Attention modules: core attention for packed documents, and multi-head latent attention.

Shape letters: T tokens of the packed row on this CP rank, S tokens gathered over CP, B = 1, N heads
and G key/value heads of this TP rank, D size of a query or key head, V size of a value head.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megacomposer.kernels.attention import masked_attention, varlen_attention
from megacomposer.kernels.attention_logits import max_logits
from megacomposer.mesh.collectives import all_gather_rows
from megacomposer.mesh.context_parallel import gathered_positions, local_positions
from megacomposer.model.rotary import rotate_interleaved, yarn_mscale


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """Which tokens may see each other; travels through megatron-core as its `attention_mask`."""

    cu_seqlens: torch.Tensor
    """int32 [documents + 1] on the CPU, over the whole row (all CP ranks)."""
    cp_rank: int = 0
    cp_size: int = 1
    expert_ids_MTK: torch.Tensor | None = None
    """Router replay, see `prepare_inputs`: this CP rank's tokens. It rides along because this
    object is all that megatron-core passes from our model to every layer."""

    @functools.cached_property
    def max_seqlen(self) -> int:
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """bool [T, S]: query of this CP rank may see key of the gathered row; on the CPU."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        query = local_positions(self.num_tokens, self.cp_rank, self.cp_size)[:, None]
        key = gathered_positions(self.num_tokens, self.cp_size)[None, :]
        return (key <= query) & (document[query] == document[key])


class CoreAttention(torch.nn.Module):
    """Causal attention inside each document, for GQA and MLA head shapes.

    Under context parallelism keys and values are all-gathered over CP (their gradients
    reduce-scattered) and each rank attends with its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group()
        self.max_logits: torch.Tensor | None = None
        """float32 [N]: where set, training forwards raise it to the largest logit of each head
        over this rank's queries. Not a buffer: it belongs to who set it (optim.qk_clip)."""

    def forward(
        self,
        query_TBND: torch.Tensor,
        key_TBGD: torch.Tensor,
        value_TBGV: torch.Tensor,
        attention_mask: Segments,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns [T, 1, N * V] in the query's dtype."""
        query, key, value = query_TBND[:, 0], key_TBGD[:, 0], value_TBGV[:, 0]
        scale = self.softmax_scale or 1.0 / math.sqrt(query.shape[-1])
        if attention_mask.cp_size == 1:
            out = varlen_attention(
                query,
                key,
                value,
                cu_seqlens=attention_mask.cu_seqlens,
                max_seqlen=attention_mask.max_seqlen,
                softmax_scale=scale,
            )
            self._track(query, key, scale, cu_seqlens=attention_mask.cu_seqlens)
        else:
            key = all_gather_rows(key, self.cp_group)
            value = all_gather_rows(value, self.cp_group)
            mask = attention_mask.mask.to(query.device, non_blocking=True)
            out = masked_attention(query, key, value, mask=mask, softmax_scale=scale)
            self._track(query, key, scale, mask=mask)
        return out.reshape(out.shape[0], 1, -1)

    def _track(
        self, query: torch.Tensor, key: torch.Tensor, scale: float, **pairs: torch.Tensor
    ) -> None:
        """Recomputation in backward does it again, which changes nothing."""
        if self.max_logits is None or not self.training or not torch.is_grad_enabled():
            return
        largest = max_logits(query, key, softmax_scale=scale, **pairs)
        torch.maximum(self.max_logits, largest, out=self.max_logits)


class ReplicatedLinear(MegatronModule):
    """y = x W^T with W whole on every TP rank, each of which has its own tokens.

    megatron-core splits MLA's small down-projections over TP and gathers their outputs; in its
    local path the gradient of the shared rotary key then misses the other ranks' heads. Kept whole,
    the weight sees each token once and its gradient is summed over TP.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(
            torch.empty(
                output_size,
                input_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)


@dataclasses.dataclass
class LatentAttentionSubmodules:
    """Module classes of `LatentAttention`."""

    column_parallel_linear: Any
    row_parallel_linear: Any
    core_attention: Any
    layer_norm: Any


class LatentAttention(MegatronModule):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) for training.

    Heads are split over TP in the up-projections and the output projection; the down-projections
    and latent norms are replicated and run on this rank's slice of the sequence. Parameter names
    are megatron-core's.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentAttentionSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        self.nope_dim, self.rope_dim = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.head_dim, self.v_dim = self.nope_dim + self.rope_dim, config.v_head_dim
        hidden, heads = config.hidden_size, config.num_attention_heads
        factor = config.rotary_scaling_factor if config.rope_type == "yarn" else 1.0
        self.mscale = yarn_mscale(factor, config.mscale) / yarn_mscale(
            factor, config.mscale_all_dim
        )
        softmax_scale = yarn_mscale(factor, config.mscale_all_dim) ** 2 / math.sqrt(self.head_dim)

        column = functools.partial(
            build_module,
            submodules.column_parallel_linear,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        norm = functools.partial(
            build_module, submodules.layer_norm, config=config, eps=config.layernorm_epsilon
        )
        if config.q_lora_rank:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config=config)
            self.q_layernorm = norm(hidden_size=config.q_lora_rank)
            self.linear_q_up_proj = column(config.q_lora_rank, heads * self.head_dim)
        else:
            self.linear_q_proj = column(hidden, heads * self.head_dim)
        self.linear_kv_down_proj = ReplicatedLinear(
            hidden, config.kv_lora_rank + self.rope_dim, config=config
        )
        self.kv_layernorm = norm(hidden_size=config.kv_lora_rank)
        self.linear_kv_up_proj = column(config.kv_lora_rank, heads * (self.nope_dim + self.v_dim))
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            softmax_scale=softmax_scale,
        )
        self.linear_proj = build_module(
            submodules.row_parallel_linear,
            heads * self.v_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def forward(
        self,
        hidden_TBH: torch.Tensor,
        attention_mask: Segments,
        rotary_pos_emb: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Args: hidden [T / tp, 1, H] with sequence parallelism, angles [T, 1, 1, rope_dim]."""
        if self.config.q_lora_rank:
            latent = self.q_layernorm(self.linear_q_down_proj(hidden_TBH))
            query, _ = self.linear_q_up_proj(latent)
        else:
            query, _ = self.linear_q_proj(hidden_TBH)
        query = query.view(*query.shape[:2], self.num_heads, self.head_dim)

        compressed = self.linear_kv_down_proj(hidden_TBH)
        kv_latent, key_rope = compressed.split([self.config.kv_lora_rank, self.rope_dim], dim=-1)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_latent))
        if self.config.sequence_parallel:
            # Backward reduce-scatters: every TP rank's heads use this one key.
            key_rope = gather_from_sequence_parallel_region(key_rope.contiguous())
        key_value = key_value.view(*key_value.shape[:2], self.num_heads, -1)
        key_nope, value = key_value.split([self.nope_dim, self.v_dim], dim=-1)

        query_nope, query_rope = query.split([self.nope_dim, self.rope_dim], dim=-1)
        assert rotary_pos_emb is not None
        query_rope = rotate_interleaved(query_rope, rotary_pos_emb, self.mscale)
        key_rope = rotate_interleaved(key_rope[:, :, None, :], rotary_pos_emb, self.mscale)
        query = torch.cat((query_nope, query_rope), dim=-1)
        key = torch.cat((key_nope, key_rope.expand(-1, -1, self.num_heads, -1)), dim=-1)
        return self.linear_proj(self.core_attention(query, key, value, attention_mask))
