"""Differentiable collectives: the backward of each is the matching collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def all_gather_rows(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate dim 0 over the group; backward sums the gradients of every rank's copy.

    Args:
        rows: [n, ...], the same n on every rank of the group.

    Returns:
        [n * group size, ...] in rank order.
    """
    return rows if group.size() == 1 else _AllGatherRows.apply(rows, group)
