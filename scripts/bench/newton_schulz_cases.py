"""What newton_schulz.py measures: inputs, float64 references, work counts, and our own rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from megacomposer.kernels.bench import Row, Timing, benchmark, relative_error
from megacomposer.kernels.newton_schulz import (
    orthogonalize_grouped,
    orthogonalize_reference,
    power_of_two_scale,
)
from megacomposer.optim.cost import newton_schulz_flops

STEPS = 5
_NOISE = 0.02  # of the root mean square of the entries
CASES = [
    "48x2048x7168",
    "64x768x2048",
    "64x128x7168",
    "512x192x1536",
    "mixed",
    "8x2048x7168",
    "48x7168x2048",
    "64x256x512",
    "8x1536x7168",
    "1x7168x18432",
]
# One layer of Kimi K2 on one of 8 ranks: 48 experts of 384 and a shared one, gate and up together;
# 8 of 64 heads of the query and key/value up-projections and of the output projection (columns);
# the two down-projections of the latents.
MIXED = (
    (98, 2048, 7168),
    (49, 7168, 2048),
    (8, 192, 1536),
    (8, 256, 512),
    (8, 7168, 128),
    (1, 1536, 7168),
    (1, 576, 7168),
)


class Case:
    """One set of inputs, [B, m, n] bfloat16 each."""

    def __init__(
        self, name: str, shapes: Sequence[tuple[int, int, int]], device: torch.device
    ) -> None:
        self.name, self.shapes, self.device = name, tuple(shapes), device
        self.tensors = [random_matrices(shape, device) for shape in self.shapes]
        self._references: dict[str, list[torch.Tensor]] = {}

    def reference(self, coefficients: str) -> list[torch.Tensor]:
        """Float64 results of the first and the last matrix of each tensor."""
        if coefficients not in self._references:
            self._references[coefficients] = [
                orthogonalize_reference(x[i], steps=STEPS, coefficients=coefficients)
                for x in self.tensors
                for i in _sampled(x)
            ]
        return self._references[coefficients]

    def error(self, results: Sequence[Sequence[torch.Tensor]], coefficients: str) -> float:
        """The largest relative error among the sampled matrices."""
        sampled = [result[i] for result in results for i in _sampled(result)]
        pairs = zip(sampled, self.reference(coefficients), strict=True)
        return max(relative_error(result, expected) for result, expected in pairs)

    def standard_flops(self) -> int:
        """Of five steps as written on paper with full products, whatever form ran."""
        sides = [(b, min(m, n), max(m, n)) for b, m, n in self.shapes]
        return sum(b * STEPS * (4 * s * s * n + 2 * s**3) for b, s, n in sides)

    def gram_flops(self) -> float:
        """Of our gram form with one restart: a triangle of every symmetric product."""
        return sum(b * newton_schulz_flops(m, n, STEPS) for b, m, n in self.shapes)

    def row(
        self, implementation: str, timing: Timing, error: float, *, op: str = "", dtype: str = ""
    ) -> Row:
        """A line of the report; the mixed case is known by how many matrices it has."""
        mixed = len(self.shapes) > 1
        return Row(
            op=op or ("newton_schulz mixed" if mixed else "newton_schulz"),
            implementation=implementation,
            shape=(sum(b for b, _, _ in self.shapes),) if mixed else self.shapes[0],
            dtype=dtype or "bfloat16",
            timing=timing,
            flops=self.standard_flops(),
            error=error,
        )


def _sampled(matrices: Sequence[torch.Tensor]) -> list[int]:
    return sorted({0, len(matrices) - 1})


def parse_case(name: str, device: torch.device) -> Case:
    """`mixed`, or BxMxN. Raises ValueError for anything else."""
    if name == "mixed":
        return Case(name, MIXED, device)
    sizes = name.split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"--shapes {name!r}: give BxMxN, such as 48x2048x7168, or mixed")
    batch, m, n = map(int, sizes)
    return Case(name, [(batch, m, n)], device)


def our_rows(case: Case, *, graph: bool) -> list[Row]:
    """The default form; the same on input as the optimizer gives it; the standard form."""
    scaled = [_scaled_half(x) for x in case.tensors]
    rows = []
    for tensors, form, labels in (
        (case.tensors, "auto", {}),
        (scaled, "auto", {"dtype": "float16"}),
        (case.tensors, "standard", {"op": "newton_schulz standard form"}),
    ):

        def run(tensors: list[torch.Tensor] = tensors, form: str = form) -> list[torch.Tensor]:
            return orthogonalize_grouped(tensors, steps=STEPS, coefficients="you", form=form)

        timing = benchmark(run, device=case.device, warmup=3, cuda_graph=graph)
        rows.append(case.row("ours", timing, case.error(run(), "you"), **labels))
    return rows


def print_real_rate(case: Case, rows: Sequence[Row]) -> None:
    """The work of the gram form alone, over our time."""
    tflops = case.gram_flops() / (rows[0].timing.median_ms * 1e-3) / 1e12
    print(f"ours on {case.name}: {tflops:.1f} TFLOP/s, counting 6 m^2 n + 14 m^3 a matrix\n")


def add_to_table(path: Path, case: Case, rows: Sequence[Row]) -> None:
    """Puts the time on the optimizer's kind of input where optim/cost.py finds it, in place of an
    earlier one of the same shape and batch. The mixed case has no single shape."""
    if len(case.shapes) > 1:
        return
    (row,) = (row for row in rows if row.implementation == "ours" and row.dtype == "float16")
    batch, m, n = case.shapes[0]
    found = json.loads(path.read_text()) if path.exists() else []
    kept = [r for r in found if (r["batch"], r["rows"], r["columns"]) != (batch, m, n)]
    kept.append({"rows": m, "columns": n, "batch": batch, "ms": row.timing.median_ms})
    kept.sort(key=lambda r: (r["rows"], r["columns"], r["batch"]))
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in kept) + "\n]\n")


def _scaled_half(x: torch.Tensor) -> torch.Tensor:
    """What the optimizer hands over: float16, scaled by a power of two."""
    scale = power_of_two_scale(x.abs().amax(dim=(-2, -1)))
    return (x.float() * scale[:, None, None]).half()


def random_matrices(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """[B, m, n] bfloat16: half of the singular values fall over two decades, the rest is noise."""
    batch, m, n = shape
    rank = max(1, min(m, n) // 2)
    generator = torch.Generator(device).manual_seed(m * n)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator)

    decay = torch.logspace(0, -2, rank, device=device)
    left = (normal(batch, m, rank) * decay).bfloat16()
    x = torch.bmm(left, normal(batch, rank, n).bfloat16())
    return x.add_(normal(batch, m, n), alpha=_NOISE * float(decay.norm()))
