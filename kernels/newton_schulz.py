"""Newton-Schulz orthogonalisation: the polynomial iteration that Muon applies to its momentum.

Each step maps every singular value s of X to a s + b s^3 + c s^5, with (a, b, c) from a published
set, so that a few steps bring all of them near 1 without an SVD. With R = X X^T and the polynomial
Z = a I + b R + c R^2 a step is X <- Z X. Two forms compute it, for m x n with m <= n:

- standard: R, Z and Z X anew each step.
- gram (Dao-AILab, gram-newton-schulz): keeps Q, the product of the Z, and updates R <- Z R Z, so
  that n enters only at the start, at the end, and where X <- Q X and R are computed afresh (a
  restart), which rounding makes necessary.

Every factor is a polynomial of one symmetric matrix: they commute, products of them are symmetric,
and only a triangle of each is computed. For 5 steps and one restart the floor is 6 m^2 n + 14 m^3
FLOPs, against 5 (3 m^2 n + m^3) for the standard form.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from . import newton_schulz_small
from .batched_products import Product, run_products
from .dispatch import takes_lower
from .newton_schulz_input import frobenius_norm, power_of_two_scale, scaled_cast

__all__ = [
    "COEFFICIENTS",
    "orthogonalize",
    "orthogonalize_grouped",
    "orthogonalize_reference",
    "power_of_two_scale",
    "step_coefficients",
]

CoefficientSet = Literal["kj", "you", "polar_express"]
Triples = Sequence[tuple[float, float, float]]
Form = Literal["auto", "standard", "gram"]
_Run = Callable[[Sequence[Product]], None]

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Keller Jordan, https://kellerjordan.github.io/posts/muon/ : one triple for every step
    "kj": ((3.4445, -4.7750, 2.0315),),
    # You Jiacheng's per-step set, as used by dion, emerging-optimizers and gram-newton-schulz
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express (arXiv 2505.16932), 5 steps, made for spectral norms up to 1 / 1.02
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
}

# Polar Express needs headroom against rounding above its interval; the other sets do not
_NORM_MARGIN = {"kj": 1.0, "you": 1.0, "polar_express": 1.02}

# Steps before the first restart of the gram form and between later ones. Three before the first are
# 5 times as accurate on smooth spectra, and diverge where one singular value dominates
# (docs/benchmarks/newton_schulz.md): there `you` and Polar Express cancel most of Z.
_SEGMENTS = {"you": (2, 3), "kj": (2, 3)}
_SHORT_SEGMENTS = (2, 2)

# Bound on the m x m temporaries of one pass, elements of all matrices together: R, Z, Q and two
# more, so 5 GiB in half precision. Longer lists go in several passes.
_PASS_ELEMENTS = 2**29
# CUDA's limit on two of the three dims of a grid
_MOST_BATCH = 65535


def step_coefficients(
    coefficients: CoefficientSet | Triples, steps: int
) -> tuple[tuple[float, float, float], ...]:
    """The (a, b, c) of each of `steps` steps, from a named set or from your own triples.

    Raises ValueError for an unknown set, and for more steps than a per-step set defines.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    if not isinstance(coefficients, str):
        defined = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    elif coefficients in COEFFICIENTS:
        defined = COEFFICIENTS[coefficients]
    else:
        raise ValueError(
            f"coefficients={coefficients!r} is unknown; use one of {[*COEFFICIENTS]} or triples"
        )
    if len(defined) == 1:
        return defined * steps
    if steps > len(defined):
        raise ValueError(
            f"steps={steps}: the set {coefficients!r} defines {len(defined)}; use fewer, or 'kj'"
        )
    return defined[:steps]


def orthogonalize_reference(
    x: torch.Tensor, *, steps: int = 5, coefficients: CoefficientSet | Triples = "you"
) -> torch.Tensor:
    """The iteration as written on paper, in float64.

    Args:
        x: [..., m, n], wide or tall, any number of leading batch dims.

    Returns:
        [..., m, n], float64: nearly U V^T of each x = U S V^T; zeros for a zero matrix.
    """
    triples = step_coefficients(coefficients, steps)
    x = x.double()
    if x.numel() == 0:
        return torch.empty_like(x)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    norm = torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1.0)
    x = x / (norm * _margin(coefficients))
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def orthogonalize(
    x: torch.Tensor,
    *,
    steps: int = 5,
    coefficients: CoefficientSet | Triples = "you",
    form: Form = "auto",
    gain: float = 1.0,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Orthogonalises each matrix of `x` and multiplies it by `gain`.

    A zero matrix gives zeros. There is no epsilon: the scale of a matrix does not matter, from
    1e-30 up. The result is deterministic and does not depend, bit for bit, on which other matrices
    share the call.

    Args:
        x: [..., m, n], wide or tall, any floating dtype and strides; not modified.
        form: see the module; `auto` is gram, but standard where the products are in bfloat16.
        compute_dtype: of the operands of the products, accumulated in float32: float16 (the default
            on CUDA), bfloat16 or float32 (the default on the CPU).

    Returns:
        [..., m, n] of `out_dtype`, by default that of x; contiguous.

    Raises:
        ValueError: see `step_coefficients`; x has fewer than two dims, or a name is unknown.
    """
    (result,) = orthogonalize_grouped(
        [x],
        steps=steps,
        coefficients=coefficients,
        form=form,
        gains=[gain],
        out_dtype=out_dtype,
        compute_dtype=compute_dtype,
    )
    return result


def orthogonalize_grouped(
    xs: Sequence[torch.Tensor],
    *,
    steps: int = 5,
    coefficients: CoefficientSet | Triples = "you",
    form: Form = "auto",
    gains: Sequence[float] | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    reserved_sms: int = 0,
) -> list[torch.Tensor]:
    """`orthogonalize` for tensors of different shapes, in as few launches as for one; `gains` has
    one factor for each (default 1). The products leave `reserved_sms` multiprocessors to other
    streams, such as a collective's; that changes no bit."""
    triples = step_coefficients(coefficients, steps)
    if form not in ("auto", "standard", "gram"):
        raise ValueError(f"form={form!r} is unknown; use auto, standard or gram")
    gains = [1.0] * len(xs) if gains is None else list(gains)
    assert len(gains) == len(xs), (len(gains), len(xs))
    for x in xs:
        if x.ndim < 2:
            raise ValueError(f"orthogonalize needs matrices, got shape {tuple(x.shape)}")
    outs = [torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device) for x in xs]
    pieces = [
        (x.reshape(-1, *x.shape[-2:]), out.view(-1, *x.shape[-2:]), gain)
        for x, out, gain in zip(xs, outs, gains, strict=True)
        if x.numel() > 0
    ]
    run = functools.partial(run_products, reserved_sms=reserved_sms)
    for group in _passes(pieces):
        stacks = [_prepare(x, out, gain, compute_dtype) for x, out, gain in group]
        dtype, margin = stacks[0].x.dtype, _margin(coefficients)
        if form == "standard" or (form == "auto" and dtype == torch.bfloat16):
            _set_start(stacks, margin)
            _standard_form(stacks, triples, run)
            continue
        segments = _segments(coefficients, triples, dtype)
        stacks = [stack for stack in stacks if not _run_small(stack, segments, margin)]
        if stacks:
            _set_start(stacks, margin)
            _gram_form(stacks, segments, run)
    return outs


@dataclasses.dataclass(kw_only=True)
class _Stack:
    """Matrices of one shape on their way through the iteration."""

    x: torch.Tensor
    """[B, m, n], m <= n, compute dtype: a view, transposed in memory where the input is tall."""
    out: torch.Tensor
    """[B, m, n], a view of the caller's result."""
    gain: float
    norm: torch.Tensor | None
    """float32 [B], of x, where a pass before has found it."""
    gram_scale: float
    """R is kept times this power of two, about m, so that its mean diagonal is near 1 and its small
    entries stay clear of float16's subnormal numbers."""
    lower: bool
    """Whether the m x m matrices lack what is above their diagonal, see `Product.lower_a`."""
    x_scale: torch.Tensor | None = None
    """float32 [B]: what brings x to its starting norm; None once it is folded in."""

    def square(self) -> torch.Tensor:
        batch, m, _ = self.x.shape
        return torch.empty((batch, m, m), dtype=self.x.dtype, device=self.x.device)


def _prepare(
    x: torch.Tensor,
    out: torch.Tensor,
    gain: float,
    compute_dtype: torch.dtype | None,
) -> _Stack:
    if compute_dtype is None:
        compute_dtype = torch.float16 if x.is_cuda else torch.float32
    if 1 not in x.stride()[-2:]:
        x = x.contiguous()
    if x.shape[-2] > x.shape[-1]:
        x, out = x.mT, out.mT
    norm = None
    if not x.dtype == compute_dtype == torch.float16:
        x, norm = scaled_cast(x, compute_dtype)
    return _Stack(
        x=x,
        out=out,
        gain=gain,
        norm=norm,
        gram_scale=2.0 ** math.floor(math.log2(x.shape[-2])),
        lower=takes_lower(x, out),
    )


def _set_start(stacks: list[_Stack], margin: float) -> None:
    for stack in stacks:
        norm = frobenius_norm(stack.x) if stack.norm is None else stack.norm
        # the smallest positive norm of a float16 matrix is 2^-24
        stack.x_scale = 1.0 / (norm.clamp(min=2.0**-24) * margin)


def _segments(
    coefficients: CoefficientSet | Triples, triples: Triples, dtype: torch.dtype
) -> list[Triples]:
    """The triples cut at the restarts."""
    first, later = _SHORT_SEGMENTS
    if isinstance(coefficients, str) and dtype != torch.bfloat16:
        first, later = _SEGMENTS.get(coefficients, _SHORT_SEGMENTS)
    starts = [0, *range(first, len(triples), later)]
    ends = [*starts[1:], len(triples)]
    return [triples[start:end] for start, end in zip(starts, ends, strict=True)]


def _run_small(stack: _Stack, segments: list[Triples], margin: float) -> bool:
    """Runs a stack of small matrices in kernels of their own where there are such."""
    if not newton_schulz_small.takes(stack.x, stack.out, segments):
        return False
    newton_schulz_small.gram_form_small(
        stack.x,
        stack.out,
        margin=margin,
        gram_scale=stack.gram_scale,
        gain=stack.gain,
        segments=segments,
    )
    return True


def _gram_form(stacks: list[_Stack], segments: list[Triples], run: _Run) -> None:
    for number, segment in enumerate(segments):
        grams = _grams(stacks, run)
        q: list[torch.Tensor] | None = None
        for step, (a, b, c) in enumerate(segment):
            z = _polynomials(stacks, grams, a, b, c, run)
            first, q = q is None, z if q is None else q
            is_last = step == len(segment) - 1
            products: list[Product] = []
            next_q = z if first else [s.square() for s in stacks]
            half = [] if is_last else [s.square() for s in stacks]
            if not first:
                products += _square_products(stacks, q, z, next_q)
            if not is_last:
                products += _square_products(stacks, grams, z, half)
            run(products)
            q = next_q
            if not is_last:
                grams = [s.square() for s in stacks]
                run(_square_products(stacks, z, half, grams))
        assert q is not None
        _apply(stacks, q, run, is_last=number == len(segments) - 1)


def _standard_form(stacks: list[_Stack], triples: Triples, run: _Run) -> None:
    for step, (a, b, c) in enumerate(triples):
        z = _polynomials(stacks, _grams(stacks, run), a, b, c, run)
        _apply(stacks, z, run, is_last=step == len(triples) - 1)


def _grams(stacks: list[_Stack], run: _Run) -> list[torch.Tensor]:
    """R = X X^T, times `gram_scale`."""
    outs = [stack.square() for stack in stacks]
    run(
        [
            Product(
                a=s.x,
                b=s.x.mT,
                out=out,
                alpha=s.gram_scale,
                matrix_scale=None if s.x_scale is None else s.x_scale.square(),
                symmetric=True,
                lower_out=s.lower,
            )
            for s, out in zip(stacks, outs, strict=True)
        ]
    )
    return outs


def _polynomials(
    stacks: list[_Stack], grams: list[torch.Tensor], a: float, b: float, c: float, run: _Run
) -> list[torch.Tensor]:
    """Z = a I + b R + c R^2."""
    outs = [stack.square() for stack in stacks]
    run(
        [
            Product(
                a=gram,
                b=gram.mT,
                out=out,
                c=gram,
                alpha=c / s.gram_scale**2,
                beta=b / s.gram_scale,
                diagonal=a,
                symmetric=True,
                lower_a=s.lower,
                lower_b=s.lower,
                lower_out=s.lower,
            )
            for s, gram, out in zip(stacks, grams, outs, strict=True)
        ]
    )
    return outs


def _square_products(
    stacks: list[_Stack],
    left: list[torch.Tensor],
    right: list[torch.Tensor],
    outs: list[torch.Tensor],
) -> list[Product]:
    """left @ right of commuting symmetric matrices; `right` is passed transposed, its own equal,
    so that both operands are read along their rows."""
    return [
        Product(
            a=a,
            b=b.mT,
            out=out,
            symmetric=True,
            lower_a=s.lower,
            lower_b=s.lower,
            lower_out=s.lower,
        )
        for s, a, b, out in zip(stacks, left, right, outs, strict=True)
    ]


def _apply(stacks: list[_Stack], q: list[torch.Tensor], run: _Run, *, is_last: bool) -> None:
    """X <- Q X, into the caller's result after the last step."""
    products = []
    for s, q_i in zip(stacks, q, strict=True):
        out = s.out if is_last else torch.empty_like(s.x)
        gain = s.gain if is_last else 1.0
        products.append(
            Product(a=q_i, b=s.x, out=out, alpha=gain, matrix_scale=s.x_scale, lower_a=s.lower)
        )
        s.x, s.x_scale = out, None
    run(products)


def _passes(
    pieces: list[tuple[torch.Tensor, torch.Tensor, float]],
) -> list[list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """Stacks cut along their batch and grouped, so that temporaries stay bounded."""
    passes: list[list[tuple[torch.Tensor, torch.Tensor, float]]] = []
    room = 0
    for x, out, gain in pieces:
        matrix = min(x.shape[-2:]) ** 2
        start = 0
        while start < len(x):
            if room < matrix:
                passes.append([])
                room = max(_PASS_ELEMENTS, matrix)
            count = min(len(x) - start, room // matrix, _MOST_BATCH)
            passes[-1].append((x[start : start + count], out[start : start + count], gain))
            room -= count * matrix
            start += count
    return passes


def _margin(coefficients: CoefficientSet | Triples) -> float:
    return _NORM_MARGIN[coefficients] if isinstance(coefficients, str) else 1.0
