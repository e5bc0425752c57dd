from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.newton_schulz import (
    COEFFICIENTS,
    orthogonalize,
    orthogonalize_reference,
    step_coefficients,
)
from megacomposer.optim.config import PER_STEP_SET_STEPS

SHAPES = [(4, 16), (16, 4), (8, 8), (3, 1), (1, 5), (2, 7, 24), (2, 3, 24, 7), (33, 129)]


def _random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_exceeds_twice_that_of_the_plain_iteration(
    shape: tuple[int, ...], coefficients: str
) -> None:
    x = _random((32, *shape))  # many, since the errors of one small matrix are a matter of luck
    oracle = orthogonalize_reference(x.double(), steps=5, coefficients=coefficients)
    assert oracle.dtype == torch.float64
    plain = orthogonalize_reference(x, steps=5, coefficients=coefficients)
    result = orthogonalize(x, steps=5, coefficients=coefficients)
    assert result.shape == x.shape
    assert result.dtype == x.dtype
    assert result.is_contiguous()
    # the 2e-7 is one rounding of the result
    assert _relative_error(result, oracle) <= 2 * _relative_error(plain, oracle) + 2e-7
    assert _relative_error(result, oracle) < 5e-5


@pytest.mark.parametrize(
    ("coefficients", "margin"), [("kj", 1), ("you", 1), ("polar_express", 1.02)]
)
@pytest.mark.parametrize("shape", [(9, 30), (30, 9)])
def test_reference_is_not_the_polynomial_of_the_singular_values(
    shape: tuple[int, int], coefficients: str, margin: float
) -> None:
    x = _random(shape).double()
    u, values, vh = torch.linalg.svd(x, full_matrices=False)
    values = values / (values.square().sum().sqrt() * margin)
    for a, b, c in (COEFFICIENTS[coefficients] * 5)[:5]:
        values = a * values + b * values**3 + c * values**5
    result = orthogonalize_reference(x, steps=5, coefficients=coefficients)
    torch.testing.assert_close(result, u @ torch.diag(values) @ vh, rtol=0, atol=1e-10)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 96), (96, 24)])
def test_singular_values_are_not_brought_near_one(
    shape: tuple[int, int], coefficients: str
) -> None:
    x = _random(shape)
    result = orthogonalize(x, steps=5, coefficients=coefficients)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6
    assert values.max() < 1.3
    # the same singular vectors: U^T Y V is diagonal
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ result @ vh.mT
    assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 1e-4


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_zero_matrix_gives_nan_or_spoils_its_batch(coefficients: str) -> None:
    x = _random((3, 6, 20))
    x[1] = 0
    result = orthogonalize(x, steps=5, coefficients=coefficients)
    assert torch.equal(result[1], torch.zeros(6, 20))
    alone = orthogonalize(x[2], steps=5, coefficients=coefficients)
    assert torch.equal(result[2], alone)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("exponent", [-120, -60, -8, 8, 60, 120])
def test_scale_of_the_gradient_changes_the_update(exponent: int) -> None:
    x = _random((6, 20))
    expected = orthogonalize(x, steps=5, coefficients="you")
    scaled = orthogonalize(x * 2.0**exponent, steps=5, coefficients="you")
    assert torch.equal(scaled, expected)


def test_subnormal_gradient_gives_nan() -> None:
    result = orthogonalize(_random((6, 20)) * 1e-42, steps=5, coefficients="you")
    assert torch.isfinite(result).all()


def test_rank_deficient_matrix_diverges() -> None:
    x = _random((12, 2)) @ _random((2, 40), seed=1)
    for coefficients in COEFFICIENTS:
        result = orthogonalize(x, steps=5, coefficients=coefficients)
        assert torch.linalg.svdvals(result).max() < 1.3


@pytest.mark.parametrize("shape", [(3, 3), (4, 16), (5, 7), (33, 129), (40, 24)])
def test_result_depends_on_which_matrices_share_the_batch(shape: tuple[int, int]) -> None:
    x = _random((9, *shape))
    together = orthogonalize(x, steps=5, coefficients="you")
    for start, count in [(0, 1), (1, 4), (5, 4)]:
        part = orthogonalize(x[start : start + count], steps=5, coefficients="you")
        assert torch.equal(part, together[start : start + count])
    assert torch.equal(orthogonalize(x.flip(0), steps=5, coefficients="you").flip(0), together)
    assert torch.equal(orthogonalize(x[3], steps=5, coefficients="you"), together[3])


def test_tall_matrix_differs_from_its_transpose() -> None:
    x = _random((4, 40, 24))
    wide = orthogonalize(x.mT, steps=5, coefficients="you")
    assert torch.equal(orthogonalize(x, steps=5, coefficients="you"), wide.mT)


def test_input_is_modified_or_strides_matter() -> None:
    x = _random((4, 24, 6))
    before = x.clone()
    result = orthogonalize(x[::2, :, ::2], steps=5, coefficients="you")
    assert torch.equal(x, before)
    packed = orthogonalize(x[::2, :, ::2].contiguous(), steps=5, coefficients="you")
    assert torch.equal(result, packed)


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (0, 8), (8, 0)])
def test_empty_batch_or_matrix_raises(shape: tuple[int, ...]) -> None:
    for op in (orthogonalize, orthogonalize_reference):
        assert op(torch.zeros(shape), steps=5, coefficients="you").shape == shape


def test_wrong_request_is_accepted() -> None:
    x = _random((4, 8))
    for op in (orthogonalize, orthogonalize_reference):
        with pytest.raises(ValueError, match="'quintic' is unknown"):
            op(x, steps=5, coefficients="quintic")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="defines 5"):
            op(x, steps=6, coefficients="you")
        with pytest.raises(ValueError, match="at least 1"):
            op(x, steps=0, coefficients="kj")
    with pytest.raises(ValueError, match="matrices"):
        orthogonalize(x[0], steps=5, coefficients="kj")


def test_step_count_of_the_sets_disagrees_with_the_config() -> None:
    for name in ("you", "polar_express"):
        assert len(step_coefficients(name, PER_STEP_SET_STEPS)) == PER_STEP_SET_STEPS
        with pytest.raises(ValueError, match="defines 5"):
            step_coefficients(name, PER_STEP_SET_STEPS + 1)
    assert step_coefficients("kj", 7) == ((3.4445, -4.7750, 2.0315),) * 7
