"""The steps of the expert MLP between a routing map and the sum over a token's rows.

Rows may come in parts, each in expert order (grouped_products.py); a step takes those of one.
Shape suffixes: N tokens, R rows, C rows of a part, E experts, G groups, H hidden dim, B columns of
it, I intermediate dim; 2I is gate rows, then up rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from . import grouped_products_sm90, swiglu, swiglu_triton
from .grouped_products import Products, counts_within
from .grouped_weights_sm90 import weight_product
from .moe_permute import permute_into
from .moe_permute_triton import gather_rows
from .moe_routing import RoutingMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiddenGradients:
    """What the gradient of the results becomes on its way through the second product."""

    dhidden_R2I: torch.Tensor
    """Of the pre-activations, or where they are until it takes their place."""
    activation_RI: torch.Tensor | None
    """Computed again; None if nothing needs it."""
    dprobs_R: torch.Tensor | None
    """fp32 or float64; None without probs."""


class Steps(Protocol):
    """What forward and backward are made of. `rows` are those of the map's that a part has."""

    map: RoutingMap

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor,
    ) -> torch.Tensor:
        """The activation [C, I]; writes the pre-activations [C, 2I] to `hidden`."""
        ...

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        """These columns of y [C, B]."""
        ...

    in_place: bool
    """Whether down_backward writes d hidden over hidden."""

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        gradients: HiddenGradients,
        rows: slice,
    ) -> None:
        """Writes the gradients of these rows, one at least."""
        ...

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        """These columns of d x of each row [C, B]."""
        ...

    def gate_up_gradient(self, dhidden_R2I: torch.Tensor, x_NH: torch.Tensor) -> torch.Tensor:
        """The sum of d hidden[r] x[token of r]^T over each expert's rows: [E, 2I, H]."""
        ...

    def down_gradient(self, grad_NH: torch.Tensor, activation_RI: torch.Tensor) -> torch.Tensor:
        """The sum of grad[token of r] activation[r]^T over each expert's rows: [E, H, I]."""
        ...


class SeparateSteps:
    """Gather, product and SwiGLU one after the other. What is gathered takes gather_bytes at most,
    if a row or 64 columns do: of all rows some columns, or all columns of some rows."""

    def __init__(
        self,
        map: RoutingMap,
        products: Products,
        experts: int,
        gather_bytes: int,
        *,
        in_triton: bool,
    ) -> None:
        self.map, self.products, self.experts = map, products, experts
        self._gather_bytes = gather_bytes
        # torch's formula of SwiGLU's gradient reads hidden after it has written.
        self._in_triton = self.in_place = in_triton
        self._swiglu = swiglu_triton if in_triton else swiglu

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor,
    ) -> torch.Tensor:
        for some in self._ranges(rows, x_NH):
            x = self._gather_range(x_NH, some)
            inside = slice(some.start - rows.start, some.stop - rows.start)
            hidden_C2I[inside] = self.products.rows(x, gate_up_E2IH, some.start)
            del x
        return self._swiglu.swiglu(hidden_C2I, probs_C)

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        return self.products.rows(activation_CI, down_EHI[:, columns], rows.start)

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        gradients: HiddenGradients,
        rows: slice,
    ) -> None:
        for some in self._ranges(rows, grad_NH):
            dy = self._gather_range(grad_NH, some)
            dactivation = self.products.rows(dy, down_EHI.transpose(1, 2), some.start)
            del dy
            self._swiglu.swiglu_backward(
                dactivation, hidden_R2I[some], None if probs_R is None else probs_R[some],
                gradients.dhidden_R2I[some],
                None if gradients.activation_RI is None else gradients.activation_RI[some],
                None if gradients.dprobs_R is None else gradients.dprobs_R[some],
            )  # fmt: skip

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        weight_EB2I = gate_up_E2IH[:, :, columns].transpose(1, 2)
        return self.products.rows(dhidden_C2I, weight_EB2I, rows.start)

    def gate_up_gradient(self, dhidden_R2I: torch.Tensor, x_NH: torch.Tensor) -> torch.Tensor:
        shape = (self.experts, dhidden_R2I.shape[1], x_NH.shape[1])
        return self._side_by_side(
            lambda x_RB: self.products.weights(dhidden_R2I, x_RB), x_NH, shape, dim=2
        )

    def down_gradient(self, grad_NH: torch.Tensor, activation_RI: torch.Tensor) -> torch.Tensor:
        shape = (self.experts, grad_NH.shape[1], activation_RI.shape[1])
        return self._side_by_side(
            lambda dy_RB: self.products.weights(dy_RB, activation_RI), grad_NH, shape, dim=1
        )

    def _side_by_side(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x_NH: torch.Tensor,
        shape: tuple[int, int, int],
        *,
        dim: int,
    ) -> torch.Tensor:
        """product(blocks of columns of the token of every row), put together along `dim` of
        [E, M, N]. One block is not copied."""
        blocks = column_blocks(self.map.order.shape[0], x_NH, self._gather_bytes)
        if len(blocks) == 1:
            return product(self._gather(x_NH))
        out = x_NH.new_empty(shape)
        for columns in blocks:
            block = product(self._gather(x_NH[:, columns]))
            out.narrow(dim, columns.start, block.shape[dim]).copy_(block)
        return out

    def _ranges(self, rows: slice, x_NH: torch.Tensor) -> list[slice]:
        """Ranges of rows [*, H] of one row at least."""
        row_bytes = max(1, x_NH.shape[1] * x_NH.element_size())
        most = max(1, self._gather_bytes // row_bytes)
        starts = range(rows.start, rows.stop, most)
        return [slice(start, min(start + most, rows.stop)) for start in starts]

    def _gather(self, x_NB: torch.Tensor) -> torch.Tensor:
        """The token of every row."""
        out_RB = x_NB.new_empty((self.map.order.shape[0], x_NB.shape[1]))
        permute_into(out_RB, x_NB, self.map)
        return out_RB

    def _gather_range(self, x_NH: torch.Tensor, rows: slice) -> torch.Tensor:
        if not self._in_triton:
            return x_NH.index_select(0, self.map.token_of_row[rows])
        if rows.start == 0 and rows.stop == self.map.order.shape[0]:
            return self._gather(x_NH)
        return gather_rows(x_NH, self.map.token_of_row[rows])


class FusedSteps:
    """Gather and SwiGLU inside of the products of grouped_products_sm90.py, for bfloat16."""

    in_place = True

    def __init__(self, map: RoutingMap, experts: int) -> None:
        self.map, self.experts = map, experts
        self._ends_G = map.rows_per_expert.cumsum(0)
        self._counts_of: dict[tuple[int, int], torch.Tensor] = {}
        torch._assert_async(self._ends_G[-1] == map.order.shape[0])

    def gate_up_gradient(self, dhidden_R2I: torch.Tensor, x_NH: torch.Tensor) -> torch.Tensor:
        return weight_product(
            dhidden_R2I, x_NH, self.map.rows_per_expert, self.experts,
            right_source=self.map.token_of_row,
        )  # fmt: skip

    def down_gradient(self, grad_NH: torch.Tensor, activation_RI: torch.Tensor) -> torch.Tensor:
        return weight_product(
            grad_NH, activation_RI, self.map.rows_per_expert, self.experts,
            left_source=self.map.token_of_row,
        )  # fmt: skip

    def up(
        self,
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        probs_C: torch.Tensor | None,
        rows: slice,
        hidden_C2I: torch.Tensor,
    ) -> torch.Tensor:
        _, activation_CI = grouped_products_sm90.gate_up_product(
            x_NH, gate_up_E2IH, self._counts(rows), source=self.map.token_of_row[rows],
            prob=None if probs_C is None else probs_C.float(), hidden=hidden_C2I,
        )  # fmt: skip
        return activation_CI

    def down(
        self, activation_CI: torch.Tensor, down_EHI: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        return grouped_products_sm90.down_product(
            activation_CI, down_EHI[:, columns], self._counts(rows)
        )

    def down_backward(
        self,
        grad_NH: torch.Tensor,
        down_EHI: torch.Tensor,
        hidden_R2I: torch.Tensor,
        probs_R: torch.Tensor | None,
        gradients: HiddenGradients,
        rows: slice,
    ) -> None:
        activation_RI = gradients.activation_RI
        _, _, dprobs_C = grouped_products_sm90.down_backward(
            grad_NH, down_EHI, hidden_R2I[rows], self._counts(rows),
            source=self.map.token_of_row[rows],
            prob=None if probs_R is None else probs_R[rows].float(),
            dhidden=gradients.dhidden_R2I[rows],
            activation=None if activation_RI is None else activation_RI[rows],
        )  # fmt: skip
        if gradients.dprobs_R is not None:
            gradients.dprobs_R[rows] = dprobs_C

    def dx(
        self, dhidden_C2I: torch.Tensor, gate_up_E2IH: torch.Tensor, rows: slice, columns: slice
    ) -> torch.Tensor:
        return grouped_products_sm90.dx_product(
            dhidden_C2I, gate_up_E2IH[:, :, columns], self._counts(rows)
        )

    def _counts(self, rows: slice) -> torch.Tensor:
        """How many of the part's rows each expert has, int64 [E]."""
        if self.map.rows_per_expert.shape[0] == self.experts:
            return self.map.rows_per_expert
        key = (rows.start, rows.stop)
        if key not in self._counts_of:
            self._counts_of[key] = counts_within(self._ends_G, *key, self.experts)
        return self._counts_of[key]


def column_blocks(rows: int, x_NH: torch.Tensor, most_bytes: int) -> list[slice]:
    """Columns of x, in blocks of at most most_bytes for that many rows, but 64 columns at least:
    multiples of 256, what a tile of the products has, or of 64, which keeps the alignment that they
    need."""
    width = x_NH.shape[1]
    most = most_bytes // max(1, rows * x_NH.element_size())
    if most >= width:
        return [slice(0, width)]
    unit = 256 if most >= 256 else 64
    blocks = -(-width // max(unit, most // unit * unit))
    step = -(-width // (unit * blocks)) * unit
    return [slice(first, min(first + step, width)) for first in range(0, width, step)]
