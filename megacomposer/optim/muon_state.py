"""What both Muons keep: momentum of the matrix parameters, and AdamW for all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megacomposer.mesh.sharding import TensorLayout
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.adamw import AdamW
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.moments import local_gradients, moment_entry, new_moment


class MuonState:
    """Base of `ShardedMuon` and `MuonReference`, so that a checkpoint of one is one of the other.

    Momentum is float32 in the storage layout of its parameter, so it reshards like the parameter.
    """

    def __init__(self, shards: Sequence[ParameterShard], config: OptimConfig) -> None:
        self._shards = list(shards)
        self._config = config
        self._matrix_shards = [shard for shard in self._shards if shard.matrices]
        self._momenta = [new_moment(shard) for shard in self._matrix_shards]
        self._adamw = AdamW(
            [shard for shard in self._shards if not shard.matrices],
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            router_lr_multiplier=config.router_lr_multiplier,
        )

    def _matrix_gradients(self) -> list[Tensor]:
        """Of the matrix parameters; ValueError if any parameter, of the others too, has none."""
        gradients = local_gradients(self._shards)
        return [g for g, shard in zip(gradients, self._shards, strict=True) if shard.matrices]

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for shard in self._shards:
            shard.parameter.grad = None

    def state_tensors(self) -> dict[str, tuple[TensorLayout, Tensor]]:
        """`optim/<name>/momentum` of each matrix parameter, and AdamW's moments of the others."""
        entries = dict(
            moment_entry(shard, "momentum", momentum)
            for shard, momentum in zip(self._matrix_shards, self._momenta, strict=True)
        )
        return entries | self._adamw.state_tensors()

    def state_scalars(self) -> dict[str, int | float]:
        """`step`: how many updates were made."""
        return self._adamw.state_scalars()

    def load_state_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restores what `state_scalars` returned; ValueError if it holds anything else."""
        self._adamw.load_state_scalars(scalars)
