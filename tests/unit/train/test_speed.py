"""Throughput accounting: what a token costs and how long attention spans."""

from __future__ import annotations

import pytest
import torch

from megacomposer.data.batch import Batch
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.model import presets
from megacomposer.model.config import ModelConfig
from megacomposer.observe.flops import training_flops_per_token
from megacomposer.train.speed import SpeedMeter, attended_length, model_shape

PRESETS = {
    preset.__name__: preset
    for preset in (
        presets.tiny,
        presets.smollm2_135m,
        presets.qwen3_30b_a3b,
        presets.deepseek_v3,
        presets.kimi_k2,
    )
}
# Parameters that a token passes through, in billions, by the models' own reports.
ACTIVE_BILLIONS = {
    "smollm2_135m": 0.1345,
    "qwen3_30b_a3b": 3.3,
    "deepseek_v3": 37.0,
    "kimi_k2": 32.0,
}


def batch_of(*lengths: int) -> Batch:
    tokens = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Batch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        labels=torch.zeros(tokens, dtype=torch.int64),
        loss_mask=torch.zeros(tokens, dtype=torch.bool),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=bounds,
    )


def test_attended_length_of_one_document_is_its_length() -> None:
    assert attended_length([batch_of(64)]) == 64
    assert attended_length([batch_of(16, 16, 16)]) == 16


def test_attended_length_weighs_documents_by_their_tokens() -> None:
    # Of 8 tokens, 2 sit in a document of 2 and 6 in one of 6: (2 * 2 + 6 * 6) / 8.
    assert attended_length([batch_of(2, 6)]) == 5
    assert attended_length([batch_of(2), batch_of(6)]) == 5


def test_attended_length_overflows_on_long_documents() -> None:
    assert attended_length([batch_of(300_000)]) == 300_000


@pytest.mark.parametrize("name", PRESETS)
def test_shape_of_a_preset_is_refused_or_loses_a_size(name: str) -> None:
    config = PRESETS[name]()
    shape = model_shape(config)
    shared = set(vars(shape)) & set(vars(config))
    implied = {"num_query_groups", "head_dim"}
    for field in shared - implied:
        assert getattr(shape, field) == getattr(config, field), field
    if config.attention == "gqa":
        assert shape.num_query_groups == config.query_groups > 0
        assert shape.head_dim == config.gqa_head_dim > 0


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_flops_of_a_token_are_six_per_active_parameter(name: str) -> None:
    shape = model_shape(PRESETS[name]())
    # At length 0 attention costs nothing, and the embedding look-up never does.
    flops = training_flops_per_token(shape, seq_length=0)
    active = ACTIVE_BILLIONS[name] * 1e9
    # The MTP layer and a tied embedding are counted on one side only: within a tenth.
    assert flops / 6 == pytest.approx(active, rel=0.1)


def test_dense_layers_of_a_dense_model_are_not_counted_as_moe() -> None:
    config = ModelConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        vocab_size=10,
        num_dense_layers=1,
    )
    assert model_shape(config).num_dense_layers == 0


def test_speed_is_divided_by_all_ranks_and_has_no_mfu_without_a_known_peak() -> None:
    config = presets.tiny()
    layout = Layout(MeshConfig(tp=2), world_size=4, rank=0, device_type="cpu")
    meter = SpeedMeter(config, layout, torch.device("cpu"))
    values = meter.metrics(num_tokens=1000, step_s=0.5, length=128)
    flops = training_flops_per_token(model_shape(config), seq_length=128)
    assert values == {
        "perf/tokens_per_s": 2000.0,
        "perf/tokens_per_s_per_gpu": 500.0,
        "perf/tflops_per_gpu": pytest.approx(500.0 * flops / 1e12),
    }
