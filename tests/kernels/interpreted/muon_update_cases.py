"""Cases of the Triton muon_update for the interpreter; run by test_muon_update.py."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.muon_update import (
    CHUNK,
    Piece,
    PieceTable,
    Rectangle,
    RectangleTable,
    apply_update,
    copy_rectangles,
    pack,
    update_momentum,
)

MU = 0.95
# (rows, columns, stride) of the pieces of a tensor [rows, stride], side by side; a wire padding of
# 1 leaves the following pieces unaligned
LAYOUTS = {
    "aligned": ([[(8, 64, 64)], [(3, 16, 48), (3, 32, 48)]], 0),
    "odd": ([[(7, 9, 9)], [(5, 3, 8), (5, 5, 8)], [(1, 1, 1)], [(6, 1, 7), (6, 6, 7)]], 1),
    "several_chunks": ([[(129, 100, 100)], [(70, 136, 256), (70, 120, 256)]], 0),
    "several_chunks_odd": ([[(67, 131, 131)], [(70, 135, 256), (70, 121, 256)]], 1),
    "mixed": ([[(8, 64, 64)], [(7, 9, 9)], [(3, 12, 48), (3, 36, 48)]], 0),
    "one_row_of_blocks": ([[(1, 2048, 2048)], [(1, CHUNK + 4, CHUNK + 4)]], 4),
}


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """Every case runs on memory full of NaN."""


class Case:
    """Tensors, pieces and results of one layout, the same at every construction."""

    def __init__(self, layout: str, shift: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        tensors, padding = LAYOUTS[layout]
        self.pieces: list[Piece] = []
        self.lists: list[list[torch.Tensor]] = [[], [], []]
        wire = padding
        for tensor, parts in enumerate(tensors):
            offset = 0
            for rows, columns, stride in parts:
                self.pieces.append(
                    Piece(
                        tensor=tensor, offset=offset, stride=stride, rows=rows, columns=columns,
                        matrix=2 * len(self.pieces), wire_offset=wire,
                    )
                )  # fmt: skip
                offset, wire = offset + columns, wire + rows * columns + padding
            for tensors_of_kind in self.lists:
                flat = torch.randn(shift + parts[0][0] * parts[0][2], generator=generator)
                tensors_of_kind.append(flat[shift:].view(parts[0][0], parts[0][2]))
        self.matrices = 2 * len(self.pieces)
        self.wire = wire
        self.gradients, self.momenta, self.parameters = self.lists
        self.gradients[0].view(-1)[0] *= 1e-42  # a product that is not normal

    def run(self, dtype: torch.dtype, nesterov: bool, cautious: bool) -> list[torch.Tensor]:
        table = PieceTable(self.pieces, "cpu")
        options = {"mu": MU, "nesterov": nesterov}
        amax = update_momentum(
            self.gradients, self.momenta, table, num_matrices=self.matrices, **options
        )
        wire = torch.full((self.wire,), 5.0, dtype=dtype)
        scales = 2.0 ** torch.arange(self.matrices)
        pack(self.gradients, self.momenta, table, scales=scales, out=wire, **options)
        numbers = [0.1 + i / 64 for i in range(self.matrices)]
        apply_update(
            self.parameters, table, wire,
            coefficients=numbers, decays=[1 - x / 10 for x in numbers], cautious=cautious,
        )  # fmt: skip
        return [amax, wire, *self.momenta, *self.parameters]


def _same_in_both(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    *,
    shift: int = 0,
    dtype: torch.dtype = torch.float16,
    nesterov: bool = True,
    cautious: bool = False,
    poison: float | None = None,
) -> None:
    results = []
    for name in ("torch", "triton"):
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", name)
        case = Case(layout, shift)
        if poison is not None:
            case.gradients[0].view(-1)[-1] = poison
        results.append(case.run(dtype, nesterov, cautious))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if poison is not None:
        assert not results[1][0][0].isfinite()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_layout_gives_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, layout: str, shift: int, dtype: torch.dtype
) -> None:
    """With shift 1 the tensors themselves do not start at 16 bytes."""
    _same_in_both(monkeypatch, layout, shift=shift, dtype=dtype)


@pytest.mark.parametrize("layout", ["aligned", "odd"])
@pytest.mark.parametrize(("nesterov", "cautious"), [(False, True), (True, True), (False, False)])
def test_every_variant_gives_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, layout: str, nesterov: bool, cautious: bool
) -> None:
    _same_in_both(monkeypatch, layout, nesterov=nesterov, cautious=cautious)


@pytest.mark.parametrize("layout", ["aligned", "odd", "several_chunks"])
@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, layout: str, poison: float
) -> None:
    _same_in_both(monkeypatch, layout, cautious=True, poison=poison)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns", "source", "target"),
    [
        (4, 32, (8, 40), (0, 32)),
        (130, 72, (16, 80), (8, 72)),
        (130, 72, (16, 72), (8, 80)),
        (1, CHUNK + 8, (0, 1), (8, 1)),
        (5, 7, (3, 7), (2, 9)),
        (70, 131, (1, 140), (0, 133)),
        (6, 1, (0, 1), (5, 3)),
    ],
)
def test_rectangles_arrive_and_nothing_else_is_written(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    source: tuple[int, int],
    target: tuple[int, int],
) -> None:
    part = Rectangle(
        source_offset=source[0], source_stride=source[1],
        target_offset=target[0], target_stride=target[1], rows=rows, columns=columns,
    )  # fmt: skip
    table = RectangleTable([part], "cpu")
    buffer = torch.randn(table.source_extent + 3).to(dtype)
    results = []
    for name in ("torch", "triton"):
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", name)
        results.append(torch.full((table.target_extent + 5,), 9.0, dtype=dtype))
        copy_rectangles(buffer, results[-1], table)
    assert torch.equal(*results)
    assert (results[0] != 9).sum() == rows * columns


def test_one_launch_takes_pieces_with_and_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    alignments = PieceTable(Case("mixed").pieces, "cpu").rows[:, 7]
    assert ((alignments >= 4).any() & (alignments < 4).any()).item()
    _same_in_both(monkeypatch, "mixed")


def test_runs_repeat_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")
    first, again = (Case("several_chunks").run(torch.float16, True, True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
