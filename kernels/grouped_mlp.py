"""SwiGLU expert MLP (Shazeer, arXiv 2002.05202) of a mixture-of-experts layer, tokens to tokens.

For a token x and its expert e:  [gate | up] = gate_up[e] x,  y = down[e] (silu(gate) * up * prob),
and the token's result is the sum of y over its experts. The probability goes in after the
activation, as in megatron-core, so that the sum is a plain one.

Shape suffixes: N tokens, K experts per token, R = N K rows in expert order, C rows of a range,
E experts, H hidden dim, I intermediate dim; 2I is gate rows, then up rows.

Memory: forward keeps the pre-activations, 2 R I elements, alone. Nothing of the size R H is made
where it would take more than `_GATHER_BYTES` (G below): tokens are gathered, and results added, for
a range of rows at a time; the gathered operand of a weight gradient, which needs all rows at once,
for a range of columns. In bytes for half precision, beside inputs and weight gradients:
    gate_up       4 R I + 4 N H + G + 4 C I         C = G / (2 H) rows; sm90: 2 C I for G + 4 C I
    down          4 R I + 4 N H + 2 C I + G
    rows back     4 R I + 2 R I + G + 2 C I         sm90: 6 R I; in place of hidden
    d down        4 R I + 2 R I + G + a range of columns of d down
    d gate_up     4 R I + G + a range of columns of d gate_up
    d x           4 R I + 4 N H + G
With N = 32768, H = 2048, I = 768, E = 128, K = 8 and G = 256 MiB: 1472, 1376, 1504, 1504, 1216 and
1280 MiB, thus 1.47 GiB, of which 0.75 GiB live from forward to backward. Beside both weight
gradients, at the end, d x takes the most, 1.25 GiB. All rows at once would take 2.1 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .dispatch import choose, use_grouped_mm, use_grouped_sm90
from .expert_rows import RowSum
from .grouped_products import ExpertLoop, GroupedMm, Products, dense
from .grouped_steps import FusedSteps, SeparateSteps, Steps
from .moe_routing import RoutingMap

_GATHER_BYTES = 2**28


def grouped_swiglu(
    x_NH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    map: RoutingMap,
    probs_NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[n] = the sum over k of probs[n, k] times the MLP of x[n] by its k-th expert: [N, H].

    x: [N, H]; gate_up: [E, 2I, H]; down: [E, H, I], all in one dtype; map: of expert ids [N, K];
    probs: [N, K], any float dtype, 1 if None. The activation and its product with probs are fp32,
    rounded once, and so are the sums over a token's rows, in expert order, here and in the gradient
    of x. Differentiable in x, both weights and probs (fp32 dot product, in probs' dtype). Experts
    without rows get weight gradients of exactly zero, as all do for N = 0. Expert parallelism
    shards E and exchanges rows outside.

    Saves x, the pre-activations [R, 2I] and probs; the activation is computed again backward (from
    rounded pre-activations; inside the Hopper kernel the forward's comes from unrounded ones), and
    tokens are gathered again. In Triton the gradient of the pre-activations overwrites them, so a
    second backward through the same result (retain_graph=True) raises RuntimeError.

    Raises ValueError if a shape or dtype is not as above; where the map lives on an accelerator,
    rows_per_expert that sum to other than R are a device-side assertion.
    """
    _check_operands(x_NH, gate_up_E2IH, down_EHI, map, probs_NK)
    implementation = choose("grouped_swiglu", x_NH)
    if implementation == "reference":
        return grouped_swiglu_reference(x_NH, gate_up_E2IH, down_EHI, map, probs_NK)
    if x_NH.is_cuda:  # so that every layout takes the same kernels and gives the same bits
        x_NH, gate_up_E2IH, down_EHI = dense(x_NH), dense(gate_up_E2IH), dense(down_EHI)
    products: Products
    if use_grouped_mm(x_NH, down_EHI.shape[2]):
        products = GroupedMm(map.rows_per_expert, map.order.shape[0])
    else:
        products = ExpertLoop(map.rows_per_expert, map.order.shape[0])
    steps: Steps
    if use_grouped_sm90(x_NH, gate_up_E2IH, down_EHI):
        steps = FusedSteps(map, products)
    else:
        steps = SeparateSteps(map, products, in_triton=implementation == "triton")
    return _GroupedSwiglu.apply(x_NH, gate_up_E2IH, down_EHI, probs_NK, steps)


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
        x_NH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        down_EHI: torch.Tensor,
        probs_NK: torch.Tensor | None,
        steps: Steps,
    ) -> torch.Tensor:
        map = steps.map
        probs_R = None
        if probs_NK is not None:
            probs_R = probs_NK.reshape(-1).index_select(0, map.order)
        ranges, out = _row_ranges(map, x_NH), _row_sum(steps, x_NH)
        hidden_R2I = None
        if len(ranges) != 1:
            hidden_R2I = x_NH.new_empty((map.order.shape[0], gate_up_E2IH.shape[1]))
        for rows in ranges:
            part = None if hidden_R2I is None else hidden_R2I[rows]
            hidden_C2I, activation_CI = steps.up(x_NH, gate_up_E2IH, _at(probs_R, rows), rows, part)
            out.add(steps.down(activation_CI, down_EHI, rows))
            del activation_CI
        if hidden_R2I is None:
            hidden_R2I = hidden_C2I
        ctx.save_for_backward(x_NH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I)
        ctx.steps = steps
        return out.result()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_NH: torch.Tensor
    ) -> tuple[
        torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None
    ]:
        x_NH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I = ctx.saved_tensors
        steps: Steps = ctx.steps
        need_dx, need_gate_up, need_down, need_probs = ctx.needs_input_grad[:4]
        dhidden_R2I, ddown, dprobs_R = _down_gradients(
            grad_NH, down_EHI, probs_R, hidden_R2I, steps, need_down, need_probs
        )
        dx = dgate_up = dprobs = None
        if need_gate_up:
            dgate_up = _side_by_side(
                lambda part: steps.products.weights(dhidden_R2I, steps.gather(x_NH, part)),
                _column_ranges(steps.map, x_NH), gate_up_E2IH, dim=2,
            )  # fmt: skip
        if need_dx:
            dx_sum = _row_sum(steps, x_NH)
            for rows in _row_ranges(steps.map, x_NH):
                dx_sum.add(steps.dx(dhidden_R2I[rows], gate_up_E2IH, rows))
            dx = dx_sum.result()
        if dprobs_R is not None:
            dprobs = dprobs_R[steps.map.row_of_TK].to(probs_R.dtype)
        return dx, dgate_up, ddown, dprobs, None


def _down_gradients(
    grad_NH: torch.Tensor,
    down_EHI: torch.Tensor,
    probs_R: torch.Tensor | None,
    hidden_R2I: torch.Tensor,
    steps: Steps,
    need_down: bool,
    need_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the pre-activations [R, 2I], of down, and of probs in fp32 (or float64)."""
    dhidden_R2I, activation_RI, dprobs_R = steps.down_backward(
        grad_NH, down_EHI, hidden_R2I, probs_R, _row_ranges(steps.map, grad_NH),
        need_activation=need_down, need_probs=need_probs,
    )  # fmt: skip
    if dhidden_R2I is hidden_R2I:
        # Written behind autograd's back: let it refuse a second backward.
        torch.autograd.graph.increment_version(hidden_R2I)
    ddown = None
    if need_down:
        ddown = _side_by_side(
            lambda part: steps.products.weights(steps.gather(grad_NH, part), activation_RI),
            _column_ranges(steps.map, grad_NH), down_EHI, dim=1,
        )  # fmt: skip
    return dhidden_R2I, ddown, dprobs_R


def _row_sum(steps: Steps, x_NH: torch.Tensor) -> RowSum:
    """Adds up each token's rows in their own order, so that ranges do not matter to it."""
    rows_of_NK = steps.map.row_of_TK
    if rows_of_NK.shape[1] > 1:
        rows_of_NK = rows_of_NK.sort(dim=1).values
    return RowSum(x_NH, rows_of_NK, in_triton=steps.in_triton)


def _row_ranges(map: RoutingMap, x_NH: torch.Tensor) -> list[slice]:
    """Ranges of rows [C, H] of at most `_GATHER_BYTES`, of one row at least."""
    rows = map.order.shape[0]
    most = max(1, _GATHER_BYTES // max(1, x_NH.shape[1] * x_NH.element_size()))
    return [slice(first, min(first + most, rows)) for first in range(0, rows, most)]


def _column_ranges(map: RoutingMap, x_NH: torch.Tensor) -> list[slice]:
    """Ranges of columns of [R, H] of about as many bytes, each a multiple of 64 but the last, so
    that they keep the alignment that the products need."""
    rows, width = map.order.shape[0], x_NH.shape[1]
    parts = max(1, -(-rows * width * x_NH.element_size() // _GATHER_BYTES))
    step = max(1, -(-width // (64 * parts))) * 64
    return [slice(first, min(first + step, width)) for first in range(0, width, step)]


def _side_by_side(
    product: Callable[[slice], torch.Tensor], parts: list[slice], like: torch.Tensor, *, dim: int
) -> torch.Tensor:
    """product(part) for each part of `dim` of a tensor shaped as `like`. One part is not copied."""
    if len(parts) == 1:
        return product(parts[0])
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    for part in parts:
        out.narrow(dim, part.start, part.stop - part.start).copy_(product(part))
    return out


def _at(x: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return None if x is None else x[rows]


def _check_operands(
    x_NH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    map: RoutingMap,
    probs_NK: torch.Tensor | None,
) -> None:
    ok = x_NH.dim() == 2 and down_EHI.dim() == 3 and down_EHI.shape[0] > 0
    if ok:
        experts, hidden, intermediate = down_EHI.shape
        ok = (
            x_NH.shape == (map.num_tokens, hidden)
            and gate_up_E2IH.shape == (experts, 2 * intermediate, hidden)
            and map.rows_per_expert.shape == (experts,)
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
