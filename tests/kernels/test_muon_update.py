"""Muon's elementwise passes on the CPU: the torch path against whole-tensor formulas, and the
Triton path in its interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from megacomposer.kernels.muon_update import (
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
WIRE_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def test_triton_kernels_agree_with_the_torch_path(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted("muon_update_cases.py")


def _grid(
    tensor: int, shape: tuple[int, int], cuts: tuple[Sequence[int], Sequence[int]], start: int = 0
) -> list[Piece]:
    """Pieces of a [rows, columns] matrix cut at the given rows and columns; matrix 0, wire from
    `start` on."""
    pieces = []
    for (r0, r1), (c0, c1) in itertools.product(
        *(itertools.pairwise([0, *cut, size]) for cut, size in zip(cuts, shape, strict=True))
    ):
        rows, columns = r1 - r0, c1 - c0
        offset = r0 * shape[1] + c0
        pieces.append(
            Piece(
                tensor=tensor, offset=offset, stride=shape[1], rows=rows, columns=columns,
                matrix=0, wire_offset=start,
            )
        )  # fmt: skip
        start += rows * columns
    return pieces


def _inputs(*shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return tuple([torch.randn(s, generator=generator) for s in shapes] for _ in range(2))


def _float32(x: torch.Tensor) -> torch.Tensor:
    """Rounds a float64 result once: exact for one product or sum of two float32 numbers."""
    return x.float().double()


def _momentum_and_direction(
    gradient: torch.Tensor, momentum: torch.Tensor, nesterov: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas, each operation done in float64 and rounded to float32."""
    g, mu = gradient.double(), float(np.float32(MU))
    m = _float32(_float32(momentum.double() * mu) + g)
    return m.float(), (_float32(_float32(m * mu) + g) if nesterov else m).float()


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_amax_round_as_the_formula(nesterov: bool) -> None:
    """A stack of matrices, a column-sharded tensor, one element, one row, and an empty tensor."""
    gradients, momenta = _inputs((3, 4, 5), (6, 10), (1, 1), (0, 7), (1, 9))
    stack = [
        Piece(tensor=0, offset=20 * i, stride=5, rows=4, columns=5, matrix=i, wire_offset=0)
        for i in range(3)
    ]
    halves = [
        Piece(tensor=1, offset=start, stride=10, rows=6, columns=columns, matrix=4, wire_offset=0)
        for start, columns in ((0, 3), (3, 7))
    ]
    single = Piece(tensor=2, offset=0, stride=1, rows=1, columns=1, matrix=5, wire_offset=0)
    row = Piece(tensor=4, offset=0, stride=9, rows=1, columns=9, matrix=6, wire_offset=0)
    empty = Piece(tensor=3, offset=0, stride=7, rows=0, columns=7, matrix=7, wire_offset=0)
    table = PieceTable([*stack, *halves, single, row, empty], "cpu")
    expected = [
        _momentum_and_direction(g, m, nesterov) for g, m in zip(gradients, momenta, strict=True)
    ]

    amax = update_momentum(gradients, momenta, table, mu=MU, nesterov=nesterov, num_matrices=9)

    for actual, (momentum, _) in zip(momenta, expected, strict=True):
        assert torch.equal(actual, momentum)
    largest = [direction.abs().amax() for _, direction in (expected[1], expected[2], expected[4])]
    zero = torch.tensor(0.0)
    stacked = expected[0][1].abs().amax(dim=(1, 2))
    assert torch.equal(amax, torch.stack([*stacked, zero, *largest, zero, zero]))


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_pack_scales_in_float32_and_casts_once(dtype: torch.dtype, nesterov: bool) -> None:
    gradients, momenta = _inputs((6, 10))
    pieces = _grid(0, (6, 10), ((2,), (3,)), start=2)
    out = torch.full((70,), 3.0, dtype=dtype)
    scales = torch.tensor([2.0**9])
    table = PieceTable(pieces, "cpu")

    update_momentum(gradients, momenta, table, mu=MU, nesterov=nesterov, num_matrices=1)
    pack(gradients, momenta, table, mu=MU, nesterov=nesterov, scales=scales, out=out)

    gradients, momenta = _inputs((6, 10))
    direction = _momentum_and_direction(gradients[0], momenta[0], nesterov)[1]
    scaled = (direction * 2.0**9).to(dtype)
    blocks = [block for rows in scaled.split((2, 4)) for block in rows.split((3, 7), dim=1)]
    assert torch.equal(out[2:62], torch.cat([block.flatten() for block in blocks]))
    assert (out[:2] == 3).all()
    assert (out[62:] == 3).all()


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
@pytest.mark.parametrize("cautious", [True, False])
def test_update_rounds_both_products_and_the_difference(dtype: torch.dtype, cautious: bool) -> None:
    (p, q), (u, v) = _inputs((6, 10), (2, 3))
    wire = torch.cat([part.to(dtype).flatten() for part in (u[:, :3], u[:, 3:], v)])
    pieces = _grid(0, (6, 10), ((), (3,)))
    # the second tensor is another matrix, and its first row takes no part
    pieces.append(Piece(tensor=1, offset=3, stride=3, rows=1, columns=3, matrix=1, wire_offset=63))
    coefficients, decays = [0.013, 0.2], [1 - 0.013 * 0.1, 1.0]
    before = [p.clone(), q.clone()]

    apply_update(
        [p, q], PieceTable(pieces, "cpu"), wire,
        coefficients=coefficients, decays=decays, cautious=cautious,
    )  # fmt: skip

    updates = (u.to(dtype), v.to(dtype))
    for actual, old, update, coefficient, decay in zip(
        (p, q), before, updates, coefficients, decays, strict=True
    ):
        x, y = old.double(), update.double()
        c, d = float(np.float32(coefficient)), float(np.float32(decay))
        kept = _float32(x * d)
        if cautious:
            kept = torch.where(x * y > 0, kept, x)
        expected = (kept - _float32(y * c)).float()
        if actual is q:
            expected[0] = old[0]
        assert torch.equal(actual, expected)


def test_cautious_decay_spares_what_the_update_already_grows() -> None:
    p = torch.tensor([[1.0, -1.0, 1.0, 0.0]])
    wire = torch.tensor([1.0, 1.0, -1.0, 1.0])
    table = PieceTable(_grid(0, (1, 4), ((), ())), "cpu")
    apply_update([p], table, wire, coefficients=[0.25], decays=[0.5], cautious=True)
    assert torch.equal(p, torch.tensor([[0.25, -1.25, 1.25, -0.25]]))


CUTS = [((), ()), ((1, 2, 5), ()), ((), (1, 4, 6)), ((3,), (5,)), (range(1, 7), range(1, 9))]


@pytest.mark.parametrize("cuts", CUTS)
def test_bits_do_not_depend_on_how_a_matrix_is_cut(
    cuts: tuple[Sequence[int], Sequence[int]],
) -> None:
    """`CUTS` goes from one piece to pieces of one element."""
    results = []
    for cut in (CUTS[0], cuts):
        gradients, momenta = _inputs((7, 9))
        pieces = _grid(0, (7, 9), cut)
        table = PieceTable(pieces, "cpu")
        amax = update_momentum(gradients, momenta, table, mu=MU, nesterov=True, num_matrices=1)
        wire = torch.empty(63, dtype=torch.float16)
        pack(gradients, momenta, table, mu=MU, nesterov=True, scales=torch.ones(1), out=wire)
        apply_update(gradients, table, wire, coefficients=[0.1], decays=[0.9], cautious=True)
        gathered = torch.empty(63, dtype=torch.float16)
        copy_rectangles(wire, gathered, RectangleTable([_home(x) for x in pieces], "cpu"))
        results.append((amax, momenta[0], gathered, gradients[0]))
    for whole, cut_up in zip(*results, strict=True):
        assert torch.equal(whole, cut_up)


def _home(piece: Piece) -> Rectangle:
    """From the wire to where the piece lies in its tensor."""
    return Rectangle(
        source_offset=piece.wire_offset, source_stride=piece.columns,
        target_offset=piece.offset, target_stride=piece.stride,
        rows=piece.rows, columns=piece.columns,
    )  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_amax_and_in_the_parameters(bad: float) -> None:
    gradients, momenta = _inputs((4, 4), (2, 2))
    gradients[0][3, 1] = bad
    table = PieceTable([*_grid(0, (4, 4), ((1,), ())), _whole(1, 2, 2, matrix=1)], "cpu")
    amax = update_momentum(gradients, momenta, table, mu=MU, nesterov=True, num_matrices=2)
    assert not amax[0].isfinite()
    assert amax[1].isfinite()
    wire = torch.full((16,), bad)
    table = PieceTable(_grid(0, (4, 4), ((), ())), "cpu")
    for cautious in (True, False):
        parameter = torch.ones(4, 4)
        options = {"coefficients": [0.1], "decays": [0.9], "cautious": cautious}
        apply_update([parameter], table, wire, **options)
        assert not parameter.isfinite().any()


def test_a_parameter_that_requires_grad_is_updated_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    table = PieceTable([_whole(0, 2, 2)], "cpu")
    options = {"coefficients": [1.0], "decays": [0.5], "cautious": False}
    apply_update([parameter], table, torch.ones(4), **options)
    assert torch.equal(parameter, torch.full((2, 2), -0.5))


def test_views_into_a_larger_storage_are_addressed_from_their_own_start() -> None:
    storage = torch.arange(12.0)
    view = storage[4:8].view(2, 2)
    table = PieceTable([_whole(0, 2, 2)], "cpu")
    options = {"coefficients": [1.0], "decays": [1.0], "cautious": False}
    apply_update([view], table, torch.ones(4), **options)
    assert storage.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 8, 9, 10, 11]


def test_empty_tables_do_nothing() -> None:
    table = PieceTable([_whole(0, 0, 5), _whole(0, 5, 0)], "cpu")
    tensors = [torch.empty(0, 5)]
    amax = update_momentum(tensors, tensors, table, mu=MU, nesterov=True, num_matrices=2)
    assert torch.equal(amax, torch.zeros(2))
    empty = torch.empty(0)
    pack(tensors, tensors, table, mu=MU, nesterov=True, scales=torch.ones(2), out=empty)
    apply_update([], table, empty, coefficients=[], decays=[], cautious=True)
    copy_rectangles(empty, empty, RectangleTable([], "cpu"))


def _whole(tensor: int, rows: int, columns: int, matrix: int = 0) -> Piece:
    return Piece(
        tensor=tensor, offset=0, stride=columns, rows=rows, columns=columns,
        matrix=matrix, wire_offset=0,
    )  # fmt: skip


def _momentum_call(tensors: list[torch.Tensor], pieces: list[Piece], num_matrices: int) -> None:
    table = PieceTable(pieces, "cpu")
    update_momentum(tensors, tensors, table, mu=MU, nesterov=True, num_matrices=num_matrices)


@pytest.mark.parametrize(
    ("tensors", "pieces", "num_matrices", "message"),
    [
        ([torch.ones(2, 3)], [_whole(0, 2, 2)], 1, "must tile"),
        ([torch.ones(2, 2), torch.ones(1)], [_whole(0, 2, 2)], 1, "must tile"),
        ([torch.ones(2, 2)], [_whole(0, 2, 3)], 1, "reach 6"),
        ([torch.ones(2, 2)], [_whole(1, 2, 2)], 1, "needs more"),
        ([torch.ones(2, 2)], [_whole(0, 2, 2, matrix=1)], 1, "1 matrices"),
        ([torch.ones(2, 2).half()], [_whole(0, 2, 2)], 1, "float32"),
        ([torch.ones(2, 3).T], [_whole(0, 3, 2)], 1, "contiguous"),
        ([torch.ones(2, 2, device="meta")], [_whole(0, 2, 2)], 1, "is on meta"),
    ],
)
def test_what_does_not_fit_the_table_is_refused_before_it_is_written(
    tensors: list[torch.Tensor], pieces: list[Piece], num_matrices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _momentum_call(tensors, pieces, num_matrices)


def test_a_wire_buffer_that_is_too_short_or_of_another_dtype_is_refused() -> None:
    table = PieceTable([_whole(0, 2, 2)], "cpu")
    tensors, short = [torch.ones(2, 2)], torch.ones(3)
    with pytest.raises(ValueError, match="at least 4"):
        pack(tensors, tensors, table, mu=MU, nesterov=True, scales=torch.ones(1), out=short)
    with pytest.raises(ValueError, match="at least 4"):
        apply_update(tensors, table, short, coefficients=[1], decays=[1], cautious=False)
    with pytest.raises(ValueError, match="coefficients: 0 matrices"):
        apply_update(tensors, table, torch.ones(4), coefficients=[], decays=[1], cautious=False)
    rectangles = RectangleTable([_home(_whole(0, 2, 2))], "cpu")
    with pytest.raises(ValueError, match="one dtype"):
        copy_rectangles(torch.ones(4), torch.ones(4).half(), rectangles)
    with pytest.raises(ValueError, match="target must be"):
        copy_rectangles(torch.ones(4), short, rectangles)


def test_rows_that_overlap_are_refused() -> None:
    piece = Piece(tensor=0, offset=0, stride=2, rows=2, columns=3, matrix=0, wire_offset=0)
    with pytest.raises(ValueError, match="overlap"):
        PieceTable([piece], "cpu")
    with pytest.raises(ValueError, match="overlap"):
        RectangleTable([_home(piece)], "cpu")
