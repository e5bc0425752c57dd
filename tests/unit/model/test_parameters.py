"""The presets' real parameters: published totals, logical matrices, and what a layout refuses."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.model import presets
from megacomposer.model.config import ModelConfig
from megacomposer.model.parameter_shapes import parameter_placements
from megacomposer.model.parameters import Matrix, logical_matrices
from megacomposer.model.spec import transformer_config
from megacomposer.runtime.config import RuntimeConfig
from runner import run_distributed

GQA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    qk_norm=True,
    vocab_size=100,
)
MODELS = {
    "tiny": presets.tiny(),
    "gqa": GQA,
    "direct queries": dataclasses.replace(presets.tiny(), q_lora_rank=0, mtp_num_layers=2),
    "smollm2_135m": presets.smollm2_135m(),
    "qwen3_30b_a3b": presets.qwen3_30b_a3b(),
    "deepseek_v3": presets.deepseek_v3(),
    "kimi_k2": presets.kimi_k2(),
}
# Without MTP. Kimi K2's report says 1.04T, its published checkpoint holds 1.026T.
PUBLISHED = {
    "smollm2_135m": 134.5e6,
    "qwen3_30b_a3b": 30.53e9,
    "deepseek_v3": 671.0e9,
    "kimi_k2": 1.026e12,
}

Shapes = dict[str, tuple[int, ...]]


def built_placements() -> dict[str, list[Placement]]:
    """Placement of every parameter of every model, which are built without their storage."""
    from megacomposer.model.gpt import GPT
    from megacomposer.model.parameters import describe_parameters
    from megacomposer.runtime.process import start_process

    # A job of one, whatever process this is.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    with start_process(RuntimeConfig()):
        # Where megatron-core puts new parameters.
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment]
        layout = Layout(MeshConfig(), world_size=1, rank=0, device_type="cpu")
        layout.start()
        found = {}
        for name, config in MODELS.items():
            model = GPT(config, layout)
            shards = describe_parameters(model, layout)
            assert sum(shard.is_router for shard in shards) == len(model.moe_layers())
            assert all(shard.layout.is_primary for shard in shards)
            found[name] = [shard.placement for shard in shards if shard.placement is not None]
            names = {placement.name for placement in found[name]}
            assert len(names) == len(shards), "two parameters share a name"
        return found


@pytest.fixture(scope="module")
def placements() -> dict[str, list[Placement]]:
    return run_distributed(built_placements, 1, init_process_group=False, timeout_s=400.0)[0]


@pytest.fixture(scope="module")
def shapes(placements: dict[str, list[Placement]]) -> dict[str, Shapes]:
    return {
        model: {placement.name: placement.global_shape for placement in found}
        for model, found in placements.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_plan_without_the_model_sees_other_parameters(
    placements: dict[str, list[Placement]], model: str
) -> None:
    config = MODELS[model]
    for split in (True, False):
        planned = parameter_placements(config, split_output_heads=split)
        assert [placement for placement, _ in planned] == placements[model]
        for placement, matrices in planned:
            assert matrices == logical_matrices(
                placement.name, placement.global_shape, config, split_output_heads=split
            )


@pytest.mark.parametrize("model", PUBLISHED)
def test_preset_has_another_size_than_its_model(shapes: dict[str, Shapes], model: str) -> None:
    config = MODELS[model]
    assert config.padded_vocab_size == config.vocab_size
    total = sum(
        math.prod(shape) for name, shape in shapes[model].items() if not name.startswith("mtp.")
    )
    assert total == pytest.approx(PUBLISHED[model], rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_logical_matrices_miss_or_repeat_an_element(shapes: dict[str, Shapes], model: str) -> None:
    without = set()
    # Layers repeat; a matrix map depends on the last part of the name and the shape only.
    kinds = {(leaf_of(name), shape): name for name, shape in shapes[model].items()}
    for (leaf, shape), name in kinds.items():
        matrices = logical_matrices(name, shape, MODELS[model])
        if matrices:
            assert tiles_once(matrices, shape), name
            assert all(matrix.rows > 1 and matrix.columns > 1 for matrix in matrices), name
        elif len(shape) > 1:
            without.add(leaf)
    assert without <= {"word_embeddings", "output_layer", "router"}


def leaf_of(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def tiles_once(matrices: tuple[Matrix, ...], shape: tuple[int, ...]) -> bool:
    """Whether the rectangles cover a tensor of `shape` exactly once, by compressed coordinates."""
    edges = []
    for dim, extent in enumerate(shape):
        cuts = {0, extent}
        for matrix in matrices:
            cuts |= {matrix.offset[dim], matrix.offset[dim] + matrix.shape[dim]}
        if min(cuts) < 0 or max(cuts) > extent:
            return False
        edges.append({cut: index for index, cut in enumerate(sorted(cuts))})
    count = torch.zeros([len(cuts) - 1 for cuts in edges], dtype=torch.int64)
    for matrix in matrices:
        cells = tuple(
            slice(edges[dim][offset], edges[dim][offset + length])
            for dim, (offset, length) in enumerate(zip(matrix.offset, matrix.shape, strict=True))
        )
        count[cells] += 1
    return bool((count == 1).all())


def test_tiling_check_that_accepts_gaps_or_overlaps() -> None:
    top, bottom = Matrix(offset=(0, 0), shape=(2, 3)), Matrix(offset=(2, 0), shape=(2, 3))
    assert tiles_once((top, bottom), (4, 3))
    assert not tiles_once((top,), (4, 3))
    assert not tiles_once((top, top), (4, 3))
    assert not tiles_once((top, Matrix(offset=(1, 0), shape=(3, 3))), (4, 3))
    assert not tiles_once((top, Matrix(offset=(2, 0), shape=(3, 3))), (4, 3))


def count_by_leaf(shapes: Shapes, config: ModelConfig) -> dict[str, set[tuple[int, Any]]]:
    """Number and shape of the matrices of each kind of parameter."""
    kinds: dict[str, set[tuple[int, Any]]] = {}
    for name, shape in shapes.items():
        matrices = logical_matrices(name, shape, config)
        if matrices:
            (extent,) = {matrix.shape for matrix in matrices}
            kinds.setdefault(leaf_of(name), set()).add((len(matrices), extent))
    return kinds


def test_latent_attention_and_experts_fall_into_heads_and_halves(
    shapes: dict[str, Shapes],
) -> None:
    found = count_by_leaf(shapes["kimi_k2"], MODELS["kimi_k2"])
    assert found == {
        "linear_q_down_proj": {(1, (1536, 7168))},
        "linear_q_up_proj": {(64, (192, 1536))},
        "linear_kv_down_proj": {(1, (576, 7168))},
        "linear_kv_up_proj": {(64, (256, 512))},
        "linear_proj": {(64, (7168, 128))},
        "linear_fc1": {(2, (18432, 7168)), (2, (2048, 7168))},
        "linear_fc2": {(1, (7168, 18432)), (1, (7168, 2048))},
        "gate_up": {(768, (1, 2048, 7168))},
        "down": {(384, (1, 7168, 2048))},
        "eh_proj": {(1, (7168, 14336))},
    }


def test_fused_query_key_value_falls_into_heads(shapes: dict[str, Shapes]) -> None:
    found = count_by_leaf(shapes["qwen3_30b_a3b"], MODELS["qwen3_30b_a3b"])
    # Each of 4 groups has 8 queries, a key and a value.
    assert found["linear_qkv"] == {(40, (128, 2048))}
    assert found["linear_proj"] == {(32, (2048, 128))}


def test_output_projection_that_shall_stay_whole_is_split(shapes: dict[str, Shapes]) -> None:
    for model in ("tiny", "gqa"):
        for name, shape in shapes[model].items():
            matrices = logical_matrices(name, shape, MODELS[model], split_output_heads=False)
            if leaf_of(name) == "linear_proj":
                assert matrices == (Matrix(offset=(0, 0), shape=shape),)
            else:
                assert matrices == logical_matrices(name, shape, MODELS[model])


def test_parameter_that_is_not_whole_heads_is_cut_anyway() -> None:
    name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    with pytest.raises(ValueError, match="linear_q_up_proj.weight has 100 rows, not 4 blocks"):
        logical_matrices(name, (100, 64), MODELS["tiny"])
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    with pytest.raises(ValueError, match="has 100 columns, not 4 heads of 32"):
        logical_matrices(name, (128, 100), MODELS["tiny"])


def test_mtp_layer_has_another_kind_than_the_last_decoder_layer(
    shapes: dict[str, Shapes],
) -> None:
    assert "mtp.0.transformer_layer.mlp.router.weight" in shapes["tiny"]
    assert "mtp.1.transformer_layer.mlp.experts.down" in shapes["direct queries"]
    assert not any("q_layernorm" in name for name in shapes["direct queries"])


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (GQA, MeshConfig(tp=8), r"num_attention_heads = 4 cannot be split over mesh\.tp = 8"),
        (GQA, MeshConfig(tp=4), r"num_query_groups = 2 cannot be split over mesh\.tp = 4"),
        (
            dataclasses.replace(GQA, num_query_groups=4, vocab_pad_multiple=10),
            MeshConfig(tp=8),
            r"num_attention_heads = 4",
        ),
        (
            dataclasses.replace(GQA, num_query_groups=4, vocab_pad_multiple=1, vocab_size=102),
            MeshConfig(tp=4),
            r"padded vocabulary \(vocab_size, vocab_pad_multiple\) = 102 cannot",
        ),
        (
            dataclasses.replace(GQA, ffn_hidden_size=65),
            MeshConfig(tp=2),
            r"ffn_hidden_size = 65 cannot",
        ),
        (
            dataclasses.replace(presets.tiny(), shared_expert_ffn_hidden_size=97),
            MeshConfig(tp=2),
            r"shared_expert_ffn_hidden_size = 97 cannot",
        ),
        (presets.kimi_k2(), MeshConfig(ep=5), r"num_experts = 384 cannot .* mesh\.ep = 5"),
        (GQA, MeshConfig(ep=2), r"mesh\.ep is 2 but the model has no experts; use mesh\.ep 1"),
    ],
)
def test_model_that_does_not_divide_over_the_layout_is_built(
    config: ModelConfig, mesh: MeshConfig, message: str
) -> None:
    world = math.lcm(mesh.tp, mesh.ep)
    layout = Layout(mesh, world_size=world, rank=0, device_type="cpu")
    with pytest.raises(ValueError, match=message):
        transformer_config(config, layout)
