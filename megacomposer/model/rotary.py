"""Rotary position angles, with YaRN scaling, by position id.

Angles are looked up by position, so packed documents, micro-batches and context-parallel slices all
take the same path. Shapes: T tokens, R rotary dims.
"""

from __future__ import annotations

import math

import torch

from megacomposer.model.config import YarnConfig


def yarn_mscale(factor: float, coefficient: float) -> float:
    """Attention temperature of YaRN, eq. 22 in the form of DeepSeek-V2's `yarn_get_mscale`."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def inverse_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> torch.Tensor:
    """Angular step per position of each rotary pair, float32 [dim / 2].

    With YaRN: pairs that turn more than `beta_fast` times in the original context keep their
    frequency, those under `beta_slow` are divided by `factor`, in between a linear ramp (NTK by
    parts, arXiv 2309.00071 section 3.2).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / theta**exponents
    if yarn is None:
        return frequencies

    def pair_with_rotations(rotations: float) -> float:
        periods = yarn.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(periods) / (2 * math.log(theta))

    low = max(math.floor(pair_with_rotations(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with_rotations(yarn.beta_slow)), dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def rotary_angles(position_ids_T: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Angles in megatron-core's layout, float32 [T, 1, 1, R]: both halves of a pair repeated."""
    angles = torch.outer(position_ids_T.float(), inv_freq)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def rotate_interleaved(
    x_TBNR: torch.Tensor, angles_T11R: torch.Tensor, mscale: float
) -> torch.Tensor:
    """Rotate pairs (x[2i], x[2i + 1]) by their angle and scale by `mscale`; same shape and dtype.

    DeepSeek's convention: weights keep a pair's members side by side, the result keeps the first
    members before the second ones (queries and keys alike, so their products do not change).
    megatron-core's own function does this in 0.16 and not by default in 0.19, hence ours.
    """
    half = x_TBNR.shape[-1] // 2
    cos = (angles_T11R[..., :half].cos() * mscale).to(x_TBNR.dtype)
    sin = (angles_T11R[..., :half].sin() * mscale).to(x_TBNR.dtype)
    first, second = x_TBNR[..., 0::2], x_TBNR[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
