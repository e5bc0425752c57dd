"""Newton-Schulz orthogonalisation: the polynomial iteration that Muon applies to its momentum.

Each step maps every singular value s of X to a s + b s^3 + c s^5, with (a, b, c) from a published
set, so that a few steps bring all of them near 1 without an SVD.
"""

from __future__ import annotations

from typing import Literal

import torch

CoefficientSet = Literal["kj", "you", "polar_express"]

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/ : one triple for every step
    "kj": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng's per-step set, as used by dion, emerging-optimizers and gram-newton-schulz
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932), 5 steps, made for spectral norms up to 1 / 1.02
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}

# Polar Express needs headroom against rounding above its interval; the other sets do not
_NORM_MARGIN = {"kj": 1.0, "you": 1.0, "polar_express": 1.02}


def step_coefficients(
    coefficients: CoefficientSet, steps: int
) -> tuple[tuple[float, float, float], ...]:
    """The (a, b, c) of each of `steps` steps.

    Raises ValueError for an unknown set, and for more steps than a per-step set defines.
    """
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients={coefficients!r} is unknown; use one of {[*COEFFICIENTS]}")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    defined = COEFFICIENTS[coefficients]
    if len(defined) == 1:
        return defined * steps
    if steps > len(defined):
        raise ValueError(
            f"steps={steps}: the set {coefficients!r} defines {len(defined)}; use fewer, or 'kj'"
        )
    return defined[:steps]


def orthogonalize_reference(
    x: torch.Tensor, *, steps: int, coefficients: CoefficientSet
) -> torch.Tensor:
    """The iteration as written on paper, in float64 for float64 input and float32 for any other.

    Args:
        x: [..., m, n], wide or tall, any number of leading batch dims.

    Returns:
        [..., m, n], float64 or float32: nearly U V^T of each x = U S V^T; zeros for a zero matrix.
    """
    triples = step_coefficients(coefficients, steps)
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if x.numel() == 0:
        return torch.empty_like(x)
    is_tall = x.shape[-2] > x.shape[-1]
    x = _normalized(x.mT if is_tall else x, _NORM_MARGIN[coefficients])
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def orthogonalize(x: torch.Tensor, *, steps: int, coefficients: CoefficientSet) -> torch.Tensor:
    """Orthogonalises each matrix of `x`: float32 arithmetic on CPU, bfloat16 on CUDA.

    A matrix that is zero gives zeros. The result does not depend on the scale of a matrix beyond
    rounding: there is no epsilon, so gradients of 1e-30 are orthogonalised like any other. On CPU
    it does not depend, bit for bit, on which other matrices share the batch.

    Args:
        x: [..., m, n], wide or tall, any floating dtype and strides; not modified.

    Returns:
        [..., m, n] of `x.dtype`, contiguous.

    Raises:
        ValueError: see `step_coefficients`, or `x` has fewer than two dims.
    """
    if x.ndim < 2:
        raise ValueError(f"orthogonalize needs matrices, got a tensor of shape {tuple(x.shape)}")
    triples = step_coefficients(coefficients, steps)
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    is_tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if is_tall else x
    wide = wide.to(torch.float32).reshape(-1, *wide.shape[-2:]).contiguous()
    compute_dtype = torch.bfloat16 if x.is_cuda else torch.float32
    y = _normalized(wide, _NORM_MARGIN[coefficients]).to(compute_dtype)
    # bmm on 3-D tensors even for one matrix: the 2-D GEMM rounds small products differently
    for a, b, c in triples:
        gram = torch.bmm(y, y.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    y = y.to(x.dtype)
    return (y.mT if is_tall else y).reshape(x.shape).contiguous()


def _normalized(x: torch.Tensor, margin: float) -> torch.Tensor:
    """Each matrix of `x` ([..., m, n], float32 or float64) scaled to Frobenius norm 1 / margin.

    The largest entry is divided out first, so that the squares neither underflow nor overflow and
    the norm that follows is at least 1: clamping it there touches only the zero matrix.
    """
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / largest.clamp(min=torch.finfo(x.dtype).tiny)
    # rows first: a reduction to one number may be split by thread count and batch size
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm = torch.linalg.vector_norm(norm, dim=-2, keepdim=True)
    return x / (norm.clamp(min=1.0) * margin)
