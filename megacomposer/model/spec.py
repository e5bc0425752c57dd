"""How a ModelConfig becomes megatron-core's TransformerConfig and module specs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megacomposer.mesh.layout import Layout
from megacomposer.model.attention import (
    CoreAttention,
    LatentAttention,
    LatentAttentionSubmodules,
)
from megacomposer.model.config import ModelConfig
from megacomposer.model.megatron_moe import megatron_moe_spec
from megacomposer.model.moe import MoELayer, StackedExperts
from megacomposer.model.norm import RMSNorm
from megacomposer.model.router import RoutedLayer, Router


class NativeBackend(BackendSpecProvider):
    """megatron-core's parallel linears with our norm, core attention and experts."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None

    def layer_norm(self, *args: Any, **kwargs: Any) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return CoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_: Any) -> Any:
        return StackedExperts

    def activation_func(self) -> None:
        return None


class TransformerEngineBackend(NativeBackend):
    """Transformer Engine's linears and norm; attention and experts stay ours.

    Raises:
        ValueError: Transformer Engine is not installed.
    """

    def __init__(self) -> None:
        from megatron.core.extensions import transformer_engine

        if not getattr(transformer_engine, "HAVE_TE", False):
            raise ValueError(
                "model.backend is 'te' but Transformer Engine is not installed: install"
                " megacomposer[te] or use --model.backend native"
            )
        self._te = transformer_engine

    def column_parallel_linear(self) -> type:
        return self._te.TEColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return self._te.TERowParallelLinear

    def layer_norm(self, *args: Any, **kwargs: Any) -> type:
        return self._te.TENorm


def build_backend(config: ModelConfig) -> BackendSpecProvider:
    """The spec provider that `model.backend` names."""
    return NativeBackend() if config.backend == "native" else TransformerEngineBackend()


def layer_spec(config: ModelConfig, backend: BackendSpecProvider, *, moe: bool) -> ModuleSpec:
    """Spec of one transformer layer, dense or with experts."""
    return ModuleSpec(
        module=RoutedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=backend.layer_norm(),
            self_attention=_attention_spec(config, backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=backend.layer_norm(),
            mlp=_moe_spec(config, backend) if moe else _mlp_spec(backend, MLP),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _attention_spec(config: ModelConfig, backend: BackendSpecProvider) -> ModuleSpec:
    if config.attention == "mla":
        return ModuleSpec(
            module=LatentAttention,
            submodules=LatentAttentionSubmodules(
                column_parallel_linear=backend.column_parallel_linear(),
                row_parallel_linear=backend.row_parallel_linear(),
                core_attention=backend.core_attention(),
                layer_norm=backend.layer_norm(),
            ),
        )
    head_norm = backend.layer_norm() if config.qk_norm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _mlp_spec(backend: BackendSpecProvider, module: type) -> ModuleSpec:
    return ModuleSpec(
        module=module,
        submodules=MLPSubmodules(
            linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear()
        ),
    )


def _moe_spec(config: ModelConfig, backend: BackendSpecProvider) -> ModuleSpec:
    shared_experts = _mlp_spec(backend, SharedExpertMLP)
    if config.moe_backend == "megatron":
        return megatron_moe_spec(shared_experts)
    return ModuleSpec(
        module=MoELayer,
        params={"transport": config.moe_exchange, "parts": config.moe_exchange_parts},
        submodules=MoESubmodules(
            experts=backend.grouped_mlp_modules(True),
            shared_experts=shared_experts,
            router=functools.partial(Router, replay_threshold=config.router_replay_threshold),
        ),
    )


def block_spec(config: ModelConfig, backend: BackendSpecProvider) -> TransformerBlockSubmodules:
    """Specs of all decoder layers and the final norm."""
    layers = [
        layer_spec(config, backend, moe=config.is_moe_layer(layer))
        for layer in range(config.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=backend.layer_norm())


def transformer_config(config: ModelConfig, layout: Layout) -> TransformerConfig:
    """megatron-core's configuration of the same model on this layout.

    Parameters are created in float32 (the master weights); FSDP casts them for compute.

    Raises:
        ValueError: heads, experts or the vocabulary do not divide over the layout.
    """
    for name, count in (
        ("num_attention_heads", config.num_attention_heads),
        ("padded vocabulary (vocab_size, vocab_pad_multiple)", config.padded_vocab_size),
        ("ffn_hidden_size", config.ffn_hidden_size),
        ("shared_expert_ffn_hidden_size", config.shared_expert_ffn_hidden_size),
        ("num_query_groups", config.query_groups if config.attention == "gqa" else layout.tp),
    ):
        if count % layout.tp:
            raise ValueError(f"model.{name} = {count} cannot be split over mesh.tp = {layout.tp}")
    if config.num_experts % layout.ep:
        raise ValueError(
            f"model.num_experts = {config.num_experts} cannot be split over mesh.ep = {layout.ep}"
        )
    if layout.ep > 1 and not config.num_experts:
        raise ValueError(f"mesh.ep is {layout.ep} but the model has no experts; use mesh.ep 1")
    common: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": torch.float32,
        "bf16": config.dtype == "bf16",
        "perform_initialization": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_eps,
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "init_method_std": config.init_std,
        # The MTP layers are ours; this sizes megatron-core's table of router losses.
        "mtp_num_layers": config.mtp_num_layers or None,
        **_moe_fields(config),
    }
    if config.attention == "gqa":
        return TransformerConfig(
            num_query_groups=config.query_groups,
            kv_channels=config.gqa_head_dim,
            qk_layernorm=config.qk_norm,
            **common,
        )
    yarn = config.yarn
    return MLATransformerConfig(
        q_lora_rank=config.q_lora_rank or None,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=config.qk_nope_head_dim,
        qk_pos_emb_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        qk_layernorm=True,
        multi_latent_attention=True,
        rope_type="yarn" if yarn else "rope",
        rotary_base=config.rope_theta,
        rotary_scaling_factor=yarn.factor if yarn else 1.0,
        mscale=yarn.mscale if yarn else 1.0,
        mscale_all_dim=yarn.mscale_all_dim if yarn else 1.0,
        **common,
    )


def _moe_fields(config: ModelConfig) -> dict[str, Any]:
    if not config.num_experts:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.experts_per_token,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": config.shared_expert_ffn_hidden_size or None,
        "moe_router_score_function": config.router_score,
        "moe_router_enable_expert_bias": config.router_bias,
        "moe_router_bias_update_rate": config.router_bias_update_rate,
        "moe_router_num_groups": config.router_num_groups or None,
        "moe_router_group_topk": config.router_topk_groups or None,
        "moe_router_topk_scaling_factor": config.router_scale,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if config.router_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": config.router_aux_loss_coeff,
        "moe_z_loss_coeff": config.router_z_loss_coeff or None,
        "moe_token_dispatcher_type": "alltoall",
    }
