"""Muon's elementwise passes in Triton on a GPU: bits of torch, repeats, offsets beyond int32."""

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

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# (rows, columns) of the pieces of each tensor, side by side; elements between pieces on the wire
LAYOUTS = {
    "aligned": ([[(2048, 768)], [(512, 128), (512, 192), (512, 64)], [(1, 4)]], 0),
    "odd": ([[(67, 131)], [(333, 3), (333, 130), (333, 1)], [(1, 1)], [(1, CHUNK + 1)]], 1),
    "mixed": ([[(512, 512)], [(7, 9)], [(300, 64), (300, 192)], [(1, 3 * CHUNK)]], 0),
    "many": ([[(1 + i % 5, 4 + i % 9)] for i in range(3000)], 0),
}


@pytest.fixture(autouse=True)
def _implementation_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGACOMPOSER_KERNELS", raising=False)


class Case:
    """Tensors and pieces of one layout, the same at every construction.

    shift: elements before the start of every tensor in its storage.
    """

    def __init__(self, layout: str, shift: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(3)
        tensors, padding = LAYOUTS[layout]
        self.pieces: list[Piece] = []
        self.lists: list[list[torch.Tensor]] = [[], [], []]
        wire = padding
        for tensor, parts in enumerate(tensors):
            stride, offset = sum(columns for _, columns in parts), 0
            for rows, columns in parts:
                self.pieces.append(
                    Piece(
                        tensor=tensor, offset=offset, stride=stride, rows=rows, columns=columns,
                        matrix=len(self.pieces), wire_offset=wire,
                    )
                )  # fmt: skip
                offset, wire = offset + columns, wire + rows * columns + padding
            for kind in self.lists:
                size = shift + parts[0][0] * stride
                flat = torch.randn(size, generator=generator, device=DEVICE)
                kind.append(flat[shift:].view(parts[0][0], stride))
        self.matrices = len(self.pieces) + 1
        self.wire = wire
        self.gradients, self.momenta, self.parameters = self.lists
        self.gradients[0].mul_(1e-40)  # products that are not normal
        self.momenta[0].mul_(1e-40)

    def run(self, dtype: torch.dtype, nesterov: bool, cautious: bool) -> list[torch.Tensor]:
        table = PieceTable(self.pieces, DEVICE)
        scales = torch.full((self.matrices,), 2.0**12, device=DEVICE)
        wire = torch.full((self.wire,), 5.0, dtype=dtype, device=DEVICE)
        options = {"mu": 0.95, "nesterov": nesterov}
        coefficients = [0.1 + i / 64 for i in range(self.matrices)]
        decays = [1 - 1e-3 / (1 + i) for i in range(self.matrices)]
        amax = update_momentum(
            self.gradients, self.momenta, table, num_matrices=self.matrices, **options
        )
        pack(self.gradients, self.momenta, table, scales=scales, out=wire, **options)
        numbers = {"coefficients": coefficients, "decays": decays}
        apply_update(self.parameters, table, wire, cautious=cautious, **numbers)
        return [amax, wire, *self.momenta, *self.parameters]


def _same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nesterov", "cautious"), [(True, False), (False, True)])
def test_bits_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    shift: int,
    dtype: torch.dtype,
    nesterov: bool,
    cautious: bool,
) -> None:
    """No product is fused with a sum, and what is not normal is not flushed."""
    actual = Case(layout, shift).run(dtype, nesterov, cautious)
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "torch")
    _same(actual, Case(layout, shift).run(dtype, nesterov, cautious))


@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ["aligned", "odd"])
def test_what_is_not_finite_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, layout: str, poison: float
) -> None:
    results = []
    for name in ("triton", "torch"):
        monkeypatch.setenv("MEGACOMPOSER_KERNELS", name)
        case = Case(layout)
        case.gradients[0].view(-1)[-1] = poison
        results.append(case.run(torch.float16, True, True))
    _same(*results)
    assert not results[0][0][0].isfinite()
    assert results[0][0][1:].isfinite().all()


def test_runs_repeat_bit_for_bit() -> None:
    first = Case("mixed").run(torch.float16, True, False)
    for _ in range(10):
        _same(Case("mixed").run(torch.float16, True, False), first)


def test_passes_do_not_wait_for_the_device_and_follow_gradients_that_move() -> None:
    case, other = Case("mixed"), Case("mixed")
    case.run(torch.float16, True, False)  # compiles
    table, amax = PieceTable(case.pieces, DEVICE), []
    wire = torch.zeros(case.wire, dtype=torch.float16, device=DEVICE)
    scales = torch.ones(case.matrices, device=DEVICE)
    numbers = {"coefficients": [0.0] * case.matrices, "decays": [1.0] * case.matrices}
    options = {"mu": 0.0, "nesterov": False}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for gradients in (case.gradients, other.parameters):
            found = update_momentum(
                gradients, case.momenta, table, num_matrices=case.matrices, **options
            )
            amax.append(found)
            pack(gradients, case.momenta, table, scales=scales, out=wire, **options)
            apply_update(case.parameters, table, wire, cautious=False, **numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found, gradients in zip(amax, (case.gradients, other.parameters), strict=True):
        assert found[1] == gradients[1].abs().max()
    assert torch.equal(wire[: 512 * 512], other.parameters[0].half().view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1])
def test_rectangles_arrive_and_nothing_else_is_written(dtype: torch.dtype, shift: int) -> None:
    """A transposition of blocks: row shards of every column block become whole rows."""
    rows, columns, blocks = 301, 136, 5
    parts = [
        Rectangle(
            source_offset=shift + b * rows * columns, source_stride=columns,
            target_offset=shift + b * columns, target_stride=blocks * columns + 8,
            rows=rows, columns=columns,
        )
        for b in range(blocks)
    ]  # fmt: skip
    table = RectangleTable(parts, DEVICE)
    source = torch.randn(table.source_extent, device=DEVICE).to(dtype)
    target = torch.full((shift + rows * (blocks * columns + 8),), 9.0, device=DEVICE, dtype=dtype)
    copy_rectangles(source, target, table)
    lines = target[shift:].view(rows, -1)
    expected = source[shift:].view(blocks, rows, columns).transpose(0, 1).reshape(rows, -1)
    assert torch.equal(lines[:, : blocks * columns], expected)
    assert (lines[:, blocks * columns :] == 9).all()
    assert (target[:shift] == 9).all()


def test_more_than_2_31_elements_do_not_wrap_offsets() -> None:
    """Two column halves and the same elements as one run; the far end is compared."""
    rows, columns = 2**31 // 8192 + 64, 8192
    shape = {"stride": columns, "matrix": 0, "tensor": 0}
    halves = [
        Piece(
            **shape, offset=start, rows=rows, columns=columns // 2,
            wire_offset=rows * start,
        )
        for start in (0, columns // 2)
    ]  # fmt: skip
    whole = [Piece(**shape, offset=0, rows=rows, columns=columns, wire_offset=0)]
    gradient = torch.randn(rows, columns, device=DEVICE)
    expected = gradient[-100:].half()
    expected_amax = gradient.abs().max()
    options = {"mu": 0.5, "nesterov": False}
    for pieces in (whole, halves):
        table = PieceTable(pieces, DEVICE)
        momentum = torch.zeros_like(gradient)
        amax = update_momentum([gradient], [momentum], table, num_matrices=1, **options)
        assert amax[0] == expected_amax
        assert torch.equal(momentum[-100:], gradient[-100:])
        wire = torch.empty(rows * columns, device=DEVICE, dtype=torch.float16)
        scales = torch.ones(1, device=DEVICE)
        pack([gradient], [momentum], table, scales=scales, out=wire, **options)
        for piece in pieces:
            part = wire[piece.wire_offset :][: rows * piece.columns].view(rows, piece.columns)
            assert torch.equal(part[-100:], expected[:, piece.offset :][:, : piece.columns])
        numbers = {"coefficients": [1.0], "decays": [1.0], "cautious": False}
        apply_update([momentum], table, wire, **numbers)
        assert torch.equal(momentum[-100:], gradient[-100:] - expected.float())
        target = torch.empty_like(wire)
        rectangles = [
            Rectangle(
                source_offset=p.wire_offset, source_stride=p.columns, target_offset=p.offset,
                target_stride=columns, rows=rows, columns=p.columns,
            )
            for p in pieces
        ]  # fmt: skip
        copy_rectangles(wire, target, RectangleTable(rectangles, DEVICE))
        assert torch.equal(target.view(rows, columns)[-100:], expected)
        del momentum, wire, target
