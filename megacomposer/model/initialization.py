"""Initial weights that depend on the seed and the parameter's name only, never on the layout."""

from __future__ import annotations

import hashlib
import math

import torch

from megacomposer.mesh.sharding import scatter_from_global
from megacomposer.model.config import ModelConfig
from megacomposer.model.parameters import ParameterShard

_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "experts.down")
_EMBEDDING = "embedding.word_embeddings.weight"


@torch.no_grad()
def initialize_parameters(shards: list[ParameterShard], config: ModelConfig, *, seed: int) -> None:
    """Fill every shard in place: norms 1, weights normal(0, init_std), float32.

    Weights that write to the residual stream get init_std / sqrt(2 num_layers) (GPT-2), the
    embedding embedding_init_std if it is set. Each dim-0 slice of a stacked expert weight has its
    own stream, so a rank draws its own experts only. Other parameters are drawn whole, one at a
    time. Equal bits need the same kind of device.
    """
    for shard in shards:
        if len(shard.layout.global_shape) == 1:
            shard.local.fill_(1.0)
            continue
        std = config.init_std
        if shard.name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.num_layers)
        elif shard.name == _EMBEDDING:
            std = config.embedding_init_std or std
        if shard.kind == "expert":
            _fill_experts(shard, std, seed)
        else:
            full = _draw(shard.layout.global_shape, f"{seed}:{shard.name}", std, shard.local.device)
            scatter_from_global(shard.layout, full, shard.local)


def _fill_experts(shard: ParameterShard, std: float, seed: int) -> None:
    shape, device = shard.layout.global_shape[1:], shard.local.device
    for block in shard.layout.blocks:
        for row in range(block.shape[0]):
            expert = block.global_offset[0] + row
            full = _draw(shape, f"{seed}:{shard.name}:{expert}", std, device)
            shard.local[block.local_offset[0] + row].copy_(full)


def _draw(shape: tuple[int, ...], stream: str, std: float, device: torch.device) -> torch.Tensor:
    digest = hashlib.sha256(stream.encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
