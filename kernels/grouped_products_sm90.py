"""The matrix products of a mixture-of-experts MLP in bfloat16: csrc/grouped_products_sm90.cu, for
Hopper, loaded through ctypes.

Rows are sorted by expert and rows_per_expert [E] says how many each has, on the device: nothing is
read back to the host. Counts must add up to R: rows beyond their sum are left unwritten. A product
that takes `source` int64 [R] reads row source[r] of its first operand as row r. Results are dense;
products accumulate in float32, and a row's bits do not depend on the other rows.

Shape suffixes: R rows, T rows before they are gathered (R without `source`), E experts, H hidden
dim, B consecutive ones of it, I intermediate dim; 2I is gate rows, then up rows.
"""

from __future__ import annotations

import ctypes

import torch

from . import sm90

_GATE_UP, _DOWN, _DOWN_BACKWARD, _DX = range(4)
_TILE_ROWS, _TILE_COLUMNS = 128, 256


class _Arguments(ctypes.Structure):
    """`GroupedArguments` of the C++ file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "weight", "hidden", "out", "activation")),
        *((name, ctypes.c_void_p) for name in ("prob", "dprob", "source", "rows_per_expert")),
        *((name, ctypes.c_long) for name in ("rows", "experts", "n", "k", "a_stride")),
        *((name, ctypes.c_long) for name in ("weight_stride", "weight_row_stride")),
        *((name, ctypes.c_int) for name in ("product", "cluster")),
    )


def takes(
    x_TH: torch.Tensor, gate_up_E2IH: torch.Tensor, down_EHI: torch.Tensor, groups: int
) -> bool:
    """Whether the products of this MLP run here: bfloat16 on a Hopper GPU with the library built, H
    and I multiples of 8, dense 16-byte aligned weights, at most 1024 groups of rows; x may have
    rows that lie apart, by multiples of 16 bytes."""
    weights = (gate_up_E2IH, down_EHI)
    return (
        x_TH.is_cuda
        and all(t.dtype == torch.bfloat16 for t in (x_TH, *weights))
        and sm90.is_available(x_TH.device)
        and down_EHI.shape[1] % 8 == 0
        and down_EHI.shape[2] % 8 == 0
        and all(w.is_contiguous() and w.data_ptr() % 16 == 0 for w in weights)
        and has_aligned_rows(x_TH)
        and groups <= sm90.library().megacomposer_max_experts()
    )


def gate_up_product(
    x_TH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    rows_per_expert: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [R, 2I], activation [R, I]): hidden[r] = gate_up[expert of r] x[source[r]], and
    silu(gate) * up * prob[r] of it (prob float32 [R], 1 if None) in float32 before either is
    rounded. Writes to `hidden` where it is given."""
    experts, double, hidden_dim = gate_up_E2IH.shape
    rows = _rows(x_TH, source)
    if hidden is None:
        hidden = x_TH.new_empty((rows, double))
    _check_rows(hidden, rows, double)
    activation = x_TH.new_empty((rows, double // 2))
    _launch(
        _GATE_UP,
        x_TH,
        gate_up_E2IH,
        rows_per_expert,
        n=double // 2,
        k=hidden_dim,
        out=hidden,
        activation=activation,
        source=source,
        prob=prob,
    )
    return hidden, activation


def down_product(
    activation_RI: torch.Tensor, down_EBI: torch.Tensor, rows_per_expert: torch.Tensor
) -> torch.Tensor:
    """y [R, B]: y[r] = down[expert of r] activation[r], or these columns of it."""
    experts, columns, intermediate = down_EBI.shape
    out = activation_RI.new_empty((activation_RI.shape[0], columns))
    _launch(_DOWN, activation_RI, down_EBI, rows_per_expert, n=columns, k=intermediate, out=out)
    return out


def down_backward(
    grad_TH: torch.Tensor,
    down_EHI: torch.Tensor,
    hidden_R2I: torch.Tensor,
    rows_per_expert: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    dhidden: torch.Tensor | None = None,
    activation: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(d hidden [R, 2I], activation [R, I], d prob float32 [R] or None without prob) from the
    gradient grad[source[r]] of y[r].

    The activation is computed again from hidden; the gradient of it, grad down[expert of r], stays
    in float32 and is never stored. Writes to `dhidden` and `activation` where they are given;
    dhidden may be hidden: a tile is read by the block that writes it, before it does.
    """
    experts, hidden_dim, intermediate = down_EHI.shape
    rows = _rows(grad_TH, source)
    _check_rows(hidden_R2I, rows, 2 * intermediate)
    if dhidden is None:
        dhidden = torch.empty_like(hidden_R2I)
    if activation is None:
        activation = hidden_R2I.new_empty((rows, intermediate))
    _check_rows(dhidden, rows, 2 * intermediate)
    _check_rows(activation, rows, intermediate)
    partial = None
    if prob is not None:  # of each tile of columns
        columns = -(-intermediate // _TILE_COLUMNS)
        partial = prob.new_empty((rows, columns))
    _launch(
        _DOWN_BACKWARD,
        grad_TH,
        down_EHI,
        rows_per_expert,
        n=intermediate,
        k=hidden_dim,
        out=dhidden,
        activation=activation,
        hidden=hidden_R2I,
        source=source,
        prob=prob,
        dprob=partial,
    )
    return dhidden, activation, None if partial is None else partial.sum(dim=1)


def dx_product(
    dhidden_R2I: torch.Tensor, gate_up_E2IB: torch.Tensor, rows_per_expert: torch.Tensor
) -> torch.Tensor:
    """dx [R, B]: dx[r] = d hidden[r] gate_up[expert of r], or these columns of it, of rows that are
    not yet added up."""
    experts, double, columns = gate_up_E2IB.shape
    out = dhidden_R2I.new_empty((dhidden_R2I.shape[0], columns))
    _launch(_DX, dhidden_R2I, gate_up_E2IB, rows_per_expert, n=columns, k=double, out=out)
    return out


def _launch(
    product: int,
    a: torch.Tensor,
    weight: torch.Tensor,
    rows_per_expert: torch.Tensor,
    *,
    n: int,
    k: int,
    out: torch.Tensor,
    activation: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    dprob: torch.Tensor | None = None,
) -> None:
    rows, experts = out.shape[0], weight.shape[0]
    assert rows < 2**31
    assert experts <= sm90.library().megacomposer_max_experts()
    assert a.dtype == weight.dtype == torch.bfloat16
    assert a.shape[1] == k
    assert n % 8 == 0
    assert k % 8 == 0
    assert has_aligned_rows(a)
    row_stride = weight.stride(1) if weight.shape[1] > 1 else weight.shape[2]
    # One expert has no stride, whatever is written there.
    weight_stride = weight.stride(0) if experts > 1 else weight.shape[1] * row_stride
    assert weight.stride(2) == 1 or weight.shape[2] == 1
    assert row_stride % 8 == weight_stride % 8 == 0
    assert weight.data_ptr() % 16 == 0
    for vector, length, dtype in (
        (rows_per_expert, experts, torch.int64),
        (source, rows, torch.int64),
        (prob, rows, torch.float32),
    ):
        assert vector is None or (vector.shape == (length,) and vector.dtype == dtype)
        assert vector is None or vector.is_contiguous()
    if rows == 0:
        return
    arguments = _Arguments(
        a=a.data_ptr(),
        weight=weight.data_ptr(),
        hidden=_pointer(hidden),
        out=out.data_ptr(),
        activation=_pointer(activation),
        prob=_pointer(prob),
        dprob=_pointer(dprob),
        source=_pointer(source),
        rows_per_expert=rows_per_expert.data_ptr(),
        rows=rows,
        experts=experts,
        n=n,
        k=k,
        a_stride=a.stride(0) if a.shape[0] > 1 else k,
        weight_stride=weight_stride,
        weight_row_stride=row_stride,
        product=product,
        cluster=_blocks_a_cluster(rows, experts),
    )
    with torch.cuda.device(a.device):
        error = sm90.library().megacomposer_run_grouped(
            ctypes.byref(arguments),
            sm90.multiprocessors(a.device),
            sm90.current_stream(a.device),
        )
    sm90.check(error, f"grouped product {product} of {rows} rows and {tuple(weight.shape)}")


def _blocks_a_cluster(rows: int, experts: int) -> int:
    """Two blocks load half of the weights each, but then an expert's rows are rounded up to two
    tiles."""
    return 2 if rows >= 4 * _TILE_ROWS * experts else 1


def _rows(x: torch.Tensor, source: torch.Tensor | None) -> int:
    return x.shape[0] if source is None else source.shape[0]


def _check_rows(x: torch.Tensor, rows: int, width: int) -> None:
    assert x.shape == (rows, width)
    assert x.is_contiguous()
    assert x.data_ptr() % 16 == 0
    assert x.dtype == torch.bfloat16


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Whether the rows of x [R, H] are dense and start at multiples of 16 bytes."""
    if x.dim() != 2 or x.data_ptr() % 16 != 0 or x.stride(1) != 1:
        return False
    return x.shape[0] <= 1 or (x.stride(0) >= x.shape[1] and x.stride(0) % 8 == 0)
