"""Newton-Schulz on a GPU: every path that a shape may take, each against float64."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels import newton_schulz, newton_schulz_small, sm90
from megacomposer.kernels.batched_products import Product
from megacomposer.kernels.batched_products_triton import run_products_triton
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.dispatch import choose_products
from megacomposer.kernels.newton_schulz import (
    orthogonalize,
    orthogonalize_grouped,
    orthogonalize_reference,
    step_coefficients,
)

DEVICE = torch.device("cuda")
# at most 192 rows: one, two and three blocks of 64, padded or not, one chunk of columns and several
SMALL = [(9, 128, 1024), (5, 192, 1536), (7, 72, 200), (3, 64, 3600), (6, 640, 64), (2, 5000, 136)]
LARGE = [(4, 768, 2048), (3, 256, 640), (2, 1024, 384), (2, 200, 264)]
UNALIGNED = [(3, 201, 333), (4, 100, 333), (5, 77, 9), (4, 1, 50), (3, 9, 9)]
SHAPES = SMALL + LARGE + UNALIGNED
MIXED = [SMALL[0], LARGE[1], UNALIGNED[0], SMALL[4], LARGE[2], UNALIGNED[2]]


@pytest.fixture(params=[None, "triton", "torch"], ids=["dispatched", "triton", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    if request.param is not None:
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", request.param)
    return request.param


@pytest.fixture
def hopper_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    if not sm90.is_available(DEVICE):
        pytest.skip("needs a Hopper GPU and the library of csrc/*_sm90.cu (nvcc at installation)")


def _random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator)


def _with_spectrum(shape: tuple[int, int, int], name: str) -> torch.Tensor:
    u, values, vh = torch.linalg.svd(_random(shape).double(), full_matrices=False)
    if name == "decay":
        values = 1e-3 ** torch.linspace(0, 1, values.shape[-1], device=DEVICE).double()
    else:
        values = torch.full_like(values[0], 0.01)
        values[: {"one big": 1, "two big": 2}[name]] = 1.0
    return ((u * values) @ vh).half()


def _plain_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The textbook iteration in bfloat16, coefficients `you`."""
    x = x.float()
    x = (x / torch.linalg.matrix_norm(x, keepdim=True)).bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for a, b, c in step_coefficients("you", 5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _in_torch(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **options) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setenv("MEGACOMPOSER_KERNELS", "torch")
        return orthogonalize(x, **options)


# one rounding of the result, below which errors are a matter of luck
_ROUNDING = {torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float32: 5e-4}


def test_shapes_of_this_file_take_the_paths_they_are_named_after(hopper_library: None) -> None:
    def halves(batch: int, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.empty(batch, m, n, dtype=torch.float16, device=DEVICE)
        return (x.mT, x.mT.clone()) if m > n else (x, x.clone())

    segments = [step_coefficients("you", 5)]
    assert all(newton_schulz_small.takes(*halves(*shape), segments) for shape in SMALL)
    for shapes, path in ((LARGE, "sm90"), (UNALIGNED, "triton")):
        for shape in shapes:
            x, out = halves(*shape)
            assert not newton_schulz_small.takes(x, out, segments)
            gram = x.new_empty((x.shape[0], x.shape[1], x.shape[1]))
            assert choose_products(x, x.mT, gram) == path, shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_error_exceeds_that_of_torch_or_of_plain_bfloat16(
    kernels: str | None, monkeypatch, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if kernels is not None and dtype != torch.float16:
        pytest.skip("the dtype of the input matters to the dispatched path only")
    x = _random(shape).to(dtype)
    oracle = orthogonalize_reference(x)
    result = orthogonalize(x)
    assert result.dtype == dtype
    assert result.is_contiguous()
    error = relative_error(result, oracle)
    assert error <= max(2 * relative_error(_in_torch(x, monkeypatch), oracle), _ROUNDING[dtype])
    assert error <= relative_error(_plain_bfloat16(x), oracle)


@pytest.mark.parametrize("spectrum", ["decay", "one big", "two big"])
@pytest.mark.parametrize("shape", [SMALL[0], SMALL[4], LARGE[1], UNALIGNED[0]])
def test_uneven_spectrum_is_less_accurate_than_in_plain_bfloat16(
    kernels: str | None, shape: tuple[int, int, int], spectrum: str
) -> None:
    x = _with_spectrum(shape, spectrum)
    oracle = orthogonalize_reference(x)
    plain_error = relative_error(_plain_bfloat16(x), oracle)
    assert relative_error(orthogonalize(x), oracle) <= plain_error


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 1},
        {"steps": 2},
        {"steps": 3, "out_dtype": torch.bfloat16, "gain": 0.3},
        {"steps": 7, "coefficients": "kj"},
        {"coefficients": "polar_express", "out_dtype": torch.bfloat16},
        {"coefficients": ((2.0, -1.5, 0.5),), "out_dtype": torch.float32, "gain": -2.0},
        {"form": "standard", "gain": 0.3},
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [SMALL[1], SMALL[4], LARGE[1], UNALIGNED[0]])
def test_option_is_not_what_torch_makes_of_it(
    monkeypatch, shape: tuple[int, int, int], options: dict
) -> None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)
    x = _random(shape).half()
    steps, coefficients = options.get("steps", 5), options.get("coefficients", "you")
    oracle = orthogonalize_reference(x, steps=steps, coefficients=coefficients)
    oracle = oracle * options.get("gain", 1.0)
    result = orthogonalize(x, **options)
    assert result.dtype == options.get("out_dtype", torch.float16)
    theirs = relative_error(_in_torch(x, monkeypatch, **options), oracle)
    assert relative_error(result, oracle) <= max(2 * theirs, _ROUNDING[result.dtype])


@pytest.mark.parametrize("shape", [SMALL[0], SMALL[4], *LARGE[1:], *UNALIGNED])
def test_runs_differ_or_a_matrix_depends_on_its_batch(shape: tuple[int, int, int]) -> None:
    x = _random((9, *shape[1:])).half()
    together = orthogonalize(x)
    assert all(torch.equal(orthogonalize(x), together) for _ in range(3))
    for start, count in [(0, 1), (1, 4), (5, 4)]:
        assert torch.equal(orthogonalize(x[start : start + count]), together[start : start + count])
    permutation = torch.tensor([4, 8, 0, 7, 3, 1, 6, 2, 5], device=DEVICE)
    assert torch.equal(orthogonalize(x[permutation]), together[permutation])
    assert torch.equal(orthogonalize(x[3]), together[3])


def test_grouped_differs_from_one_by_one(kernels: str | None, monkeypatch) -> None:
    if kernels == "torch":
        pytest.skip("cuBLAS chooses its kernel by the size of the batch")
    xs = [_random(shape, seed).half() for seed, shape in enumerate(MIXED)]
    gains = [0.2 * (1 + k) for k in range(len(xs))]
    together = orthogonalize_grouped(xs, gains=gains)
    for x, gain, result in zip(xs, gains, together, strict=True):
        assert torch.equal(orthogonalize(x, gain=gain), result)
    backwards = orthogonalize_grouped(xs[::-1], gains=gains[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(backwards, together, strict=True))
    monkeypatch.setattr(newton_schulz, "_PASS_ELEMENTS", 2 * 1024**2)
    passes = orthogonalize_grouped(xs, gains=gains)
    assert all(torch.equal(a, b) for a, b in zip(passes, together, strict=True))


def test_transpose_is_not_the_transposed_result() -> None:
    """To rounding: the norm of a matrix is summed in the order of memory."""
    for shape in (SMALL[0], LARGE[1], UNALIGNED[0]):
        x = _random(shape).half()
        expected = orthogonalize(x).mT
        assert relative_error(orthogonalize(x.mT), expected.double()) < 5e-4
        assert relative_error(orthogonalize(x.mT.contiguous()), expected.double()) < 5e-4


def test_input_is_modified_or_strides_matter() -> None:
    for batch, m, n in (SMALL[0], LARGE[1]):
        wide = _random((batch, m + 8, n + 24)).half()
        before = wide.clone()
        result = orthogonalize(wide[:, 8:, 16:-8])
        assert torch.equal(wide, before)
        assert torch.equal(result, orthogonalize(wide[:, 8:, 16:-8].contiguous()))
        odd = wide[:, 1 : m + 1, 3 : n + 3]  # starts at no multiple of 16 bytes
        exact = orthogonalize_reference(odd)
        assert relative_error(orthogonalize(odd), exact) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zero_or_tiny_matrix_gives_nan_or_spoils_its_batch(dtype: torch.dtype) -> None:
    for batch, m, n in (SMALL[0], SMALL[4], LARGE[1], UNALIGNED[0]):
        x = _random((4, m, n)).to(dtype)
        alone = orthogonalize(x[3])
        x[0] = 0
        x[1] = x[1] * (1e-42 if dtype == torch.float32 else 2e-8)
        x[2] = 0
        x[2, -1, -1] = torch.finfo(dtype).smallest_normal
        result = orthogonalize(x)
        assert result.isfinite().all(), (batch, m, n)
        assert not result[0].any()
        assert torch.equal(result[3], alone)


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_accuracy_depends_on_the_scale(scale: float) -> None:
    for shape in (SMALL[0], LARGE[1]):
        x = _random(shape)
        oracle = orthogonalize_reference(x)
        assert relative_error(orthogonalize(x * scale), oracle) < 3e-3


def test_captured_call_replays_other_bits() -> None:
    xs = [_random(shape, seed).half() for seed, shape in enumerate(MIXED)]
    expected = orthogonalize_grouped(xs)  # compiles, and loads the library
    values = [x.clone() for x in xs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = orthogonalize_grouped(xs)
    for x in xs:
        x.fill_(1.0)
    graph.replay()
    assert not any(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))
    for x, value in zip(xs, values, strict=True):
        x.copy_(value)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize("shape", [(3, 256, 640), (2, 200, 264), (2, 1024, 384)])
def test_hopper_products_differ_from_triton_by_more_than_rounding(
    hopper_library: None, shape: tuple[int, int, int]
) -> None:
    from megacomposer.kernels.batched_products_sm90 import run_products_sm90

    batch, m, n = shape
    x = _random(shape).half()
    square = torch.randn(batch, m, m, device=DEVICE).half()
    square = square + square.mT
    scale = torch.rand(batch, device=DEVICE)
    results = []
    for run in (run_products_sm90, run_products_triton):
        gram, applied = torch.full_like(square, torch.nan), torch.full_like(x, torch.nan)
        options = {"c": square, "beta": -0.5, "diagonal": 3.0, "alpha": 0.1, "symmetric": True}
        run([Product(a=x, b=x.mT, out=gram, matrix_scale=scale, **options)])
        run([Product(a=square, b=x, out=applied, alpha=0.25)])
        assert torch.equal(gram, gram.mT)
        results += [gram, applied]
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        assert relative_error(ours, theirs.double()) < 2e-4
