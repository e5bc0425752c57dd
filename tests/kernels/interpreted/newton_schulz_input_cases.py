"""Cases of newton_schulz_input for the interpreter, in torch and in Triton; run by
test_newton_schulz_input.py."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.newton_schulz_input import (
    frobenius_norm,
    power_of_two_scale,
    scaled_cast,
)

# Larger and smaller than a program's 2048 entries and 16 steps, in either dim.
SHAPES = [(1, 1, 1), (2, 3, 5), (3, 70, 130), (1, 1, 1100), (1, 1100, 1), (2, 100, 513)]


@pytest.fixture(autouse=True, params=["torch", "triton"])
def _path(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", request.param)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("compute_dtype", [torch.float16, torch.float32])
def test_every_entry_is_scaled_exactly_and_the_norm_is_that_of_float64(
    shape: tuple[int, int, int], transposed: bool, compute_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-20, 20, shape[0])[:, None, None]
    x = x.mT if transposed else x
    y, norm = scaled_cast(x, compute_dtype)
    scale = power_of_two_scale(x.abs().amax(dim=(1, 2)))
    assert y.dtype == compute_dtype
    assert torch.equal(y, (x * scale[:, None, None]).to(compute_dtype))
    torch.testing.assert_close(
        norm.double(), torch.linalg.matrix_norm(y.double()), rtol=3e-7, atol=0.0
    )
    assert torch.equal(frobenius_norm(y), norm)


def test_memory_order_is_kept_so_that_a_tall_view_needs_no_copy() -> None:
    x = torch.randn(2, 40, 30)
    assert scaled_cast(x, torch.float16)[0].stride() == (1200, 30, 1)
    assert scaled_cast(x.mT, torch.float16)[0].stride() == (1200, 1, 30)
    padded = torch.randn(2, 40, 60)[:, :, 10:40]
    y, norm = scaled_cast(padded, torch.float16)
    assert torch.equal(y, scaled_cast(padded.contiguous(), torch.float16)[0])
    assert torch.equal(norm, frobenius_norm(y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_input_of_any_floating_dtype_equals_its_float32_value(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 20, 40).to(dtype)
    y, norm = scaled_cast(x, torch.float32)
    y_single, norm_single = scaled_cast(x.float(), torch.float32)
    assert torch.equal(y, y_single)
    assert torch.equal(norm, norm_single)


@pytest.mark.parametrize(
    ("largest", "scaled"),
    [
        (0.0, 0.0),
        (1e-45, 2.0**-149 * 2.0**126),
        (1e-30, None),
        (1.0, 2.0**14),
        (2.0**15, 2.0**14),
        (3.4e38, None),
    ],
)
def test_largest_entry_lands_below_two_to_the_15(largest: float, scaled: float | None) -> None:
    x = torch.zeros(1, 3, 4)
    x[0, 1, 2] = -largest
    y, norm = scaled_cast(x, torch.float32)
    value = float(-y[0, 1, 2])
    assert value == scaled if scaled is not None else 2**14 <= value < 2**15
    assert float(norm) == value


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_matrix_that_is_not_finite_is_not_scaled_and_spoils_no_other(bad: float) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 20, 20)
    clean, clean_norm = scaled_cast(x, torch.float32)
    x[1, 3, 4] = bad
    y, norm = scaled_cast(x, torch.float32)
    assert torch.equal(y[1, 0], x[1, 0])
    assert not norm[1].isfinite()
    assert torch.equal(y[::2], clean[::2])
    assert torch.equal(norm[::2], clean_norm[::2])


def test_bits_do_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 33, 70)
    y, norm = scaled_cast(x, torch.float16)
    for i in range(4):
        y_i, norm_i = scaled_cast(x[i : i + 1], torch.float16)
        assert torch.equal(y_i[0], y[i])
        assert torch.equal(norm_i[0], norm[i])


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_nothing_gives_nothing(shape: tuple[int, int, int]) -> None:
    y, norm = scaled_cast(torch.empty(shape), torch.float16)
    assert y.shape == shape
    assert torch.equal(norm, torch.zeros(shape[0]))
    assert torch.equal(frobenius_norm(y), norm)
