"""What an optimizer is to the training step and to checkpoints, and how one is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import TensorLayout
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.adamw import AdamW
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon import ShardedMuon
from megacomposer.optim.muon_reference import MuonReference


class Optimizer(Protocol):
    """Updates parameter shards in place. Not a `torch.optim.Optimizer`, which knows no shards."""

    def step(self, *, lr: float) -> None:
        """One update from `shard.local_grad`, already averaged and clipped.

        Raises ValueError, before anything changes, naming the parameters that have no gradient.
        """

    def zero_grad(self) -> None:
        """Drops every gradient (`parameter.grad = None`)."""

    def state_tensors(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """Live moments by checkpoint key `optim/<parameter>/<moment>`, float32.

        The layout has the blocks of the parameter and the key as its name. They exist from
        construction on; a checkpoint load writes into them in place.
        """
        ...

    def state_scalars(self) -> dict[str, int | float]:
        """State that is not a tensor, equal on every rank."""
        ...

    def load_state_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restores `state_scalars`; ValueError if the names differ."""

    def metrics(self) -> dict[str, float]:
        """What the last step has to report, on this rank, by registered name; often nothing."""
        ...


def build_optimizer(
    config: OptimConfig, shards: Sequence[ParameterShard], layout: Layout | None = None
) -> Optimizer:
    """The optimizer that `config.name` asks for, over these shards of all trainable parameters.

    Every rank passes the same parameters in the same order, each with its own (possibly empty)
    local storage, which must be materialised float32. `muon` needs the started layout, and is
    collective to build. Raises ValueError if there are no parameters.
    """
    if not shards:
        raise ValueError("there is no trainable parameter to optimise; is the whole model frozen?")
    names = [shard.name for shard in shards]
    assert len(set(names)) == len(names), "two parameters share a name"
    if config.name == "adamw":
        return AdamW(
            shards,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            router_lr_multiplier=config.router_lr_multiplier,
        )
    if config.name == "muon_reference":
        return MuonReference(shards, config)
    if config.name == "muon":
        if layout is None:
            raise ValueError("optim.name='muon' plans by the layout; pass it to build_optimizer")
        return ShardedMuon(shards, config, layout)
    raise ValueError(f"optim.name={config.name!r} is unknown; use adamw, muon or muon_reference")
