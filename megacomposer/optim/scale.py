"""How large an orthogonalised update is, by the shape of its matrix."""

from __future__ import annotations

import math


def update_scale(kind: str, rows: int, columns: int) -> float:
    """The factor on an orthogonalised matrix of `rows` outputs and `columns` inputs.

    `rms_match`: 0.2 * sqrt(max(rows, columns)). An orthogonal m x n matrix has RMS
    1 / sqrt(max(m, n)), so the update has RMS 0.2, about AdamW's (Moonlight, arXiv 2502.16982).
    `spectral`: sqrt(max(1, rows / columns)) (Keller Jordan). `none`: 1.
    """
    if kind == "rms_match":
        return 0.2 * math.sqrt(max(rows, columns))
    if kind == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    if kind == "none":
        return 1.0
    raise ValueError(f"muon_scale={kind!r} is unknown; use rms_match, spectral or none")


def gain_exponent(rows: int, columns: int) -> int:
    """j such that 2^j times an orthogonal matrix has entries of RMS about 1."""
    return round(math.log2(math.sqrt(max(rows, columns))))
