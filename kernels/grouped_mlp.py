"""SwiGLU expert MLP (Shazeer, arXiv 2002.05202) of a mixture-of-experts layer, tokens to tokens.

For a token x and its expert e:  [gate | up] = gate_up[e] x,  y = down[e] (silu(gate) * up * prob),
and the token's result is the sum of y over its experts. The probability goes in after the
activation, as in megatron-core, so that the sum is a plain one.

Shape suffixes: N tokens, K experts per token, R = N K rows in expert order, C rows of a part,
E experts, H hidden dim, I intermediate dim; 2I is gate rows, then up rows.

Memory: forward keeps the pre-activations, 2 R I elements, alone. Nothing of the size R H is made
where it would take more than `_GATHER_BYTES` (G below): results are made, and added, a block of
columns at a time, and the Hopper kernels gather inside. Elsewhere tokens are gathered for a range
of rows at a time or, for a weight gradient, which needs all rows at once, for a block of columns.
In bytes for half precision, beside inputs and weight gradients, and beside an exchange's buffers of
what it sends; on the right what the Hopper kernels do without, S being G / (2 H) rows:
    gate_up       6 R I + 2 N H                     G + 4 S I
    down          6 R I + 2 N H + G                 a block of the weight, where there are several
    rows back     6 R I; in torch 10, else in place G + 2 S I
    d down        6 R I                             G and a block of columns
    d x           4 R I + 2 N H + G                 a block of the weight, where there are several
    d gate_up     4 R I                             G and a block of columns
With N = 32768, H = 2048, I = 768, E = 128, K = 8 on Hopper the forward takes up to 2304 MiB, of
which 768 live on to backward, and backward about as much with the gradients of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .dispatch import (
    OVERRIDE_VARIABLE,
    accumulation_dtype,
    choose,
    use_grouped_mm,
    use_grouped_sm90,
)
from .grouped_products import ExpertLoop, GroupedMm, Products, dense
from .grouped_steps import FusedSteps, HiddenGradients, SeparateSteps, Steps, column_blocks
from .moe_permute import combine_into
from .moe_routing import RoutingMap
from .token_exchange import Arrival, OwnTokens, Part, TokenExchange

_GATHER_BYTES = 2**30


def grouped_swiglu(
    x_TH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    map: RoutingMap,
    probs_NK: torch.Tensor | None = None,
    exchange: TokenExchange | None = None,
) -> torch.Tensor:
    """out[n] = the sum over k of probs[n, k] times the MLP of x[n] by its k-th expert: [N, H].

    x: [N, H]; gate_up: [E, 2I, H]; down: [E, H, I], all in one dtype; map: of expert ids [N, K];
    probs: [N, K], any float dtype, 1 if None. The activation and its product with probs are fp32,
    rounded once, and so are the sums over a token's rows, in expert order, here and in the gradient
    of x. Differentiable in x, both weights and probs (fp32 dot product, in probs' dtype). Experts
    without rows get weight gradients of exactly zero, as all do for N = 0. A pair without a row in
    the map adds nothing, and its prob has gradient zero.

    With `exchange`, experts are spread over ranks: x [T, H] are this rank's tokens, N are those
    that came to its experts from all ranks, map and probs are of them, and the result is [T, H],
    summed over ranks. It must have been started with x. Every rank of the exchange must call this,
    and its backward. The map's rows come in the exchange's parts (grouped_products.py):
    rows_per_expert is [parts E].

    Saves the tokens [N, H], the pre-activations [R, 2I] and probs; the activation is computed again
    backward (from rounded pre-activations; inside the Hopper kernel the forward's comes from
    unrounded ones), and tokens are gathered again. In Triton the gradient of the pre-activations
    overwrites them, so a second backward through the same result (retain_graph=True) raises
    RuntimeError.

    Raises ValueError if a shape or dtype is not as above, or if MEGACOMPOSER_KERNELS asks for the
    reference with an exchange; where the map lives on an accelerator,
    rows_per_expert that sum to other than R are a device-side assertion.
    """
    if exchange is None:
        # Dense, so that every memory layout takes the same kernels and gives the same bits.
        x_TH = dense(x_TH) if x_TH.is_cuda else x_TH
        exchange = OwnTokens(x_TH, map.order.shape[0])
    arrival = exchange.started()
    x_NH = arrival.tokens_NH
    _check_operands(x_NH, gate_up_E2IH, down_EHI, map, probs_NK, len(exchange.parts))
    implementation = choose("grouped_swiglu", x_NH)
    if implementation == "reference":
        if not isinstance(exchange, OwnTokens):
            raise ValueError(
                f"{OVERRIDE_VARIABLE}=reference: the expert layer's reference runs on one rank;"
                " unset it, or use mesh.ep 1"
            )
        return grouped_swiglu_reference(x_TH, gate_up_E2IH, down_EHI, map, probs_NK)
    if x_NH.is_cuda:
        gate_up_E2IH, down_EHI = dense(gate_up_E2IH), dense(down_EHI)
    experts, _, inner = down_EHI.shape
    steps: Steps
    if use_grouped_sm90(x_NH, gate_up_E2IH, down_EHI, len(exchange.parts) * experts):
        steps = FusedSteps(map, experts)
    else:
        layout = (map.rows_per_expert, map.order.shape[0], experts)
        products: Products = (
            GroupedMm(*layout) if use_grouped_mm(x_NH, inner) else ExpertLoop(*layout)
        )
        in_triton = implementation == "triton"
        steps = SeparateSteps(map, products, experts, _GATHER_BYTES, in_triton=in_triton)
    return _GroupedSwiglu.apply(x_TH, gate_up_E2IH, down_EHI, probs_NK, steps, exchange, arrival)


def grouped_swiglu_reference(
    x_NH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    map: RoutingMap,
    probs_NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """`grouped_swiglu` expert by expert in float64; autograd's gradient."""
    x_RH = x_NH.double()[map.token_of_row]
    probs_R = None if probs_NK is None else probs_NK.double().reshape(-1)[map.order]
    outs = []
    start = 0
    for expert, rows in enumerate(map.rows_per_expert.tolist()):
        hidden = x_RH[start : start + rows] @ gate_up_E2IH[expert].double().T
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate) * up
        if probs_R is not None:
            activation = activation * probs_R[start : start + rows, None]
        outs.append(activation @ down_EHI[expert].double().T)
        start += rows
    return torch.cat(outs)[map.row_of_TK].sum(dim=1).to(x_NH.dtype)


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        down_EHI: torch.Tensor,
        probs_NK: torch.Tensor | None,
        steps: Steps,
        exchange: TokenExchange,
        arrival: Arrival,
    ) -> torch.Tensor:
        map, x_NH, results = steps.map, arrival.tokens_NH, exchange.give_back()
        probs_R = None
        if probs_NK is not None:
            probs_R = probs_NK.reshape(-1).index_select(0, map.order)
        hidden_R2I = x_NH.new_empty((map.order.shape[0], gate_up_E2IH.shape[1]))
        for index, part in enumerate(exchange.parts):
            arrival.wait(index)
            rows, probs_C = part.rows, None if probs_R is None else probs_R[part.rows]
            activation_CI = steps.up(x_NH, gate_up_E2IH, probs_C, rows, hidden_R2I[rows])
            y_columns = functools.partial(steps.down, activation_CI, down_EHI, rows)
            _write_sums(results.rows(index), y_columns, map, part)
            del activation_CI, y_columns
            results.send(index)
        ctx.save_for_backward(x_NH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I)
        ctx.steps, ctx.exchange = steps, exchange
        return results.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I = ctx.saved_tensors
        steps: Steps = ctx.steps
        exchange: TokenExchange = ctx.exchange
        need_dx, need_gate_up, need_down, need_probs = ctx.needs_input_grad[:4]
        arrival = exchange.send(grad_TH)
        grad_NH = arrival.tokens_NH
        if isinstance(exchange, OwnTokens) and grad_NH.is_cuda:
            grad_NH = dense(grad_NH)
        gradients = _empty_gradients(
            hidden_R2I, probs_R, steps, need_activation=need_down, need_probs=need_probs
        )
        for index, part in enumerate(exchange.parts):
            arrival.wait(index)
            if part.rows.start < part.rows.stop:
                steps.down_backward(grad_NH, down_EHI, hidden_R2I, probs_R, gradients, part.rows)
        if steps.in_place:
            # Written behind autograd's back: let it refuse a second backward.
            torch.autograd.graph.increment_version(hidden_R2I)
        dx = dgate_up = ddown = dprobs = None
        if gradients.activation_RI is not None:
            ddown = steps.down_gradient(grad_NH, gradients.activation_RI)
        dhidden_R2I, dprobs_R = gradients.dhidden_R2I, gradients.dprobs_R
        del gradients, grad_NH, arrival
        if need_dx:  # before the other weights' gradient, beside which it travels
            results = exchange.give_back()
            for index, part in enumerate(exchange.parts):
                rows = part.rows
                dx_columns = functools.partial(steps.dx, dhidden_R2I[rows], gate_up_E2IH, rows)
                _write_sums(results.rows(index), dx_columns, steps.map, part)
                results.send(index)
        if need_gate_up:
            dgate_up = steps.gate_up_gradient(dhidden_R2I, x_NH)
        if need_dx:
            dx = results.sum()
        if dprobs_R is not None:
            dprobs = _of_pairs(dprobs_R, steps.map).to(probs_R.dtype)
        return dx, dgate_up, ddown, dprobs, None, None, None


def _empty_gradients(
    hidden_R2I: torch.Tensor,
    probs_R: torch.Tensor | None,
    steps: Steps,
    *,
    need_activation: bool,
    need_probs: bool,
) -> HiddenGradients:
    activation_RI = dprobs_R = None
    if need_activation:
        rows, double = hidden_R2I.shape
        activation_RI = hidden_R2I.new_empty((rows, double // 2))
    if probs_R is not None and need_probs:
        dprobs_R = probs_R.new_empty(probs_R.shape, dtype=accumulation_dtype(hidden_R2I.dtype))
    return HiddenGradients(
        dhidden_R2I=hidden_R2I if steps.in_place else torch.empty_like(hidden_R2I),
        activation_RI=activation_RI,
        dprobs_R=dprobs_R,
    )


def _of_pairs(values_R: torch.Tensor, map: RoutingMap) -> torch.Tensor:
    """Each pair's value [N, K]: its row's, or zero."""
    rows = values_R.shape[0]
    if rows == map.row_of_TK.numel():
        return values_R[map.row_of_TK]
    return torch.cat([values_R, values_R.new_zeros(1)])[map.row_of_TK.clamp(max=rows)]


def _write_sums(
    out_NH: torch.Tensor, product: Callable[[slice], torch.Tensor], map: RoutingMap, part: Part
) -> None:
    """out[n] = the sum over the token's rows of the product, of which each call gives a block of
    columns. Rows are added in their own order."""
    rows_of_NK, rows = map.rising_rows_TK[part.tokens], part.rows
    for columns in column_blocks(rows.stop - rows.start, out_NH, _GATHER_BYTES):
        combine_into(out_NH[:, columns], product(columns), rows_of_NK, rows.start)


def _check_operands(
    x_NH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    map: RoutingMap,
    probs_NK: torch.Tensor | None,
    parts: int,
) -> None:
    ok = x_NH.dim() == 2 and down_EHI.dim() == 3 and down_EHI.shape[0] > 0
    if ok:
        experts, hidden, intermediate = down_EHI.shape
        ok = (
            x_NH.shape == (map.num_tokens, hidden)
            and gate_up_E2IH.shape == (experts, 2 * intermediate, hidden)
            and map.rows_per_expert.shape == (parts * experts,)
            and x_NH.dtype == gate_up_E2IH.dtype == down_EHI.dtype
            and (probs_NK is None or probs_NK.shape == map.row_of_TK.shape)
        )
    if not ok:
        probs = "none" if probs_NK is None else tuple(probs_NK.shape)
        raise ValueError(
            "grouped_swiglu: want x [N, H], gate_up [E, 2I, H], down [E, H, I] of one dtype, "
            f"probs [N, K] and a map of N tokens to E experts; got x {tuple(x_NH.shape)} "
            f"{x_NH.dtype}, gate_up {tuple(gate_up_E2IH.shape)} {gate_up_E2IH.dtype}, "
            f"down {tuple(down_EHI.shape)} {down_EHI.dtype}, probs {probs}, a map of "
            f"{tuple(map.row_of_TK.shape)} to {map.rows_per_expert.shape[0]}"
        )
