"""FLOPs of a token, against sums by hand and against torch's own counter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacomposer.observe.flops import (
    ModelShape,
    forward_flops_per_token,
    mfu,
    peak_flops,
    training_flops_per_token,
)

GQA = ModelShape(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=3,
    vocab_size=50,
)
MLA_MOE = ModelShape(
    num_layers=3,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=2,
    vocab_size=50,
    attention="mla",
    q_lora_rank=6,
    kv_lora_rank=5,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
    num_experts=16,
    experts_per_token=2,
    moe_ffn_hidden_size=7,
    shared_expert_ffn_hidden_size=9,
    num_dense_layers=1,
    mtp_num_layers=2,
)
SHAPES = {
    "gqa": GQA,
    "gqa_mtp": dataclasses.replace(GQA, mtp_num_layers=1),
    "mla_moe": MLA_MOE,
    "mla_direct_query": dataclasses.replace(MLA_MOE, q_lora_rank=0),
    "moe_without_shared": dataclasses.replace(MLA_MOE, shared_expert_ffn_hidden_size=0),
    "gqa_all_moe": dataclasses.replace(
        GQA, num_experts=4, experts_per_token=1, moe_ffn_hidden_size=5, ffn_hidden_size=0
    ),
}


def test_dense_model_that_disagrees_with_a_sum_by_hand() -> None:
    # multiply-adds of one token and layer at length 10:
    # q 8*12 + k 8*6 + v 8*6 + o 12*8 = 288; MLP 3*8*12 = 288
    # scores 4 heads * 3 dims * 5 keys = 60, values the same: 120; head once 8*50 = 400
    assert forward_flops_per_token(GQA, seq_length=10) == {
        "attention_projections": 2 * 2 * 288,
        "attention_core": 2 * 2 * 120,
        "dense_mlp": 2 * 2 * 288,
        "routed_experts": 0,
        "shared_experts": 0,
        "router": 0,
        "mtp_joins": 0,
        "output_projection": 2 * 400,
    }
    assert training_flops_per_token(GQA, seq_length=10) == 3 * 2 * (2 * 696 + 400)


def test_moe_model_that_disagrees_with_a_sum_by_hand() -> None:
    # 3 decoder layers and 2 MTP depths; 1 layer dense, 2 + 2 with experts
    # q 8*6 + 6*2*6; latent 8*(5+2); expand 5*2*(4+3); o 2*3*8: 120 + 56 + 70 + 48 = 294
    # core 2 heads * (6+3) dims * 5 keys = 90
    assert forward_flops_per_token(MLA_MOE, seq_length=10) == {
        "attention_projections": 2 * 5 * 294,
        "attention_core": 2 * 5 * 90,
        "dense_mlp": 2 * 1 * 3 * 8 * 12,
        "routed_experts": 2 * 4 * 2 * 3 * 8 * 7,
        "shared_experts": 2 * 4 * 3 * 8 * 9,
        "router": 2 * 4 * 8 * 16,
        "mtp_joins": 2 * 2 * 16 * 8,
        "output_projection": 2 * 3 * 8 * 50,
    }


@pytest.mark.parametrize("name", SHAPES)
def test_count_that_disagrees_with_the_products_torch_runs(name: str) -> None:
    shape, seq_length = SHAPES[name], 6
    hidden_SH = torch.randn(seq_length, shape.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = run_model(shape, hidden_SH)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        output.backward()
    # run_model computes the whole square of scores; half of it is what causality needs
    counted = forward_flops_per_token(shape, seq_length=seq_length)
    square = sum(counted.values()) + counted["attention_core"]
    assert forward == square * seq_length
    assert counter.get_total_flops() == 2 * forward
    assert training_flops_per_token(shape, seq_length=seq_length) == 3 * sum(counted.values())


def run_model(shape: ModelShape, hidden_SH: torch.Tensor) -> torch.Tensor:
    """The matrix products of a model, with a gradient for each of their inputs."""
    total = torch.zeros(())
    for layer in range(shape.num_layers + shape.mtp_num_layers):
        if layer >= shape.num_layers:  # a depth joins, has a layer, and predicts
            total = total + linear(hidden_SH, shape.vocab_size).sum()
            hidden_SH = linear(torch.cat((hidden_SH, hidden_SH), dim=-1), shape.hidden_size)
        hidden_SH = hidden_SH + run_attention(shape, hidden_SH)
        if shape.num_experts and layer >= shape.num_dense_layers:
            total = total + linear(hidden_SH, shape.num_experts).sum()
            experts = [shape.moe_ffn_hidden_size] * shape.experts_per_token
            if shape.shared_expert_ffn_hidden_size:
                experts.append(shape.shared_expert_ffn_hidden_size)
            hidden_SH = hidden_SH + sum(run_mlp(hidden_SH, size) for size in experts)
        else:
            hidden_SH = hidden_SH + run_mlp(hidden_SH, shape.ffn_hidden_size)
    return total + linear(hidden_SH, shape.vocab_size).sum()


def run_attention(shape: ModelShape, hidden_SH: torch.Tensor) -> torch.Tensor:
    heads = shape.num_attention_heads
    if shape.attention == "gqa":
        groups, dim = shape.num_query_groups, shape.head_dim
        query = by_head(linear(hidden_SH, heads * dim), heads)
        key = by_head(linear(hidden_SH, groups * dim), groups).repeat_interleave(heads // groups, 0)
        value = by_head(linear(hidden_SH, groups * dim), groups)
        value = value.repeat_interleave(heads // groups, 0)
    else:
        nope, rope = shape.qk_nope_head_dim, shape.qk_rope_head_dim
        latent = linear(hidden_SH, shape.q_lora_rank) if shape.q_lora_rank else hidden_SH
        query = by_head(linear(latent, heads * (nope + rope)), heads)
        latent, key_rope = linear(hidden_SH, shape.kv_lora_rank + rope).split(
            (shape.kv_lora_rank, rope), dim=-1
        )
        expanded = by_head(linear(latent, heads * (nope + shape.v_head_dim)), heads)
        key_nope, value = expanded.split((nope, shape.v_head_dim), dim=-1)
        key = torch.cat((key_nope, key_rope.expand(heads, -1, -1)), dim=-1)
    mixed = torch.bmm(torch.bmm(query, key.transpose(1, 2)), value)
    return linear(mixed.transpose(0, 1).flatten(1), shape.hidden_size)


def run_mlp(hidden_SH: torch.Tensor, intermediate: int) -> torch.Tensor:
    gated = linear(hidden_SH, intermediate).sigmoid() * linear(hidden_SH, intermediate)
    return linear(gated, hidden_SH.shape[-1])


def linear(inputs: torch.Tensor, outputs: int) -> torch.Tensor:
    return inputs @ torch.randn(inputs.shape[-1], outputs, requires_grad=True)


def by_head(flat: torch.Tensor, heads: int) -> torch.Tensor:
    return flat.unflatten(-1, (heads, -1)).transpose(0, 1)


def test_kimi_k2_that_is_far_from_six_flops_per_active_parameter() -> None:
    kimi = ModelShape(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=64,
        vocab_size=163840,
        attention="mla",
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=384,
        experts_per_token=8,
        moe_ffn_hidden_size=2048,
        shared_expert_ffn_hidden_size=2048,
        num_dense_layers=1,
    )
    without_scores = training_flops_per_token(kimi, seq_length=0)
    # "32B active" counts the embedding, which does no FLOPs: 1.2B of it
    assert without_scores / 6 == pytest.approx(31.7e9, rel=0.02)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_query_groups", {"num_query_groups": 0}),
        ("head_dim", {"head_dim": 0}),
        ("kv_lora_rank", {"attention": "mla"}),
        ("experts_per_token", {"num_experts": 4, "moe_ffn_hidden_size": 5}),
        ("moe_ffn_hidden_size", {"num_experts": 4, "experts_per_token": 1}),
        ("ffn_hidden_size", {"ffn_hidden_size": 0}),
        ("num_dense_layers", {"num_dense_layers": 3}),
    ],
)
def test_size_that_is_left_out_counts_as_nothing(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"^{field} "):
        dataclasses.replace(GQA, **changes)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_device_that_is_taken_for_another_or_guessed(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


def test_utilisation_of_a_device_without_known_peak() -> None:
    arguments = {"tokens_per_s_per_gpu": 100.0, "flops_per_token": 2 * 10**12}
    assert mfu(**arguments, device_peak_flops=1e15) == pytest.approx(0.2)
    assert mfu(**arguments, device_peak_flops=None) is None
