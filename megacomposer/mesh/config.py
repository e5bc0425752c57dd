"""Configuration of the parallel layout."""

from __future__ import annotations

import dataclasses

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Config):
    tp: int = 1
    """Tensor-parallel size; with tp > 1 activations are sequence-parallel too."""
    cp: int = 1
    """Context-parallel size: ranks that share one sequence. They shard parameters too."""
    ep: int = 1
    """Expert-parallel size, formed from all ranks, independent of tp and cp."""
    dense_shard: int = 0
    """Ranks that shard one replica of the dense weights, out of world / tp; 0 means all of them."""
    expert_shard: int = 0
    """Ranks that shard one replica of a rank's experts, out of world / ep; 0 means all of them."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh.{name} is {getattr(self, name)}; it must be >= 1")
        for name in ("dense_shard", "expert_shard"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"mesh.{name} is {getattr(self, name)}; give a size >= 1, or 0 for all ranks"
                )
