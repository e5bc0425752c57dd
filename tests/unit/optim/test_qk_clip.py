"""Which rows of which weight QK-clip scales, and by which power of the head's gamma."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megacomposer.mesh.sharding import row_layout
from megacomposer.model.config import ModelConfig
from megacomposer.optim.qk_clip import local_entries, row_entries

SIZES = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "vocab_size": 8}
MLA = ModelConfig(
    num_attention_heads=2,
    attention="mla",
    q_lora_rank=6,
    kv_lora_rank=4,
    qk_nope_head_dim=3,
    qk_rope_head_dim=2,
    v_head_dim=1,
    **SIZES,
)
GQA = ModelConfig(num_attention_heads=4, num_query_groups=2, head_dim=2, **SIZES)
# Heads as letters, then the power of gamma: 0, r for 1/2, 1.
ROWS = {
    ("mla", "linear_q_up_proj"): "ar ar ar a1 a1 br br br b1 b1",
    ("mla", "linear_q_proj"): "ar ar ar a1 a1 br br br b1 b1",
    ("mla", "linear_kv_up_proj"): "ar ar ar a0 br br br b0",
    # query, query, key, value of each group
    ("gqa", "linear_qkv"): "ar ar br br ar ar a0 a0 cr cr dr dr cr cr c0 c0",
}
UNTOUCHED = [
    "linear_kv_down_proj",
    "linear_q_down_proj",
    "linear_proj",
    "linear_fc1",
    "q_layernorm",
]


def _spelt(entries: torch.Tensor) -> str:
    return " ".join("abcd"[entry // 3] + "0r1"[entry % 3] for entry in entries.tolist())


@pytest.mark.parametrize(("kind", "leaf"), ROWS)
def test_row_takes_the_power_of_another_part_or_head(kind: str, leaf: str) -> None:
    entries = row_entries(leaf, MLA if kind == "mla" else GQA)
    assert entries is not None
    assert _spelt(entries) == ROWS[kind, leaf]


@pytest.mark.parametrize("leaf", UNTOUCHED)
def test_weight_without_a_part_in_one_heads_logits_is_scaled(leaf: str) -> None:
    assert row_entries(leaf, MLA) is None
    assert row_entries(leaf, GQA) is None


def test_one_key_per_query_head_is_a_group_of_one() -> None:
    entries = row_entries("linear_qkv", dataclasses.replace(GQA, num_query_groups=0))
    assert entries is not None
    assert _spelt(entries[::2]) == "ar ar a0 br br b0 cr cr c0 dr dr d0"


@pytest.mark.parametrize(
    ("pieces", "storage", "expected"),
    [
        ([(0, 10)], (0, 10), range(10)),
        ([(0, 10)], (7, 3), [7, 8, 9]),
        ([(5, 5)], (1, 3), [6, 7, 8]),
        ([(0, 2), (6, 2)], (1, 2), [1, 6]),
        ([(0, 10)], (10, 0), []),
    ],
    ids=["whole", "last rows", "second tensor rank", "across two pieces", "no row"],
)
def test_storage_row_takes_the_factor_of_another_global_row(pieces, storage, expected) -> None:
    layout = row_layout("weight", (10, 3), pieces, None, storage, is_primary=True)
    assert local_entries(layout, torch.arange(10)).tolist() == list(expected)
