"""The CUDA C++ kernel of csrc/batched_products_sm90.cu, for Hopper, loaded through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from . import sm90
from .batched_products import Product


class _Arguments(ctypes.Structure):
    """`ProductArguments` of the C++ file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "c", "out", "scale")),
        *((name, ctypes.c_long) for name in ("batch", "m", "n", "k")),
        *(
            (f"{name}_{stride}", ctypes.c_long)
            for name in ("a", "b", "c", "out")
            for stride in ("batch", "stride")
        ),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "diagonal")),
        *((name, ctypes.c_int) for name in ("is_symmetric", "is_bfloat16", "a_rows", "b_rows")),
        *((name, ctypes.c_int) for name in ("a_lower", "b_lower", "out_lower")),
    )


def run_products_sm90(products: Sequence[Product], *, reserved_sms: int = 0) -> None:
    """Products of float16 operands with `out` along rows, in one launch for each 16 or so.

    `reserved_sms` multiprocessors are left to other streams, such as a collective's. Raises
    ValueError if no pair is left.
    """
    if reserved_sms + 2 > sm90.multiprocessors(products[0].a.device):
        raise ValueError(f"reserved_sms={reserved_sms} leaves no pair of multiprocessors")
    limit = sm90.library().megacomposer_max_products()
    for start in range(0, len(products), limit):
        _launch(products[start : start + limit], reserved_sms)


def _launch(products: Sequence[Product], reserved_sms: int) -> None:
    device = products[0].a.device
    arguments = (_Arguments * len(products))(*(_arguments(product) for product in products))
    with torch.cuda.device(device):
        error = sm90.library().megacomposer_run_products(
            arguments,
            len(products),
            sm90.multiprocessors(device) - reserved_sms,
            sm90.current_stream(device),
        )
    if error:
        shapes = [(tuple(p.a.shape), tuple(p.b.shape)) for p in products]
        sm90.check(error, f"batched products {shapes}")


def _arguments(product: Product) -> _Arguments:
    a, b, c, out, scale = product.a, product.b, product.c, product.out, product.matrix_scale
    a_rows, b_rows = a.stride(-1) == 1, b.stride(-2) == 1
    c_strides = (0, 0) if c is None else (_batch_stride(c), c.stride(1))
    return _Arguments(
        a.data_ptr(),
        b.data_ptr(),
        None if c is None else c.data_ptr(),
        out.data_ptr(),
        None if scale is None else scale.data_ptr(),
        a.shape[0],
        a.shape[1],
        b.shape[2],
        a.shape[2],
        _batch_stride(a),
        a.stride(1 if a_rows else 2),
        _batch_stride(b),
        b.stride(2 if b_rows else 1),
        *c_strides,
        _batch_stride(out),
        out.stride(1),
        product.alpha,
        product.beta,
        product.diagonal,
        product.symmetric,
        out.dtype == torch.bfloat16,
        a_rows,
        b_rows,
        product.lower_a,
        product.lower_b,
        product.lower_out,
    )


def _batch_stride(x: torch.Tensor) -> int:
    # a batch of one may carry any stride, and a copy descriptor wants multiples of 16 bytes
    return x.stride(0) if x.shape[0] > 1 else x.shape[-1] * x.shape[-2] * 8
