"""What a ModelConfig refuses, by the name of the field and with the fix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megacomposer.model import presets
from megacomposer.model.config import ModelConfig, YarnConfig

GQA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    vocab_size=100,
    num_query_groups=2,
)
MLA = presets.tiny()
GROUPED = dataclasses.replace(MLA, experts_per_token=4, router_num_groups=4, router_topk_groups=2)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GQA, {"num_layers": 0}, r"model\.num_layers is 0; it must be >= 1"),
        (GQA, {"hidden_size": -32}, r"model\.hidden_size is -32"),
        (GQA, {"ffn_hidden_size": 0}, r"model\.ffn_hidden_size is 0"),
        (GQA, {"num_attention_heads": 0}, r"model\.num_attention_heads is 0"),
        (GQA, {"vocab_size": 0}, r"model\.vocab_size is 0"),
        (GQA, {"vocab_pad_multiple": 0}, r"model\.vocab_pad_multiple is 0"),
        (GQA, {"num_query_groups": 3}, r"num_query_groups 3 does not divide .*_heads 4"),
        (
            GQA,
            {"hidden_size": 30},
            r"hidden_size 30 is not a multiple of .*_heads 4; set model\.head_dim",
        ),
        (GQA, {"head_dim": 7}, r"model\.head_dim is 7; .* it must be even"),
        (
            GQA,
            {"yarn": YarnConfig(factor=2.0, original_max_positions=64)},
            r"model\.yarn is for attention 'mla'",
        ),
        (GQA, {"mtp_num_layers": -1}, r"model\.mtp_num_layers is -1; it must be >= 0"),
        (GQA, {"embedding_init_std": -1.0}, r"model\.embedding_init_std is -1\.0; it must be >= 0"),
        (GQA, {"embedding_init_std": 1.0, "tie_embeddings": True}, r"projection of model\.tie_emb"),
        (MLA, {"kv_lora_rank": 0}, r"model\.kv_lora_rank must be > 0"),
        (MLA, {"qk_nope_head_dim": 0}, r"model\.qk_nope_head_dim must be > 0"),
        (MLA, {"qk_rope_head_dim": 0}, r"model\.qk_rope_head_dim must be > 0"),
        (MLA, {"v_head_dim": 0}, r"model\.v_head_dim must be > 0"),
        (MLA, {"qk_rope_head_dim": 5}, r"model\.qk_rope_head_dim is 5; .* it must be even"),
        (
            MLA,
            {"experts_per_token": 9},
            r"experts_per_token is 9; it must be between 1 and .*num_experts = 8",
        ),
        (MLA, {"experts_per_token": 0}, r"experts_per_token is 0"),
        (MLA, {"moe_ffn_hidden_size": 0}, r"moe_ffn_hidden_size must be > 0"),
        (MLA, {"num_dense_layers": 4}, r"num_dense_layers 4 exceeds model\.num_layers 3"),
        (MLA, {"router_score": "softmax"}, r"router_bias needs .*'sigmoid'"),
        (MLA, {"router_bias": False}, r"router_bias_update_rate needs model\.router_bias"),
        (MLA, {"router_bias_update_rate": -1e-3}, r"router_bias_update_rate is -0\.001"),
        (
            MLA,
            {"router_bias_update": "error", "router_bias_update_rate": 0.0},
            r"needs a model\.router_bias_update_rate above 0",
        ),
        (
            MLA,
            {
                "router_score": "softmax",
                "router_bias": False,
                "router_bias_update_rate": 0.0,
                "experts_per_token": 1,
            },
            r"'softmax' over one chosen expert is always 1",
        ),
        (MLA, {"router_aux_loss_coeff": -1e-3}, r"router_aux_loss_coeff is -0\.001; it must be >="),
        (MLA, {"router_z_loss_coeff": -1e-3}, r"router_z_loss_coeff is -0\.001; it must be >="),
        (MLA, {"router_replay_threshold": 1.5}, r"threshold is 1\.5; it must be between 0 and 1"),
        (MLA, {"router_num_groups": 3}, r"router_num_groups 3 does not divide .*experts 8"),
        (MLA, {"router_topk_groups": 2}, r"router_num_groups 0 does not divide"),
        (GROUPED, {"router_topk_groups": 0}, r"router_topk_groups is 0; it must be between 1"),
        (GROUPED, {"router_topk_groups": 5}, r"topk_groups is 5; .*router_num_groups = 4"),
        (GROUPED, {"experts_per_token": 1}, r"topk_groups is 2; .*experts_per_token = 1"),
        (GROUPED, {"experts_per_token": 5}, r"experts_per_token 5 exceeds the 4 experts"),
    ],
)
def test_impossible_model_is_accepted(
    base: ModelConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(base, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, r"yarn\.factor is 0\.5; it must be >= 1"),
        ({"original_max_positions": 0}, r"yarn\.original_max_positions is 0"),
        ({"beta_slow": 64.0}, r"yarn\.beta_fast 32\.0 and yarn\.beta_slow 64\.0"),
        ({"beta_fast": 0.0, "beta_slow": 0.0}, r"yarn\.beta_fast 0\.0"),
    ],
)
def test_impossible_position_scaling_is_accepted(change: dict[str, Any], message: str) -> None:
    yarn = YarnConfig(factor=4.0, original_max_positions=4096)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(yarn, **change)


def test_implied_sizes_are_filled_in() -> None:
    assert GQA.gqa_head_dim == 8
    assert dataclasses.replace(GQA, num_query_groups=0).query_groups == 4
    assert GQA.padded_vocab_size == 128
    assert dataclasses.replace(GQA, vocab_size=128).padded_vocab_size == 128


def test_layers_with_experts_follow_the_leading_dense_ones() -> None:
    assert [MLA.is_moe_layer(layer) for layer in range(3)] == [False, True, True]
    assert not any(GQA.is_moe_layer(layer) for layer in range(2))
