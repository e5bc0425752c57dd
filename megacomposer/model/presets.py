"""Published and test model shapes. Sizes of published models are from their own config files."""

from __future__ import annotations

import dataclasses

from megacomposer.model.config import ModelConfig, YarnConfig


def tiny() -> ModelConfig:
    """A Kimi-K2-shaped model that trains in minutes on two CPU cores (byte vocabulary)."""
    return ModelConfig(
        num_layers=3,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        vocab_size=264,
        attention="mla",
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=8,
        experts_per_token=2,
        moe_ffn_hidden_size=96,
        shared_expert_ffn_hidden_size=96,
        num_dense_layers=1,
        router_score="sigmoid",
        router_scale=2.0,
        router_bias=True,
        router_bias_update_rate=2e-2,
        mtp_num_layers=1,
    )


def smollm2_135m() -> ModelConfig:
    """SmolLM2-135M, a dense llama."""
    return ModelConfig(
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_query_groups=3,
        vocab_size=49152,
        rope_theta=100000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        init_std=0.041666666666666664,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Qwen3-30B-A3B: GQA with query/key norms, 128 experts, softmax router."""
    return ModelConfig(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        head_dim=128,
        qk_norm=True,
        vocab_size=151936,
        rope_theta=1000000.0,
        num_experts=128,
        experts_per_token=8,
        moe_ffn_hidden_size=768,
        router_aux_loss_coeff=1e-3,
        dtype="bf16",
    )


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3: MLA, 256 experts in 8 groups, 1 MTP layer."""
    return ModelConfig(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        vocab_size=129280,
        attention="mla",
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        yarn=YarnConfig(factor=40.0, original_max_positions=4096),
        num_experts=256,
        experts_per_token=8,
        moe_ffn_hidden_size=2048,
        shared_expert_ffn_hidden_size=2048,
        num_dense_layers=3,
        router_score="sigmoid",
        router_num_groups=8,
        router_topk_groups=4,
        router_scale=2.5,
        router_bias=True,
        router_bias_update_rate=1e-3,
        mtp_num_layers=1,
        init_std=0.006,
        dtype="bf16",
        recompute="full",
    )


def kimi_k2() -> ModelConfig:
    """Kimi K2 (text part): MLA, 384 experts, one dense layer. The MTP layer is an addition."""
    return dataclasses.replace(
        deepseek_v3(),
        num_attention_heads=64,
        vocab_size=163840,
        rope_theta=50000.0,
        yarn=YarnConfig(factor=32.0, original_max_positions=4096, beta_fast=1.0),
        num_experts=384,
        num_dense_layers=1,
        router_num_groups=0,
        router_topk_groups=0,
        router_scale=2.827,
    )
