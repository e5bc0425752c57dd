"""What Newton-Schulz is given and what an update makes of its result, in every Muon here.

A matrix goes in as cast(direction * 2^k, wire dtype), with k from its largest entry, and comes out
as u = cast(orthogonal * 2^j, wire dtype), with j from its shape, whether it travels or not: so the
numbers do not depend on the sharding. Powers of two cost no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacomposer.kernels.newton_schulz import orthogonalize_grouped
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.scale import gain_exponent, update_scale

WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalize_stacks(
    stacks: Sequence[torch.Tensor], config: OptimConfig, *, reserved_sms: int = 0
) -> list[torch.Tensor]:
    """u of each matrix of each stack [B, m, n] in the wire dtype; the same shapes and dtype."""
    return orthogonalize_grouped(
        stacks,
        steps=config.muon_ns_steps,
        coefficients=config.muon_ns_coefficients,
        form=config.muon_ns_form,
        gains=[2.0 ** gain_exponent(*stack.shape[-2:]) for stack in stacks],
        out_dtype=WIRE_DTYPES[config.muon_wire_dtype],
        reserved_sms=reserved_sms,
    )


def update_coefficient(config: OptimConfig, rows: int, columns: int, lr: float) -> float:
    """The factor on u that the parameter moves by: lr * scale * 2^-j."""
    scale = update_scale(config.muon_scale, rows, columns)
    return lr * scale * 2.0 ** -gain_exponent(rows, columns)


def decay_factor(config: OptimConfig, lr: float, *, weight_decay: bool) -> float:
    """The factor on a parameter that decays, or 1."""
    return 1.0 - lr * config.weight_decay if weight_decay else 1.0
