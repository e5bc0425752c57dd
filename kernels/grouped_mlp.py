"""SwiGLU expert MLP (Shazeer, arXiv 2002.05202) over rows sorted by expert.

For a row x of expert e:  [gate | up] = gate_up[e] x,  y = down[e] (silu(gate) * up * prob).
The probability goes in after the activation, as in megatron-core, so that combining the rows of a
token is a plain sum.

Shape suffixes: R rows, E experts, H hidden dim, I intermediate dim; 2I is gate rows, then up rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .dispatch import accumulation_dtype, choose, use_grouped_mm


def grouped_swiglu(
    x_RH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    rows_per_expert: torch.Tensor,
    probs_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """The expert MLP of each row: [R, H] -> [R, H] in x's dtype.

    x: rows of expert 0, then of expert 1, ...; gate_up: [E, 2I, H]; down: [E, H, I], both in x's
    dtype; rows_per_expert: int64 [E], summing to R; probs: [R], any float dtype, 1 if None. The
    activation and the product with probs are fp32, rounded once. Differentiable in x, both weights
    and probs (fp32 dot product, in probs' dtype). Experts without rows get weight gradients of
    exactly zero, as all do for R = 0. Expert parallelism shards E and exchanges rows outside.

    Saves x, the pre-activations [R, 2I] and probs; the activation is computed again backward.
    Raises ValueError if a shape or dtype is not as above; where rows_per_expert lives on an
    accelerator, a sum other than R is a device-side assertion.
    """
    _check_operands(x_RH, gate_up_E2IH, down_EHI, rows_per_expert, probs_R)
    if choose("grouped_swiglu", x_RH) == "reference":
        return grouped_swiglu_reference(x_RH, gate_up_E2IH, down_EHI, rows_per_expert, probs_R)
    products: _Products
    if use_grouped_mm(x_RH, down_EHI.shape[2]):
        products = _GroupedMm(rows_per_expert, x_RH.shape[0])
    else:
        products = _ExpertLoop(rows_per_expert, x_RH.shape[0])
    return _GroupedSwiglu.apply(x_RH, gate_up_E2IH, down_EHI, probs_R, products)


def grouped_swiglu_reference(
    x_RH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    rows_per_expert: torch.Tensor,
    probs_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """`grouped_swiglu` expert by expert in float64; autograd's gradient."""
    x_wide = x_RH.double()
    outs = []
    start = 0
    for expert, rows in enumerate(rows_per_expert.tolist()):
        hidden = x_wide[start : start + rows] @ gate_up_E2IH[expert].double().T
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate) * up
        if probs_R is not None:
            activation = activation * probs_R[start : start + rows, None].double()
        outs.append(activation @ down_EHI[expert].double().T)
        start += rows
    return torch.cat(outs).to(x_RH.dtype)


class _Products(Protocol):
    """The two grouped matrix products that forward and backward are made of."""

    def rows(self, x_RN: torch.Tensor, weight_EMN: torch.Tensor) -> torch.Tensor:
        """y[r] = weight[expert of r] x[r]: [R, N] -> [R, M]."""
        ...

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        """The sum over each expert's rows of grad[r] x[r]^T: [E, M, N]."""
        ...


class _ExpertLoop:
    """One matrix product per expert; row counts are read back to the host."""

    def __init__(self, rows_per_expert: torch.Tensor, rows: int) -> None:
        self.counts: list[int] = rows_per_expert.tolist()
        if sum(self.counts) != rows:
            raise ValueError(
                f"grouped_swiglu: rows_per_expert sums to {sum(self.counts)} but x has {rows} rows"
            )

    def rows(self, x_RN: torch.Tensor, weight_EMN: torch.Tensor) -> torch.Tensor:
        parts = zip(x_RN.split(self.counts), weight_EMN.unbind(0), strict=True)
        return torch.cat([x @ weight.T for x, weight in parts])

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        parts = zip(grad_RM.split(self.counts), x_RN.split(self.counts), strict=True)
        # A product over no rows is zeros, so empty experts need no case of their own.
        return torch.stack([grad.T @ x for grad, x in parts])


class _GroupedMm:
    """`torch._grouped_mm`, which wants int32 row ends, 16-byte aligned operands with real strides,
    and leaves rows past the last end unwritten (hence the assertion that there are none)."""

    def __init__(self, rows_per_expert: torch.Tensor, rows: int) -> None:
        self.experts = rows_per_expert.shape[0]
        self.empty_E = rows_per_expert == 0
        self.ends_E = rows_per_expert.cumsum(0).to(torch.int32)
        torch._assert_async(self.ends_E[-1] == rows)

    def rows(self, x_RN: torch.Tensor, weight_EMN: torch.Tensor) -> torch.Tensor:
        if x_RN.shape[0] == 0:
            return x_RN.new_empty((0, weight_EMN.shape[1]))
        weight_ENM = _aligned(weight_EMN).transpose(1, 2)
        return torch._grouped_mm(_aligned(x_RN), weight_ENM, offs=self.ends_E)

    def weights(self, grad_RM: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        if x_RN.shape[0] == 0:
            return x_RN.new_zeros((self.experts, grad_RM.shape[1], x_RN.shape[1]))
        out = torch._grouped_mm(_aligned(grad_RM).T, _aligned(x_RN), offs=self.ends_E)
        if not _zeroes_empty_groups(x_RN.device):
            out.masked_fill_(self.empty_E[:, None, None], 0.0)
        return out


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RH: torch.Tensor,
        gate_up_E2IH: torch.Tensor,
        down_EHI: torch.Tensor,
        probs_R: torch.Tensor | None,
        products: _Products,
    ) -> torch.Tensor:
        hidden_R2I = products.rows(x_RH, gate_up_E2IH)
        ctx.save_for_backward(x_RH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I)
        ctx.products = products
        return products.rows(_swiglu(hidden_R2I, probs_R), down_EHI)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_RH: torch.Tensor
    ) -> tuple[
        torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None
    ]:
        x_RH, gate_up_E2IH, down_EHI, probs_R, hidden_R2I = ctx.saved_tensors
        products: _Products = ctx.products
        need_dx, need_gate_up, need_down = ctx.needs_input_grad[:3]
        grad_RH = grad_RH.contiguous()
        dx = dgate_up = ddown = None
        if need_down:
            ddown = products.weights(grad_RH, _swiglu(hidden_R2I, probs_R))
        dactivation_RI = products.rows(grad_RH, down_EHI.transpose(1, 2))
        dhidden_R2I, dprobs = _swiglu_backward(dactivation_RI, hidden_R2I, probs_R)
        if need_gate_up:
            dgate_up = products.weights(dhidden_R2I, x_RH)
        if need_dx:
            dx = products.rows(dhidden_R2I, gate_up_E2IH.transpose(1, 2))
        return dx, dgate_up, ddown, dprobs, None


def _swiglu(hidden_R2I: torch.Tensor, probs_R: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up * prob, in fp32 (or float64), rounded once."""
    gate, up = hidden_R2I.to(accumulation_dtype(hidden_R2I.dtype)).chunk(2, dim=1)
    activation = F.silu(gate) * up
    if probs_R is not None:
        activation = activation * probs_R.to(activation.dtype).unsqueeze(1)
    return activation.to(hidden_R2I.dtype)


def _swiglu_backward(
    dactivation_RI: torch.Tensor, hidden_R2I: torch.Tensor, probs_R: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(d hidden [R, 2I] in its dtype, d probs [R] in theirs) of `_swiglu`."""
    wide = accumulation_dtype(hidden_R2I.dtype)
    gate, up = hidden_R2I.to(wide).chunk(2, dim=1)
    dactivation = dactivation_RI.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dprobs = None
    if probs_R is not None:
        dprobs = (dactivation * silu * up).sum(dim=1).to(probs_R.dtype)
        dactivation = dactivation * probs_R.to(wide).unsqueeze(1)
    dhidden = torch.empty_like(hidden_R2I)
    dgate, dup = dhidden.chunk(2, dim=1)
    dup.copy_(dactivation * silu)
    # silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
    dgate.copy_(dactivation * up * (sigmoid + silu * (1 - sigmoid)))
    return dhidden, dprobs


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied where a dense layout or its 16-byte alignment is missing. A transposed weight is
    dense as it is."""
    dense = x.is_contiguous() or x.transpose(-2, -1).is_contiguous()
    if dense and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _zeroes_empty_groups(device: torch.device) -> bool:
    """Whether `torch._grouped_mm` writes zeros for the weights of an expert without rows. It does
    on Hopper and on the CPU; on Blackwell it does not (pytorch issue 172439)."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def _check_operands(
    x_RH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    rows_per_expert: torch.Tensor,
    probs_R: torch.Tensor | None,
) -> None:
    ok = x_RH.dim() == 2 and down_EHI.dim() == 3 and down_EHI.shape[0] > 0
    if ok:
        experts, hidden, intermediate = down_EHI.shape
        ok = (
            x_RH.shape[1] == hidden
            and gate_up_E2IH.shape == (experts, 2 * intermediate, hidden)
            and rows_per_expert.shape == (experts,)
            and x_RH.dtype == gate_up_E2IH.dtype == down_EHI.dtype
            and (probs_R is None or probs_R.shape == x_RH.shape[:1])
        )
    if not ok:
        probs = "none" if probs_R is None else tuple(probs_R.shape)
        raise ValueError(
            "grouped_swiglu: want x [R, H], gate_up [E, 2I, H], down [E, H, I] of one dtype, "
            f"rows_per_expert [E], probs [R]; got x {tuple(x_RH.shape)} {x_RH.dtype}, "
            f"gate_up {tuple(gate_up_E2IH.shape)} {gate_up_E2IH.dtype}, "
            f"down {tuple(down_EHI.shape)} {down_EHI.dtype}, "
            f"rows_per_expert {tuple(rows_per_expert.shape)}, probs {probs}"
        )
