"""SwiGLU of expert rows and its gradient, in torch. swiglu_triton.py has the same in Triton.

Shape suffixes: R rows, I intermediate dim; 2I is the gate columns, then the up columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .dispatch import accumulation_dtype


def swiglu(hidden_R2I: torch.Tensor, probs_R: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up * prob, in fp32 (or float64), rounded once."""
    gate, up = hidden_R2I.to(accumulation_dtype(hidden_R2I.dtype)).chunk(2, dim=1)
    activation = F.silu(gate) * up
    if probs_R is not None:
        activation = activation * probs_R.to(activation.dtype).unsqueeze(1)
    return activation.to(hidden_R2I.dtype)


def swiglu_backward(
    dactivation_RI: torch.Tensor,
    hidden_R2I: torch.Tensor,
    probs_R: torch.Tensor | None,
    dhidden_R2I: torch.Tensor,
    activation_RI: torch.Tensor | None,
    dprobs_R: torch.Tensor | None,
) -> None:
    """Writes the gradient of `swiglu` to dhidden and, where given, what `swiglu` returned and the
    gradient of probs, in fp32 (or float64)."""
    wide = accumulation_dtype(hidden_R2I.dtype)
    gate, up = hidden_R2I.to(wide).chunk(2, dim=1)
    dactivation = dactivation_RI.to(wide)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    if activation_RI is not None:
        activation_RI.copy_(swiglu(hidden_R2I, probs_R))
    if dprobs_R is not None:
        dprobs_R.copy_((dactivation * silu * up).sum(dim=1))
    if probs_R is not None:
        dactivation = dactivation * probs_R.to(wide).unsqueeze(1)
    dgate, dup = dhidden_R2I.chunk(2, dim=1)
    dup.copy_(dactivation * silu)
    # silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
    dgate.copy_(dactivation * up * (sigmoid + silu * (1 - sigmoid)))
