"""The global gradient norm over shards of every kind, and clipping to it, without a host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.moments import local_gradients


@torch.no_grad()
def global_grad_norm(shards: Sequence[ParameterShard]) -> torch.Tensor:
    """The L2 norm of the whole gradient: a float32 scalar on the device, equal on every rank.

    Each element counts once, on the rank whose layout is primary for it, whichever meshes shard or
    replicate the parameter. Collective: one all-reduce over the world. Squares are summed in
    float64, so that the norm hardly depends on the sharding. An overflow or a NaN in a gradient
    gives a norm that is not finite; checking that is left to the caller.

    Raises ValueError naming the parameters that have no gradient.
    """
    if not shards:
        raise ValueError("the gradient norm of no parameters is not defined")
    gradients = local_gradients(shards)
    counted = [
        gradient
        for shard, gradient in zip(shards, gradients, strict=True)
        if shard.layout.is_primary and gradient.numel() > 0
    ]
    if counted:
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=torch.float64))
        total = norms.square().sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    return total.sqrt().to(torch.float32)


@torch.no_grad()
def clip_by_global_norm(
    shards: Sequence[ParameterShard], max_norm: float, norm: torch.Tensor
) -> None:
    """Scales every local gradient in place by min(1, max_norm / (norm + 1e-6)).

    `norm` is what `global_grad_norm` returned; the factor stays on the device. If it is NaN, so are
    the gradients afterwards.

    Raises ValueError for a `max_norm` that is not positive (for no clipping, do not call), and
    naming the parameters that have no gradient.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm={max_norm} must be positive; to turn clipping off, do not clip")
    gradients = [gradient for gradient in local_gradients(shards) if gradient.numel() > 0]
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)
