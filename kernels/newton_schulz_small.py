"""Newton-Schulz for matrices of at most 192 rows (attention heads), whose m x m matrices stay in
shared memory: csrc/small_newton_schulz_sm90.cu, for Hopper."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from . import sm90
from .dispatch import rows_are_aligned, use_sm90
from .newton_schulz_input_triton import row_major_copy

MAX_ROWS = 192
MAX_STEPS = 16


class _Arguments(ctypes.Structure):
    """`SmallArguments` of the C++ file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "next", "out", "scale", "partial", "q")),
        *((name, ctypes.c_long) for name in ("batch", "m", "n", "x_batch", "x_row")),
        *((name, ctypes.c_float) for name in ("gain", "gram_scale", "margin")),
        *((name, ctypes.c_int) for name in ("out_is_transposed", "out_is_bfloat16")),
        ("num_segments", ctypes.c_int),
        ("segment_steps", ctypes.c_int * MAX_STEPS),
        ("triples", ctypes.c_float * (3 * MAX_STEPS)),
    )


Segments = Sequence[Sequence[tuple[float, float, float]]]
"""The (a, b, c) of each step, cut where X and R are computed afresh."""


def takes(x: torch.Tensor, out: torch.Tensor, segments: Segments) -> bool:
    """Whether the kernels take x [B, m, n], m <= n, and out, both dense views in either order."""
    return (
        use_sm90(x)
        and out.dtype in (torch.float16, torch.bfloat16)
        and x.shape[-2] <= MAX_ROWS
        and x.shape[-1] % 8 == 0
        and (out.stride(-1) == 1 or x.shape[-2] % 8 == 0)
        and out.data_ptr() % 16 == 0
        and sum(len(segment) for segment in segments) <= MAX_STEPS
    )


def gram_form_small(
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    margin: float,
    gram_scale: float,
    gain: float,
    segments: Segments,
) -> None:
    """Writes gain * the orthogonalised matrices of x [B, m, n] to `out`, see `takes`.

    A matrix starts at norm 1 / margin, taken from the trace of X X^T. gram_scale: the power of two
    by which R is kept.
    """
    batch, m, n = x.shape
    if x.stride(-1) != 1:
        x = row_major_copy(x)
    elif not rows_are_aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    padded = -(-m // 64) * 64
    chunk_columns = sm90.library().megacomposer_small_chunk_columns()
    chunks = -(-n // chunk_columns)
    partial = x.new_empty((batch, chunks, padded, padded), dtype=torch.float32)
    q = x.new_empty((batch, padded, padded))
    scale = x.new_empty(batch, dtype=torch.float32)
    following = x.new_empty((batch, m, n)) if len(segments) > 1 else None
    values = [value for segment in segments for triple in segment for value in triple]
    arguments = _Arguments(
        x.data_ptr(),
        None if following is None else following.data_ptr(),
        out.data_ptr(),
        scale.data_ptr(),
        partial.data_ptr(),
        q.data_ptr(),
        batch,
        m,
        n,
        x.stride(0) if batch > 1 else m * n,
        x.stride(1),
        gain,
        gram_scale,
        margin,
        out.stride(-1) != 1,
        out.dtype == torch.bfloat16,
        len(segments),
        (ctypes.c_int * MAX_STEPS)(*(len(segment) for segment in segments)),
        (ctypes.c_float * (3 * MAX_STEPS))(*values),
    )
    with torch.cuda.device(x.device):
        error = sm90.library().megacomposer_run_small(
            ctypes.byref(arguments), sm90.current_stream(x.device)
        )
    sm90.check(error, f"Newton-Schulz of {tuple(x.shape)}")
