"""Batched products on the CPU: torch and interpreted Triton; the torch path in half precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels.batched_products import Product, run_products
from megacomposer.kernels.bench import relative_error


def test_torch_and_triton_agree_with_float64(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("batched_products_cases.py")


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32_and_rounded_once(
    dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(2, 48, 300).to(dtype) for _ in range(2))
    out = torch.empty(2, 48, 48, dtype=out_dtype)
    run_products([Product(a=a, b=b.mT, out=out, c=a[..., :48], beta=0.5, diagonal=1.0)])
    exact = a.double() @ b.double().mT + 0.5 * a[..., :48].double() + torch.eye(48)
    rounding = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}[out_dtype]
    assert relative_error(out, exact) < rounding


def test_float16_sums_above_its_range_survive_until_they_are_scaled() -> None:
    a = torch.full((1, 4, 64), 200.0, dtype=torch.float16)
    out = torch.empty(1, 4, 4, dtype=torch.float16)
    run_products([Product(a=a, b=a.mT, out=out, alpha=2.0**-10, symmetric=True)])
    assert torch.equal(out, torch.full_like(out, 64 * 200.0**2 / 2**10))
