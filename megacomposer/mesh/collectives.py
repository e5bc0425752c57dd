"""Differentiable collectives: the backward of each is the matching collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        send_rows: list[int],
        receive_rows: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.send_rows, ctx.receive_rows, ctx.group = send_rows, receive_rows, group
        return _exchange(rows, send_rows, receive_rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, ctx.receive_rows, ctx.send_rows, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, send_rows: list[int], receive_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty((sum(receive_rows), *rows.shape[1:]))
    # gloo takes the splits only as Python lists.
    dist.all_to_all_single(received, rows.contiguous(), receive_rows, send_rows, group=group)
    return received


def all_to_all_rows(
    rows: torch.Tensor, send_rows: list[int], receive_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send consecutive runs of dim 0 to the ranks of `group` and receive theirs in rank order.

    Args:
        rows: [sum(send_rows), ...]; zero rows are fine.
        send_rows: rows for each rank of the group.
        receive_rows: rows from each rank; must match what they send.

    Returns:
        [sum(receive_rows), ...]. Every rank of the group must call it, in backward too.
    """
    if group.size() == 1:
        return rows
    return _AllToAllRows.apply(rows, send_rows, receive_rows, group)


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
