"""What Newton-Schulz starts from: each matrix scaled by a power of two, cast, and its norm."""

from __future__ import annotations

import torch

from .dispatch import choose

# The largest entry of a scaled matrix lies in [2^14, 2^15): half of float16's range below its top
_TOP_EXPONENT = 15


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """2^k, float32, that brings a matrix of largest magnitude `amax` to [2^14, 2^15).

    k is clamped to [-126, 126], and is 0 where `amax` is 0 or not finite.
    """
    _, exponent = torch.frexp(amax.float())
    k = (_TOP_EXPONENT - exponent).clamp(-126, 126)
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.ldexp(torch.ones_like(amax, dtype=torch.float32), torch.where(usable, k, 0))


def scaled_cast(x: torch.Tensor, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every matrix times 2^k, `power_of_two_scale` of its largest entry, cast; and its norm.

    Args:
        x: [B, m, n], any floating dtype, unit stride in one of the last two dims.
        compute_dtype: fp16, bf16 or fp32.

    Returns:
        y: [B, m, n] in `compute_dtype`, in the memory order of x, dense.
        norm: float32 [B], `frobenius_norm(y)` to the bit.
    """
    x = x.float() if x.dtype == torch.float64 else x
    if x.numel() > 0 and choose("batched_products", x) == "triton":
        from .newton_schulz_input_triton import scaled_cast_triton

        return scaled_cast_triton(x, compute_dtype)
    if x.numel() == 0:
        return torch.empty_like(x, dtype=compute_dtype), x.new_zeros(len(x), dtype=torch.float32)
    scale = power_of_two_scale(x.float().abs().amax(dim=(-2, -1)))
    y = (x.float() * scale[:, None, None]).to(compute_dtype)
    return y, frobenius_norm(y)


def frobenius_norm(y: torch.Tensor) -> torch.Tensor:
    """float32 [B] of y [B, m, n] in fp16, bf16 or fp32, unit stride in one of the last two dims.

    Batch-invariant: the bits depend on the matrix and its memory order alone. Squares are summed
    in float32, which is enough for the entries that `scaled_cast` makes.
    """
    if y.numel() > 0 and choose("batched_products", y) == "triton":
        from .newton_schulz_input_triton import frobenius_norm_triton

        return frobenius_norm_triton(y)
    y = y.float()
    # along memory first: a reduction to one number may be split by thread count and batch size
    inner = -1 if y.stride(-1) == 1 else -2
    norm = torch.linalg.vector_norm(y, dim=inner)
    return torch.linalg.vector_norm(norm, dim=-1)
