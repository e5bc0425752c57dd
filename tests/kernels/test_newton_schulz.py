"""Newton-Schulz on the CPU, also with the operands of its products rounded as on a GPU."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels import newton_schulz
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.newton_schulz import (
    COEFFICIENTS,
    orthogonalize,
    orthogonalize_grouped,
    orthogonalize_reference,
    step_coefficients,
)
from megacomposer.optim.config import PER_STEP_SET_STEPS

SHAPES = [(4, 16), (16, 4), (8, 8), (3, 1), (1, 5), (2, 7, 24), (2, 3, 24, 7), (33, 129)]


def _random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _plain(x: torch.Tensor, coefficients: str, dtype: torch.dtype) -> torch.Tensor:
    """The textbook iteration, every product rounded to `dtype`; x [B, m, n], m <= n."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.float() @ b.float()).to(dtype)

    margin = 1.02 if coefficients == "polar_express" else 1.0
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) * margin)).to(dtype)
    for a, b, c in step_coefficients(coefficients, 5):
        gram = product(x, x.mT)
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x


_DECAYS = {"decay to 1e-2": 1e-2, "decay to 1e-3": 1e-3, "decay to 1e-5": 1e-5}
_BIG = {"one big": 1, "two big": 2}
_SPECTRA = ["gauss", *_DECAYS, *_BIG]


def _with_spectrum(name: str, m: int, n: int) -> torch.Tensor:
    x = _random((3, m, n))
    if name == "gauss":
        return x
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    if name in _DECAYS:
        values = _DECAYS[name] ** torch.linspace(0, 1, m, dtype=torch.float64)
    else:
        values = torch.full((m,), 0.01, dtype=torch.float64)
        values[: _BIG[name]] = 1.0
    return ((u * values) @ vh).float()


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_exceeds_that_of_float32(shape: tuple[int, ...], coefficients: str) -> None:
    x = _random((32, *shape))  # many, since the errors of one small matrix are a matter of luck
    oracle = orthogonalize_reference(x, coefficients=coefficients)
    wide = x.mT if shape[-2] > shape[-1] else x
    plain = _plain(wide, coefficients, torch.float32)
    plain_error = relative_error(plain.mT if shape[-2] > shape[-1] else plain, oracle)
    # kj and polar_express enlarge the rounding of R, which the gram form carries along
    for form, bound in (("standard", 2 * plain_error + 2e-7), ("gram", 5e-5)):
        result = orthogonalize(x, coefficients=coefficients, form=form)
        assert result.shape == x.shape
        assert result.dtype == x.dtype
        assert result.is_contiguous()
        assert relative_error(result, oracle) <= bound, form
    assert torch.equal(orthogonalize(x, coefficients=coefficients), result)  # auto is gram


@pytest.mark.parametrize("spectrum", _SPECTRA)
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_float16_is_less_accurate_than_plain_bfloat16(coefficients: str, spectrum: str) -> None:
    """What the GPU computes, by its roundings; all sets, though only `you` is the default."""
    for m, n in ((64, 96), (128, 384)):
        x = _with_spectrum(spectrum, m, n)
        oracle = orthogonalize_reference(x, coefficients=coefficients)
        plain = relative_error(_plain(x, coefficients, torch.bfloat16), oracle)
        for form in ("gram", "standard"):
            result = orthogonalize(
                x, coefficients=coefficients, form=form, compute_dtype=torch.float16
            )
            assert relative_error(result, oracle) <= plain, (form, m, n)


@pytest.mark.parametrize("spectrum", _SPECTRA)
@pytest.mark.parametrize("coefficients", ["kj", "you"])
def test_gram_form_in_bfloat16_is_less_accurate_than_the_plain_iteration(
    coefficients: str, spectrum: str
) -> None:
    """Not so for polar_express, whose a = 8 enlarges the rounding of R: use the standard form."""
    x = _with_spectrum(spectrum, 128, 384)
    oracle = orthogonalize_reference(x, coefficients=coefficients)
    plain = relative_error(_plain(x, coefficients, torch.bfloat16), oracle)
    result = orthogonalize(x, coefficients=coefficients, compute_dtype=torch.bfloat16)
    assert relative_error(result, oracle) <= 1.2 * plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_reference_is_computed_in_less_than_float64(dtype: torch.dtype) -> None:
    x = _random((2, 5, 18)).to(dtype)
    result = orthogonalize_reference(x)
    assert result.dtype == torch.float64
    assert torch.equal(result, orthogonalize_reference(x.double()))


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
    result = orthogonalize_reference(x, coefficients=coefficients)
    torch.testing.assert_close(result, u @ torch.diag(values) @ vh, rtol=0, atol=1e-10)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(24, 96), (96, 24)])
def test_singular_values_are_not_brought_near_one(
    shape: tuple[int, int], coefficients: str
) -> None:
    x = _random(shape)
    result = orthogonalize(x, coefficients=coefficients)
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
    result = orthogonalize(x, coefficients=coefficients)
    assert torch.equal(result[1], torch.zeros(6, 20))
    alone = orthogonalize(x[2], coefficients=coefficients)
    assert torch.equal(result[2], alone)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-100, -60, -8, 8, 60, 120])
def test_scale_of_the_gradient_changes_the_update(
    exponent: int, compute_dtype: torch.dtype
) -> None:
    x = _random((6, 20))
    expected = orthogonalize(x, compute_dtype=compute_dtype)
    scaled = orthogonalize(x * 2.0**exponent, compute_dtype=compute_dtype)
    assert torch.equal(scaled, expected)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 3e-5, 7.0, 1e6])
def test_accuracy_depends_on_the_scale(scale: float) -> None:
    x = _random((4, 24, 60))
    oracle = orthogonalize_reference(x)
    assert relative_error(orthogonalize_reference(x * scale), oracle) < 1e-6
    assert relative_error(orthogonalize(x * scale), oracle) < 1e-5
    half = orthogonalize(x * scale, compute_dtype=torch.float16)
    assert relative_error(half, oracle) < 5e-3


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_subnormal_gradient_gives_nan(compute_dtype: torch.dtype) -> None:
    x = _random((6, 20))
    assert orthogonalize(x * 1e-42, compute_dtype=compute_dtype).isfinite().all()
    half = (x * 1e-7).half()
    assert half.count_nonzero() > 0
    assert orthogonalize(half, compute_dtype=compute_dtype).isfinite().all()


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [1, 2])
def test_rank_deficient_matrix_diverges(rank: int, compute_dtype: torch.dtype) -> None:
    x = _random((4, 96, rank)) @ _random((4, rank, 256), seed=1)
    for coefficients in COEFFICIENTS:
        result = orthogonalize(x, coefficients=coefficients, compute_dtype=compute_dtype)
        assert torch.linalg.svdvals(result).max() < 1.3, coefficients


# 9 x 9, 32 x 5 and 5 x 18: matrices of one batch start at different alignments
_ODD = [(9, 9), (32, 5), (5, 18), (3, 3), (4, 16), (5, 7), (33, 129), (40, 24)]


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", ["gram", "standard"])
@pytest.mark.parametrize("shape", _ODD)
def test_result_depends_on_which_matrices_share_the_batch(
    shape: tuple[int, int], form: newton_schulz.Form, compute_dtype: torch.dtype
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return orthogonalize(x, form=form, compute_dtype=compute_dtype)

    x = _random((9, *shape))
    together = run(x)
    assert torch.equal(run(x), together)
    for start, count in [(0, 1), (1, 4), (5, 4)]:
        assert torch.equal(run(x[start : start + count]), together[start : start + count])
    permutation = torch.tensor([4, 8, 0, 7, 3, 1, 6, 2, 5])
    assert torch.equal(run(x[permutation]), together[permutation])
    assert torch.equal(run(x[3]), together[3])
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert torch.equal(run(shifted), together)


@pytest.mark.parametrize("form", ["gram", "standard"])
def test_grouped_differs_from_one_by_one(
    form: newton_schulz.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(7, *shape) for shape in _ODD] + [(12, 30), (0, 4, 8), (2, 2, 6, 5)]
    xs = [_random(shape, seed) for seed, shape in enumerate(shapes)]
    gains = [0.2 * (1 + k) for k in range(len(xs))]
    together = orthogonalize_grouped(xs, form=form, gains=gains)
    for x, gain, result in zip(xs, gains, together, strict=True):
        assert torch.equal(orthogonalize(x, form=form, gain=gain), result)
    stacks = xs[: len(_ODD)]
    parts = orthogonalize_grouped(
        [part for x in stacks for part in x.split(4)],
        form=form,
        gains=[gain for gain in gains[: len(_ODD)] for _ in range(2)],
    )
    joined = [torch.cat(parts[2 * k : 2 * k + 2]) for k in range(len(_ODD))]
    assert all(torch.equal(a, b) for a, b in zip(joined, together, strict=False))
    # from one matrix a pass to several stacks in one
    for elements in (1, 100, 1500):
        monkeypatch.setattr(newton_schulz, "_PASS_ELEMENTS", elements)
        passes = orthogonalize_grouped(xs, form=form, gains=gains)
        assert all(torch.equal(a, b) for a, b in zip(passes, together, strict=True))


def test_passes_exceed_their_bound_or_lose_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "_PASS_ELEMENTS", 100)
    xs = [
        torch.arange(float(b * m * n)).view(b, m, n)
        for b, m, n in [(5, 4, 9), (3, 20, 12), (7, 3, 3)]
    ]
    passes = newton_schulz._passes([(x, torch.empty_like(x), 1.0) for x in xs])
    for group in passes:
        sizes = [len(x) * min(x.shape[-2:]) ** 2 for x, _, _ in group]
        assert sum(sizes) <= 100 or (len(group) == 1 and len(group[0][0]) == 1)
    seen = torch.cat([x.flatten() for group in passes for x, _, _ in group])
    assert torch.equal(seen, torch.cat([x.flatten() for x in xs]))


def test_gain_is_not_applied_or_the_result_rounded_twice() -> None:
    x = _random((3, 12, 30))
    plain = orthogonalize(x)
    assert torch.equal(orthogonalize(x, gain=0.25), plain * 0.25)
    torch.testing.assert_close(orthogonalize(x, gain=0.3), plain * 0.3, rtol=2e-6, atol=1e-7)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        result = orthogonalize(x, gain=0.3, out_dtype=dtype)
        assert torch.equal(result, orthogonalize(x, gain=0.3).to(dtype))
        assert orthogonalize(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("form", ["gram", "standard"])
def test_triples_of_the_caller_are_not_those_used(form: newton_schulz.Form) -> None:
    x = _random((3, 12, 30))
    triples = COEFFICIENTS["you"]
    named = orthogonalize(x, form=form)
    # the gram form restarts more often where it does not know the set
    own = orthogonalize(x, form=form, coefficients=triples)
    torch.testing.assert_close(own, named, rtol=0.0, atol=1e-5)
    fewer = orthogonalize(x, form=form, steps=4, coefficients=triples)
    assert relative_error(fewer, orthogonalize_reference(x, steps=4, coefficients="you")) < 1e-5
    assert relative_error(fewer, named) > 1e-3
    cubic = [(1.5, -0.5, 0.0)]
    many = orthogonalize(x, form=form, steps=20, coefficients=cubic)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    assert relative_error(many, u @ vh) < 1e-5


def test_tall_matrix_differs_from_its_transpose() -> None:
    x = _random((4, 40, 24))
    wide = orthogonalize(x.mT, coefficients="you")
    assert torch.equal(orthogonalize(x, coefficients="you"), wide.mT)


def test_input_is_modified_or_strides_matter() -> None:
    x = _random((4, 24, 6))
    before = x.clone()
    result = orthogonalize(x[::2, :, ::2], coefficients="you")
    assert torch.equal(x, before)
    packed = orthogonalize(x[::2, :, ::2].contiguous(), coefficients="you")
    assert torch.equal(result, packed)
    tall = x[:, 1:9].mT  # unit stride along the last dim but one
    assert torch.equal(orthogonalize(tall), orthogonalize(tall.mT.contiguous()).mT)


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (0, 8), (8, 0)])
def test_empty_batch_or_matrix_raises(shape: tuple[int, ...]) -> None:
    for op in (orthogonalize, orthogonalize_reference):
        assert op(torch.zeros(shape), coefficients="you").shape == shape


def test_wrong_request_is_accepted() -> None:
    x = _random((4, 8))
    for op in (orthogonalize, orthogonalize_reference):
        with pytest.raises(ValueError, match="'quintic' is unknown"):
            op(x, coefficients="quintic")  # type: ignore[arg-type]
        for name in ("you", "polar_express"):
            with pytest.raises(ValueError, match="defines 5"):
                op(x, steps=6, coefficients=name)
        with pytest.raises(ValueError, match="at least 1"):
            op(x, steps=0, coefficients="kj")
    with pytest.raises(ValueError, match="defines 2"):
        orthogonalize(x, steps=3, coefficients=[(2.0, -1.5, 0.5)] * 2)
    with pytest.raises(ValueError, match="form='dual' is unknown"):
        orthogonalize(x, form="dual")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matrices"):
        orthogonalize(x[0], coefficients="kj")


def test_step_count_of_the_sets_disagrees_with_the_config() -> None:
    for name in ("you", "polar_express"):
        assert len(step_coefficients(name, PER_STEP_SET_STEPS)) == PER_STEP_SET_STEPS
        with pytest.raises(ValueError, match="defines 5"):
            step_coefficients(name, PER_STEP_SET_STEPS + 1)
    assert step_coefficients("kj", 7) == ((3.4445, -4.7750, 2.0315),) * 7
