"""Initial weights: the same on every layout, and every expert its own."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from parameter_shards import shard_of

from megacomposer.mesh.sharding import gather_to_global
from megacomposer.model import presets
from megacomposer.model.config import ModelConfig
from megacomposer.model.initialization import initialize_parameters
from megacomposer.model.parameters import ParameterShard

CONFIG = presets.tiny()
SHAPES = {
    "embedding.word_embeddings.weight": (64, 16),
    "decoder.layers.0.self_attention.linear_q_up_proj.weight": (48, 16),
    "decoder.layers.0.self_attention.linear_proj.weight": (16, 48),
    "decoder.layers.0.mlp.linear_fc1.weight": (64, 16),
    "decoder.layers.0.mlp.linear_fc2.weight": (16, 32),
    "decoder.layers.1.mlp.experts.gate_up": (6, 24, 16),
    "decoder.layers.1.mlp.experts.down": (6, 16, 12),
    "decoder.final_layernorm.weight": (16,),
}


def shards_of(tp: int, tp_rank: int, fsdp: int, fsdp_rank: int) -> list[ParameterShard]:
    """This rank's shards; experts are split over tp * fsdp ranks, unevenly."""
    shards = []
    for name, shape in SHAPES.items():
        nothing = torch.full(shape, float("nan"))
        rows, columns, kind = [(0, shape[0])], None, "dense"
        if "experts" in name:
            ranks, rank = tp * fsdp, fsdp_rank * tp + tp_rank
            part = -(-shape[0] // ranks)
            held = (min(rank * part, shape[0]), max(min(part, shape[0] - rank * part), 0))
            shards.append(shard_of(name, nothing, held, kind="expert"))
            continue
        if name.endswith("fc1.weight"):
            part = shape[0] // 2 // tp
            rows = [(i * shape[0] // 2 + tp_rank * part, part) for i in range(2)]
        elif name.endswith("q_up_proj.weight"):
            rows = [(tp_rank * (shape[0] // tp), shape[0] // tp)]
        elif len(shape) > 1:
            columns = (tp_rank * (shape[1] // tp), shape[1] // tp)
        local_rows = sum(length for _, length in rows)
        part = -(-local_rows // fsdp)
        start = min(fsdp_rank * part, local_rows)
        held = (start, min(part, local_rows - start))
        primary = len(shape) > 1 or tp_rank == 0
        shards.append(
            shard_of(
                name,
                nothing,
                held,
                row_pieces=rows,
                column_piece=columns,
                is_primary=primary,
                kind=kind,
            )
        )
    return shards


def initial(
    tp: int, fsdp: int, *, seed: int = 3, config: ModelConfig = CONFIG
) -> dict[str, torch.Tensor]:
    """The global tensors, put together from every rank's shards."""
    totals = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for tp_rank, fsdp_rank in itertools.product(range(tp), range(fsdp)):
        shards = shards_of(tp, tp_rank, fsdp, fsdp_rank)
        initialize_parameters(shards, config, seed=seed)
        for shard in shards:
            assert not bool(shard.local.isnan().any()), shard.name
            totals[shard.name] += gather_to_global(shard.layout, shard.local)
    return totals


def test_initial_weights_depend_on_the_layout() -> None:
    expected = initial(1, 1)
    for tp, fsdp in [(2, 1), (1, 3), (2, 2), (4, 3)]:
        found = initial(tp, fsdp)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, tp, fsdp)


def test_experts_start_as_copies_of_each_other() -> None:
    weights = initial(1, 1)
    for name in ("gate_up", "down"):
        experts = weights[f"decoder.layers.1.mlp.experts.{name}"].flatten(1)
        correlation = torch.corrcoef(experts) - torch.eye(len(experts))
        assert correlation.abs().max().item() < 0.3, name


def test_parameters_or_seeds_share_their_random_numbers() -> None:
    weights, others = initial(1, 1), initial(1, 1, seed=4)
    shapes = {"a.weight": (16, 48), "b.weight": (16, 48)}
    shards = [shard_of(name, torch.zeros(shape)) for name, shape in shapes.items()]
    initialize_parameters(shards, CONFIG, seed=3)
    assert not torch.equal(shards[0].local, shards[1].local)
    for name, value in weights.items():
        if value.dim() > 1:
            assert not torch.equal(value, others[name]), name


def test_residual_outputs_grow_with_depth_and_norms_do_not_start_at_one() -> None:
    weights = initial(1, 1)
    assert torch.equal(weights["decoder.final_layernorm.weight"], torch.ones(16))
    for name, value in weights.items():
        if value.dim() == 1:
            continue
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight", "experts.down"))
        expected = CONFIG.init_std / (math.sqrt(2 * CONFIG.num_layers) if residual else 1.0)
        # 512 draws or more: the standard deviation is within 5 standard errors.
        assert abs(value.std().item() / expected - 1) < 5 / math.sqrt(2 * value.numel()), name
        assert abs(value.mean().item()) < 5 * expected / math.sqrt(value.numel()), name


def test_the_embedding_s_own_deviation_reaches_other_weights_or_not_the_embedding() -> None:
    name = "embedding.word_embeddings.weight"
    config = dataclasses.replace(CONFIG, embedding_init_std=0.7)
    usual, other = (initial(1, 1, config=c) for c in (CONFIG, config))
    assert abs(other[name].std().item() / 0.7 - 1) < 5 / math.sqrt(2 * other[name].numel())
    for key in usual.keys() - {name}:
        assert torch.equal(usual[key], other[key]), key
