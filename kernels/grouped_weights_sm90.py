"""The weight gradients of a mixture-of-experts MLP in bfloat16: csrc/grouped_weights_sm90.cu, for
Hopper, loaded through ctypes.

Shape suffixes: R rows in expert order, T rows before they are gathered (R without an index),
E experts, M by N a weight.
"""

from __future__ import annotations

import ctypes

import torch

from . import sm90
from .grouped_products_sm90 import has_aligned_rows


class _Arguments(ctypes.Structure):
    """`WeightArguments` of the C++ file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "out", "source", "rows_per_group")),
        *((name, ctypes.c_long) for name in ("rows", "experts", "groups", "m", "n")),
        *((name, ctypes.c_long) for name in ("a_stride", "b_stride")),
        ("is_transposed", ctypes.c_int),
    )


def weight_product(
    left_TM: torch.Tensor,
    right_TN: torch.Tensor,
    rows_per_group: torch.Tensor,
    experts: int,
    *,
    left_source: torch.Tensor | None = None,
    right_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [E, M, N]: out[e] = the sum over the rows r of expert e of left[r] right[r]^T, bfloat16.

    left, right: bfloat16 with rows that `has_aligned_rows`, M and N multiples of 8. rows_per_group:
    int64 [C E] on the device, C >= 1 and C E <= 1024: rows lie in the order of the groups, and
    group g is of expert g % E. Rows beyond the counts' sum belong to none. Either operand, but not
    both, may be gathered by an index int64 [R]: its row r is then left[left_source[r]].

    Sums are float32 over all of an expert's rows, in their order, whatever the other experts have,
    and are rounded once. Those of no rows are zeros. Nothing is read back to the host.
    """
    rows = right_TN.shape[0] if right_source is None else right_source.shape[0]
    assert rows == (left_TM.shape[0] if left_source is None else left_source.shape[0])
    out = left_TM.new_empty((experts, left_TM.shape[1], right_TN.shape[1]))
    if rows == 0 or out.numel() == 0:
        return out.zero_()
    arguments = _arguments(left_TM, right_TN, rows_per_group, out, left_source, right_source, rows)
    assert arguments.groups <= sm90.library().megacomposer_max_experts()
    with torch.cuda.device(out.device):
        error = sm90.library().megacomposer_run_weights(
            ctypes.byref(arguments),
            sm90.multiprocessors(out.device),
            sm90.current_stream(out.device),
        )
    sm90.check(error, f"weight product of {rows} rows, {tuple(out.shape)}")
    return out


def _arguments(
    left_TM: torch.Tensor,
    right_TN: torch.Tensor,
    rows_per_group: torch.Tensor,
    out_EMN: torch.Tensor,
    left_source: torch.Tensor | None,
    right_source: torch.Tensor | None,
    rows: int,
) -> _Arguments:
    """The operands as the kernel takes them: where one is gathered it is `a`, and where that is
    `right`, the kernel computes the transpose of what it stores."""
    experts, groups = out_EMN.shape[0], rows_per_group.shape[0]
    assert rows < 2**31
    assert left_source is None or right_source is None
    assert groups > 0
    assert groups % experts == 0
    for operand in (left_TM, right_TN):
        assert operand.dtype == torch.bfloat16
        assert operand.shape[1] % 8 == 0
        assert has_aligned_rows(operand)
    for vector, length in (
        (rows_per_group, groups),
        (left_source, rows),
        (right_source, rows),
    ):
        assert vector is None or (vector.shape == (length,) and vector.dtype == torch.int64)
        assert vector is None or vector.is_contiguous()
    is_transposed = right_source is not None
    a, b = (right_TN, left_TM) if is_transposed else (left_TM, right_TN)
    source = right_source if is_transposed else left_source
    assert a.shape[0] > 0
    return _Arguments(
        a=a.data_ptr(),
        b=b.data_ptr(),
        out=out_EMN.data_ptr(),
        source=None if source is None else source.data_ptr(),
        rows_per_group=rows_per_group.data_ptr(),
        rows=rows,
        experts=experts,
        groups=groups,
        m=a.shape[1],
        n=b.shape[1],
        a_stride=_row_stride(a),
        b_stride=_row_stride(b),
        is_transposed=is_transposed,
    )


def _row_stride(x: torch.Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
