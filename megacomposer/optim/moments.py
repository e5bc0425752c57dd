"""Moments and gradients of parameter shards, in the storage layout of the parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed.tensor  # ParameterShard finds DTensor as an attribute of torch.distributed

from megacomposer.mesh.sharding import TensorLayout
from megacomposer.model.parameters import ParameterShard


def new_moment(shard: ParameterShard) -> torch.Tensor:
    """A float32 tensor of zeros shaped as this rank's storage of the parameter."""
    local = shard.local
    assert local.dtype == torch.float32, (shard.name, local.dtype)
    assert tuple(local.shape) == shard.layout.local_shape, (shard.name, tuple(local.shape))
    return torch.zeros(shard.layout.local_shape, dtype=torch.float32, device=local.device)


def moment_entry(
    shard: ParameterShard, moment: str, tensor: torch.Tensor
) -> tuple[str, tuple[TensorLayout, torch.Tensor]]:
    """The checkpoint key of a moment, the parameter's layout under that name, and the tensor."""
    key = f"optim/{shard.name}/{moment}"
    return key, (dataclasses.replace(shard.layout, name=key), tensor)


def local_gradients(shards: Sequence[ParameterShard]) -> list[torch.Tensor]:
    """This rank's gradient of every shard, shape `layout.local_shape`, float32.

    Raises ValueError naming the parameters that have none: an update that left one out would
    diverge between ranks, or train without it, unnoticed.
    """
    gradients = [shard.local_grad for shard in shards]
    missing = [s.name for s, g in zip(shards, gradients, strict=True) if g is None]
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise ValueError(
            f"{len(missing)} of {len(shards)} parameters have no gradient: {listed}; "
            "run a backward that reaches them, or freeze them before the optimizer is built"
        )
    for shard, gradient in zip(shards, gradients, strict=True):
        assert gradient is not None
        assert gradient.dtype == torch.float32, (shard.name, gradient.dtype)
        assert tuple(gradient.shape) == shard.layout.local_shape, (shard.name, gradient.shape)
    return [gradient for gradient in gradients if gradient is not None]
