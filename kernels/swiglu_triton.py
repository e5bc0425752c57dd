"""SwiGLU of expert rows and its gradient in Triton, one pass over memory each.

The formulas are those of swiglu.py, in fp32.
Shape suffixes: R rows, I intermediate dim; 2I is the gate columns, then the up columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A tile is 8 rows by 256 columns: two 16-byte accesses of a bf16 operand for each of 128 threads.
# Fixed, so that the order of the sum over a row is.
_TILE = {"BLOCK_R": 8, "BLOCK_I": 256, "num_warps": 4}


def swiglu(hidden_R2I: torch.Tensor, probs_R: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up * prob: [R, 2I] -> [R, I], rounded once to hidden's dtype.

    hidden: bf16, fp16 or fp32, rows dense; probs: [R], any float dtype, 1 if None.
    """
    rows, inner = hidden_R2I.shape[0], hidden_R2I.shape[1] // 2
    assert hidden_R2I.is_contiguous()
    activation_RI = hidden_R2I.new_empty((rows, inner))
    if activation_RI.numel() > 0:
        grid = (triton.cdiv(rows, _TILE["BLOCK_R"]), triton.cdiv(inner, _TILE["BLOCK_I"]))
        _forward_kernel[grid](
            hidden_R2I, *_probs(probs_R, hidden_R2I), activation_RI, rows, inner,
            HAS_PROBS=probs_R is not None, **_TILE,
        )  # fmt: skip
    return activation_RI


def swiglu_backward(
    dactivation_RI: torch.Tensor,
    hidden_R2I: torch.Tensor,
    probs_R: torch.Tensor | None,
    dhidden_R2I: torch.Tensor,
    activation_RI: torch.Tensor | None,
    dprobs_R: torch.Tensor | None,
) -> None:
    """Writes the gradient of `swiglu` to dhidden (which may be hidden itself) and, where given, the
    activation again and the gradient of probs (fp32, summed in a fixed order)."""
    rows, inner = dactivation_RI.shape
    operands = (dactivation_RI, hidden_R2I, dhidden_R2I, activation_RI)
    assert all(t is None or t.is_contiguous() for t in operands)
    if dactivation_RI.numel() == 0:
        if dprobs_R is not None:
            dprobs_R.zero_()
        return
    _backward_kernel[(triton.cdiv(rows, _TILE["BLOCK_R"]),)](
        dactivation_RI, hidden_R2I, *_probs(probs_R, hidden_R2I), dhidden_R2I,
        dhidden_R2I if activation_RI is None else activation_RI,
        dhidden_R2I if dprobs_R is None else dprobs_R,
        rows, inner, HAS_PROBS=probs_R is not None, HAS_ACTIVATION=activation_RI is not None,
        HAS_DPROBS=dprobs_R is not None, **_TILE,
    )  # fmt: skip


def _probs(probs_R: torch.Tensor | None, unused: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (unused, 0) if probs_R is None else (probs_R, probs_R.stride(0))


@triton.jit
def _forward_kernel(
    hidden_ptr,
    probs_ptr,
    probs_stride,
    activation_ptr,
    rows,
    inner,
    HAS_PROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    row_ok = row < rows
    mask = row_ok[:, None] & (column < inner)[None, :]
    start = row[:, None] * (2 * inner) + column[None, :]
    gate = tl.load(hidden_ptr + start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + start + inner, mask=mask, other=0.0).to(tl.float32)
    activation = gate * tl.sigmoid(gate) * up
    if HAS_PROBS:
        prob = tl.load(probs_ptr + row * probs_stride, mask=row_ok, other=0.0).to(tl.float32)
        activation *= prob[:, None]
    tl.store(
        activation_ptr + row[:, None] * inner + column[None, :],
        activation.to(activation_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _backward_kernel(
    dactivation_ptr,
    hidden_ptr,
    probs_ptr,
    probs_stride,
    dhidden_ptr,
    activation_ptr,
    dprobs_ptr,
    rows,
    inner,
    HAS_PROBS: tl.constexpr,
    HAS_ACTIVATION: tl.constexpr,
    HAS_DPROBS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_ok = row < rows
    prob = tl.full((BLOCK_R,), 1.0, tl.float32)
    if HAS_PROBS:
        prob = tl.load(probs_ptr + row * probs_stride, mask=row_ok, other=0.0).to(tl.float32)
    dprob = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for first in range(0, inner, BLOCK_I):
        column = first + tl.arange(0, BLOCK_I)
        mask = row_ok[:, None] & (column < inner)[None, :]
        narrow = row[:, None] * inner + column[None, :]
        wide = row[:, None] * (2 * inner) + column[None, :]
        gate = tl.load(hidden_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + wide + inner, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dactivation_ptr + narrow, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        if HAS_DPROBS:
            dprob += grad * silu * up
        if HAS_ACTIVATION:
            activation = silu * up * prob[:, None]
            tl.store(
                activation_ptr + narrow, activation.to(activation_ptr.dtype.element_ty), mask=mask
            )
        grad *= prob[:, None]
        # silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
        dgate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(dhidden_ptr + wide, dgate.to(dhidden_ptr.dtype.element_ty), mask=mask)
        tl.store(
            dhidden_ptr + wide + inner, (grad * silu).to(dhidden_ptr.dtype.element_ty), mask=mask
        )
    if HAS_DPROBS:
        tl.store(dprobs_ptr + row, tl.sum(dprob, axis=1), mask=row_ok)
