"""Move tokens to their expert-sorted rows, and the experts' results back.

The model moves tokens with `permute_into`, `combine_into` and `combine` without a graph, or inside
of the products; `permute` and `combine` with gradients are for layers of other makes. Both
directions are gathers, forward and backward: a token's K rows are added in the order of its
choices, in fp32, so results do not vary from run to run (no scatter-add, no atomics).
Shape suffixes: T tokens, K experts per token, R rows (T K, or fewer where pairs have none), H
hidden dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import moe_permute_triton
from .dispatch import Implementation, accumulation_dtype, choose
from .moe_routing import RoutingMap


def permute(x_TH: torch.Tensor, map: RoutingMap) -> torch.Tensor:
    """rows[r] = x[token_of_row[r]]: [T, H] -> [R, H], in x's dtype, bit-exact.

    The gradient of a token is the fp32 sum over its K rows, rounded once. Raises ValueError if x is
    not [T, H] for the map's T.
    """
    if x_TH.dim() != 2 or x_TH.shape[0] != map.num_tokens:
        raise ValueError(
            f"permute: x must be [{map.num_tokens}, H] for this map, got {tuple(x_TH.shape)}"
        )
    implementation = choose("permute", x_TH)
    if implementation == "reference":
        return permute_reference(x_TH, map)
    return _Permute.apply(x_TH, map.token_of_row, map.row_of_TK, implementation)


def permute_reference(x_TH: torch.Tensor, map: RoutingMap) -> torch.Tensor:
    """`permute` by torch indexing; its gradient is autograd's."""
    wide = accumulation_dtype(x_TH.dtype)
    return x_TH.to(wide)[map.token_of_row].to(x_TH.dtype)


def combine(
    rows_RH: torch.Tensor,
    map: RoutingMap,
    num_tokens: int,
    probs_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum_k probs[t, k] rows[row_of[t, k]] (probs 1 if None): [R, H] -> [T, H].

    The sum is in fp32 in the order of k and rounded once to the rows' dtype. Differentiable in rows
    and, if given, in probs [T, K], whose gradient is a row dot product in fp32, in probs' dtype.
    A pair without a row adds nothing. Raises ValueError if a shape does not match the map, or for
    probs with a map in which pairs have no row.
    """
    choices = map.row_of_TK.shape[1]
    if num_tokens != map.num_tokens:
        raise ValueError(f"combine: num_tokens {num_tokens} is not the map's {map.num_tokens}")
    if rows_RH.dim() != 2 or rows_RH.shape[0] != map.order.shape[0]:
        raise ValueError(
            f"combine: rows must be [{map.order.shape[0]}, H] for this map, "
            f"got {tuple(rows_RH.shape)}"
        )
    if probs_TK is not None and probs_TK.shape != map.row_of_TK.shape:
        raise ValueError(
            f"combine: probs must be [{num_tokens}, {choices}], got {tuple(probs_TK.shape)}"
        )
    if probs_TK is not None and map.order.shape[0] != map.row_of_TK.numel():
        raise ValueError("combine: probs need a map in which every pair has a row")
    implementation = choose("combine", rows_RH)
    if implementation == "reference":
        return combine_reference(rows_RH, map, num_tokens, probs_TK)
    return _Combine.apply(rows_RH, probs_TK, map, implementation)


def combine_reference(
    rows_RH: torch.Tensor,
    map: RoutingMap,
    num_tokens: int,
    probs_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """`combine` with the [T, K, H] terms written out, in fp32 (or float64); autograd's gradient."""
    assert num_tokens == map.num_tokens
    wide_RH = rows_RH.to(accumulation_dtype(rows_RH.dtype))
    terms_TKH = torch.cat([wide_RH, wide_RH.new_zeros(1, wide_RH.shape[1])])[
        map.row_of_TK.clamp(max=rows_RH.shape[0])
    ]
    if probs_TK is not None:
        terms_TKH = terms_TKH * probs_TK.to(terms_TKH.dtype).unsqueeze(-1)
    return terms_TKH.sum(dim=1).to(rows_RH.dtype)


def permute_into(out_RH: torch.Tensor, x_TH: torch.Tensor, map: RoutingMap) -> None:
    """`permute` to a dense out [R, H], without a graph."""
    if choose("permute", x_TH) == "triton":
        moe_permute_triton.spread_rows(x_TH, map.row_of_TK, None, out_RH)
    else:
        torch.index_select(x_TH, 0, map.token_of_row, out=out_RH)


def combine_into(
    out_TH: torch.Tensor, rows_RH: torch.Tensor, row_of_TK: torch.Tensor, first_row: int
) -> None:
    """`combine` without probs or graph of rows that are numbered from first_row on, to an out
    [T, H] with dense rows: columns of a wider one, for one."""
    if choose("combine", rows_RH) == "triton":
        moe_permute_triton.gather_sum(out_TH, rows_RH, row_of_TK, None, first_row)
    else:
        out_TH.copy_(_gather_sum(rows_RH, row_of_TK - first_row, None, "torch"))


def _spread(
    x_TH: torch.Tensor, row_of_TK: torch.Tensor, probs_TK: torch.Tensor | None, rows: int
) -> torch.Tensor:
    out_RH = x_TH.new_empty((rows, x_TH.shape[1]))
    return moe_permute_triton.spread_rows(x_TH, row_of_TK, probs_TK, out_RH)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        token_of_row: torch.Tensor,
        row_of_TK: torch.Tensor,
        implementation: Implementation,
    ) -> torch.Tensor:
        ctx.save_for_backward(row_of_TK)
        ctx.implementation = implementation
        if implementation == "triton":
            return _spread(x_TH, row_of_TK, None, token_of_row.shape[0])
        return x_TH.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (row_of_TK,) = ctx.saved_tensors
        return _gather_sum(grad_RH, row_of_TK, None, ctx.implementation), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        probs_TK: torch.Tensor | None,
        map: RoutingMap,
        implementation: Implementation,
    ) -> torch.Tensor:
        # The rows are needed again only for the gradient of probs.
        rows_saved = rows_RH if probs_TK is not None and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(rows_saved, probs_TK, map.order, map.token_of_row, map.row_of_TK)
        ctx.implementation = implementation
        return _gather_sum(rows_RH, map.row_of_TK, probs_TK, implementation)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_TH: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        rows_RH, probs_TK, order, token_of_row, row_of_TK = ctx.saved_tensors
        need_rows = ctx.needs_input_grad[0]
        drows = dprobs = None
        if ctx.implementation == "triton":
            if rows_RH is not None:
                drows, dprobs = moe_permute_triton.combine_gradients(
                    grad_TH, rows_RH, row_of_TK, probs_TK, need_rows=need_rows
                )
            elif need_rows:
                drows = _spread(grad_TH, row_of_TK, probs_TK, order.shape[0])
            return drows, dprobs, None, None
        if need_rows:
            drows = _row_gradients(grad_TH, probs_TK, order, token_of_row)
        if rows_RH is not None:
            dprobs = _prob_gradients(grad_TH, rows_RH, row_of_TK).to(probs_TK.dtype)
        return drows, dprobs, None, None


def _row_gradients(
    grad_TH: torch.Tensor,
    probs_TK: torch.Tensor | None,
    order: torch.Tensor,
    token_of_row: torch.Tensor,
) -> torch.Tensor:
    """d rows [R, H] = prob of the row times grad of its token, rounded once."""
    drows = grad_TH.index_select(0, token_of_row)
    if probs_TK is None:
        return drows
    prob_R = probs_TK.reshape(-1).index_select(0, order)
    return (drows * prob_R.to(accumulation_dtype(grad_TH.dtype)).unsqueeze(1)).to(grad_TH.dtype)


def _prob_gradients(
    grad_TH: torch.Tensor, rows_RH: torch.Tensor, row_of_TK: torch.Tensor
) -> torch.Tensor:
    """<rows[row_of[t, k]], grad[t]> [T, K] in fp32 (or float64)."""
    grad_wide = grad_TH.to(accumulation_dtype(grad_TH.dtype))
    columns = [
        (rows_RH.index_select(0, row_of_T) * grad_wide).sum(dim=1)
        for row_of_T in row_of_TK.unbind(1)
    ]
    return torch.stack(columns, dim=1)


def _gather_sum(
    rows_RH: torch.Tensor,
    row_of_TK: torch.Tensor,
    probs_TK: torch.Tensor | None,
    implementation: Implementation,
) -> torch.Tensor:
    """sum_k probs[t, k] rows[row_of[t, k]] in fp32 (or float64), one choice at a time."""
    if implementation == "triton":
        out_TH = rows_RH.new_empty((row_of_TK.shape[0], rows_RH.shape[1]))
        return moe_permute_triton.gather_sum(out_TH, rows_RH, row_of_TK, probs_TK)
    wide = accumulation_dtype(rows_RH.dtype)
    total_TH = rows_RH.new_zeros((row_of_TK.shape[0], rows_RH.shape[1]), dtype=wide)
    # With a strided index, torch's gather takes an element-wise path: 0.16 ms instead of about
    # 0.02 ms for [8192, 2048] bf16 on an H200.
    if rows_RH.shape[0] != row_of_TK.numel():  # a pair without a row has that of zeros
        rows_RH = torch.cat([rows_RH, rows_RH.new_zeros(1, rows_RH.shape[1])])
        row_of_TK = row_of_TK.clamp(max=rows_RH.shape[0] - 1)
    for choice, row_of_T in enumerate(row_of_TK.t().contiguous().unbind(0)):
        rows_TH = rows_RH.index_select(0, row_of_T)
        if probs_TK is None:
            total_TH += rows_TH
        else:
            total_TH.addcmul_(rows_TH.to(wide), probs_TK[:, choice, None].to(wide))
    return total_TH.to(rows_RH.dtype)
