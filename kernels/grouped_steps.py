"""The steps of the expert MLP between a routing map and the sum over a token's rows.

Shape suffixes: N tokens, R rows in expert order, C rows of a range, E experts, H hidden dim,
I intermediate dim; 2I is gate rows, then up rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from . import grouped_products_sm90, moe_permute_triton, swiglu, swiglu_triton
from .dispatch import accumulation_dtype
from .expert_rows import gather_rows
from .grouped_products import Products, dense
from .moe_routing import RoutingMap

HiddenGradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Steps(Protocol):
    """What forward and backward are made of. `rows` is a range of the map's rows."""

    map: RoutingMap
    products: Products
    in_triton: bool
    """Whether rows are moved and added in Triton."""

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(pre-activations [C, 2I], in `hidden` where it is given; activation [C, I])."""
        ...

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        """y [C, H]."""
        ...

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        ranges: Sequence[slice],
        *,
        need_activation: bool,
        need_probs: bool,
    ) -> HiddenGradients:
        """(d hidden [R, 2I], maybe in place of hidden; the activation [R, I], if needed; d probs
        [R] in fp32 or float64, if needed and there are any)."""
        ...

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        """d x of each row [C, H]."""
        ...

    def gather(self, x_NH: torch.Tensor, columns: slice) -> torch.Tensor:
        """Those columns of the token of every row."""
        ...


class SeparateSteps:
    """Gather, product and SwiGLU one after the other."""

    def __init__(self, map: RoutingMap, products: Products, *, in_triton: bool) -> None:
        self.map, self.products, self.in_triton = map, products, in_triton
        self._swiglu = swiglu_triton if in_triton else swiglu

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product_C2I = self.products.rows(self._gather_range(x_NH, rows), gate_up_E2IH, rows.start)
        if hidden_C2I is None:
            hidden_C2I = product_C2I
        else:
            hidden_C2I.copy_(product_C2I)
        del product_C2I
        return hidden_C2I, self._swiglu.swiglu(hidden_C2I, probs_C)

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        return self.products.rows(activation_CI, down_EHI, rows.start)

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        ranges: Sequence[slice],
        *,
        need_activation: bool,
        need_probs: bool,
    ) -> HiddenGradients:
        # torch's formula reads hidden after it has written: it cannot work in place.
        dhidden_R2I = hidden_R2I if self.in_triton else torch.empty_like(hidden_R2I)
        activation_RI = dprobs_R = None
        if need_activation:
            activation_RI = hidden_R2I.new_empty((hidden_R2I.shape[0], down_EHI.shape[2]))
        if probs_R is not None and need_probs:
            wide = accumulation_dtype(hidden_R2I.dtype)
            dprobs_R = probs_R.new_empty(probs_R.shape, dtype=wide)
        for rows in ranges:
            dy_CH = self._gather_range(grad_NH, rows)
            dactivation_CI = self.products.rows(dy_CH, down_EHI.transpose(1, 2), rows.start)
            del dy_CH
            self._swiglu.swiglu_backward(
                dactivation_CI, hidden_R2I[rows], None if probs_R is None else probs_R[rows],
                dhidden_R2I[rows], None if activation_RI is None else activation_RI[rows],
                None if dprobs_R is None else dprobs_R[rows],
            )  # fmt: skip
        return dhidden_R2I, activation_RI, dprobs_R

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        return self.products.rows(dhidden_C2I, gate_up_E2IH.transpose(1, 2), rows.start)

    def gather(self, x_NH: torch.Tensor, columns: slice) -> torch.Tensor:
        if self.in_triton:
            return moe_permute_triton.spread_rows(x_NH[:, columns], self.map.row_of_TK, None)
        return x_NH[:, columns].index_select(0, self.map.token_of_row)

    def _gather_range(self, x_NH: torch.Tensor, rows: slice) -> torch.Tensor:
        if not self.in_triton:
            return x_NH.index_select(0, self.map.token_of_row[rows])
        if rows.start == 0 and rows.stop == self.map.order.shape[0]:
            return self.gather(x_NH, slice(None))
        return gather_rows(x_NH, self.map.token_of_row[rows])


class FusedSteps(SeparateSteps):
    """Gather and SwiGLU inside of the products of grouped_products_sm90.py, for bfloat16."""

    def __init__(self, map: RoutingMap, products: Products) -> None:
        super().__init__(map, products, in_triton=True)

    @functools.cached_property
    def _ends_E(self) -> torch.Tensor:
        return self.map.rows_per_expert.cumsum(0)

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped_products_sm90.gate_up_product(
            x_NH, gate_up_E2IH, self._counts(rows), source=self.map.token_of_row[rows],
            prob=None if probs_C is None else probs_C.float(), hidden=hidden_C2I,
        )  # fmt: skip

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        return grouped_products_sm90.down_product(activation_CI, down_EHI, self._counts(rows))

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        ranges: Sequence[slice],
        *,
        need_activation: bool,
        need_probs: bool,
    ) -> HiddenGradients:
        if not grouped_products_sm90.has_aligned_rows(grad_NH):
            grad_NH = dense(grad_NH)
        dhidden_R2I, activation_RI, dprobs_R = grouped_products_sm90.down_backward(
            grad_NH, down_EHI, hidden_R2I, self.map.rows_per_expert,
            source=self.map.token_of_row, prob=None if probs_R is None else probs_R.float(),
            in_place=True,
        )  # fmt: skip
        return (
            dhidden_R2I,
            activation_RI if need_activation else None,
            dprobs_R if need_probs else None,
        )

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        return grouped_products_sm90.dx_product(dhidden_C2I, gate_up_E2IH, self._counts(rows))

    def _counts(self, rows: slice) -> torch.Tensor:
        """How many rows of the range each expert has, int64 [E]."""
        if rows.start == 0 and rows.stop == self.map.order.shape[0]:
            return self.map.rows_per_expert
        ends_E = (self._ends_E - rows.start).clamp_(0, rows.stop - rows.start)
        return ends_E.diff(prepend=ends_E.new_zeros(1))
