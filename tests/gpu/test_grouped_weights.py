"""The CUDA C++ weight gradients of an expert MLP, on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megacomposer.kernels import sm90
from megacomposer.kernels.bench import relative_error
from megacomposer.kernels.grouped_weights_sm90 import weight_product

DEVICE = torch.device("cuda")
ROUNDING = 3e-3  # of one bfloat16 result; float32 sums add less
# Rows of each group. Experts without any, first and last too; tails on both sides of a stage's 64.
COUNTS = [[300, 1, 0, 130, 257], [0, 0, 900, 0], [1], [0] * 40 + [7] * 64, [128, 64, 127, 65]]
# Both sides of a pair's 256 and of a tile's 128 or 256.
SIZES = [(256, 384), (72, 40), (8, 8), (136, 264), (520, 776)]


@pytest.fixture(autouse=True)
def _memory_full_of_nan() -> None:
    """Leaves NaN in the blocks that torch hands out next."""
    if not sm90.is_available(DEVICE):
        pytest.skip("needs a Hopper GPU and the library of csrc/*_sm90.cu (nvcc at installation)")
    blocks = [torch.full((2**exponent,), float("nan"), device=DEVICE) for exponent in range(8, 24)]
    torch.cuda.synchronize()
    del blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    left: torch.Tensor
    right: torch.Tensor
    counts: list[int]
    experts: int
    left_source: torch.Tensor | None = None
    right_source: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        return weight_product(
            self.left,
            self.right,
            torch.tensor(self.counts, device=DEVICE),
            self.experts,
            left_source=self.left_source,
            right_source=self.right_source,
        )

    def gathered(self) -> _Case:
        """The same with both operands in memory, row by row."""
        left = self.left if self.left_source is None else self.left[self.left_source]
        right = self.right if self.right_source is None else self.right[self.right_source]
        return _Case(left=left, right=right, counts=self.counts, experts=self.experts)

    def exact(self) -> torch.Tensor:
        rows = self.gathered()
        left, right = rows.left.double(), rows.right.double()
        out = left.new_zeros(self.experts, left.shape[1], right.shape[1])
        row = 0
        for group, count in enumerate(self.counts):
            end = row + count
            out[group % self.experts] += left[row:end].T @ right[row:end]
            row = end
        return out


def _case(
    counts: list[int], m: int, n: int, *, experts: int = 0, gather: str = "left", over: int = 0
) -> _Case:
    """`over` rows belong to no group."""
    generator = torch.Generator(DEVICE).manual_seed(sum(counts) + m)
    rows = sum(counts) + over
    tokens = {side: 77 if gather == side else rows for side in ("left", "right")}
    source = torch.randint(77, (rows,), device=DEVICE, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()

    return _Case(
        left=normal(tokens["left"], m),
        right=normal(tokens["right"], n),
        counts=counts,
        experts=experts or len(counts),
        left_source=source if gather == "left" else None,
        right_source=source if gather == "right" else None,
    )


def _check(case: _Case) -> None:
    """Every expert by itself: a large one must not hide a small one."""
    ours = case.run()
    assert ours.dtype == torch.bfloat16
    for expert, (a, b) in enumerate(zip(ours, case.exact(), strict=True)):
        if b.any():
            assert relative_error(a, b) < ROUNDING, expert
        else:
            assert not a.any(), expert


@pytest.mark.parametrize("gather", ["left", "right", "none"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts[:5]))
def test_error_is_more_than_rounding(counts: list[int], size: tuple[int, int], gather: str) -> None:
    _check(_case(counts, *size, gather=gather))


@pytest.mark.parametrize("gather", ["left", "right", "none"])
@pytest.mark.parametrize("segments", [2, 3])
def test_groups_of_one_expert_are_not_added_up(segments: int, gather: str) -> None:
    for counts in ([5, 0, 64, 200, 1, 0], [0, 0, 0, 0, 0, 130], [63, 65, 0, 0, 128, 7]):
        case = _case(counts, 136, 264, experts=len(counts) // segments, gather=gather)
        _check(case)


@pytest.mark.parametrize("gather", ["left", "right"])
def test_tails_of_some_length_are_wrong(gather: str) -> None:
    _check(_case(list(range(131)), 136, 72, gather=gather))


def test_the_most_experts_are_too_many() -> None:
    counts = [(7 * expert) % 5 for expert in range(1024)]
    for experts in (1024, 512, 1):
        _check(_case(counts, 40, 24, experts=experts))


@pytest.mark.parametrize("gather", ["left", "right", "none"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_of_others_or_of_none_reach_an_expert(poison: float, gather: str) -> None:
    """Experts 1 and 3 have only rows of NaN, and so do the rows after the last and past the end."""
    counts = [70, 33, 127, 65, 1, 90]
    clean = _case(counts, 136, 264, gather=gather, over=50)
    owner = torch.arange(6, device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    bad = torch.ones(sum(counts) + 50, dtype=torch.bool, device=DEVICE)
    bad[: sum(counts)] = (owner == 1) | (owner == 3)

    def poisoned(operand: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        dirty = torch.full((400 + len(operand), operand.shape[1]), poison, device=DEVICE)
        dirty[: len(operand)] = operand
        if source is None:
            dirty[: len(operand)][bad] = poison
            return dirty.bfloat16()[: len(operand)]  # with more of it past the end
        return dirty.bfloat16()

    def redirected(source: torch.Tensor | None) -> torch.Tensor | None:
        return None if source is None else torch.where(bad, source + 200, source)

    dirty = dataclasses.replace(
        clean,
        left=poisoned(clean.left, clean.left_source),
        right=poisoned(clean.right, clean.right_source),
        left_source=redirected(clean.left_source),
        right_source=redirected(clean.right_source),
    )
    a, b = clean.run(), dirty.run()
    for expert in (0, 2, 4, 5):
        assert torch.equal(a[expert], b[expert])
    assert not b[1].isfinite().any()
    assert not b[3].isfinite().any()


@pytest.mark.parametrize("gather", ["left", "right"])
def test_bits_of_an_expert_depend_on_the_others_or_the_run(gather: str) -> None:
    case = _case([300, 513, 0, 40, 1900], 520, 264, gather=gather)
    result = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), result)
    rows = slice(300, 813)

    def part(operand: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        return operand[rows] if source is None else operand

    alone = _Case(
        left=part(case.left, case.left_source),
        right=part(case.right, case.right_source),
        counts=[513],
        experts=1,
        left_source=None if case.left_source is None else case.left_source[rows],
        right_source=None if case.right_source is None else case.right_source[rows],
    )
    assert torch.equal(alone.run()[0], result[1])


def test_full_stages_in_several_groups_differ_from_one_group() -> None:
    case = _case([64, 128, 192, 64], 136, 264, experts=2)
    assert case.left_source is not None
    order = torch.cat([torch.arange(64), torch.arange(192, 384), torch.arange(64, 192)])
    order = torch.cat([order, torch.arange(384, 448)]).to(DEVICE)
    together = dataclasses.replace(
        case,
        right=case.right[order],
        left_source=case.left_source[order],
        counts=[64 + 192, 128 + 64],
    )
    assert torch.equal(case.run(), together.run())


@pytest.mark.parametrize("gather", ["left", "right"])
def test_gathered_and_contiguous_rows_differ(gather: str) -> None:
    case = _case([300, 0, 129, 64], 264, 392, gather=gather)
    assert torch.equal(case.run(), case.gathered().run())


@pytest.mark.parametrize("gather", ["left", "right", "none"])
def test_rows_that_lie_apart_are_read_from_the_wrong_place(gather: str) -> None:
    case = _case([70, 300], 136, 200, gather=gather)

    def apart(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((x.shape[0], 400), float("nan"), device=DEVICE).bfloat16()
        wide[:, 24 : 24 + x.shape[1]] = x
        return wide[:, 24 : 24 + x.shape[1]]

    strided = dataclasses.replace(case, left=apart(case.left), right=apart(case.right))
    assert torch.equal(case.run(), strided.run())


@pytest.mark.parametrize("gather", ["left", "right", "none"])
def test_more_than_2_31_elements_wrap_offsets(gather: str) -> None:
    """170 experts of 4096 x 3200 weights, then 700,000 rows of 4096 columns of either operand."""
    case = _case([0] * 169 + [1000], 4096, 3200, gather=gather)
    out = case.run()
    assert out.numel() > 2**31
    assert not out[:169].any()
    alone = dataclasses.replace(case, counts=[1000], experts=1)
    assert relative_error(out[169], alone.exact()[0]) < ROUNDING
    del out
    rows, last = 700_000, 1000
    wide = torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    for left in (True, False):
        narrow = torch.randn(rows, 64, device=DEVICE, dtype=torch.bfloat16)
        source = torch.arange(rows, device=DEVICE) if gather != "none" else None
        far = _Case(
            left=wide if left else narrow,
            right=narrow if left else wide,
            counts=[rows - last, last],
            experts=2,
            left_source=source if gather == "left" else None,
            right_source=source if gather == "right" else None,
        )
        near = _Case(left=far.left[-last:], right=far.right[-last:], counts=[last], experts=1)
        assert relative_error(far.run()[1], near.exact()[0]) < ROUNDING


def test_counts_beyond_the_rows_add_rows_that_are_not_there() -> None:
    case = _case([100, 60], 64, 72)
    beyond = dataclasses.replace(case, counts=[100, 250])
    assert torch.equal(case.run(), beyond.run())


def test_no_rows_at_all_leave_gradients_unwritten() -> None:
    for gather in ("left", "none"):
        out = _case([0, 0], 64, 72, gather=gather).run()
        assert out.shape == (2, 64, 72)
        assert not out.any()
    assert not _case([0, 0], 64, 72, gather="right", over=9).run().any()


def test_captured_launches_replay_with_other_counts() -> None:
    case = _case([300, 129], 64, 72)
    counts = torch.tensor([429, 0], device=DEVICE)
    arguments = (case.left, case.right, counts, 2)
    weight_product(*arguments, left_source=case.left_source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight_product(*arguments, left_source=case.left_source)
    counts.copy_(torch.tensor(case.counts, device=DEVICE))
    graph.replay()
    assert torch.equal(out, case.run())


def test_operands_that_the_kernel_would_misread_are_taken() -> None:
    case = _case([10, 20], 64, 72, gather="none")
    left, right, source = case.left, case.right, torch.arange(30, device=DEVICE)
    for refused in (
        {"left": left.half()},
        {"left": left[:, :60].contiguous()},
        {"left": left[:1].expand_as(left)},
        {"right": left.new_zeros(30, 73)[:, 1:]},
        {"right": right.T.contiguous().T},
        {"left_source": source.int()},
        {"left_source": source[:29]},
        {"left_source": source, "right_source": source},
        {"counts": [10, 20, 0]},
        {"experts": 3},
    ):
        with pytest.raises(AssertionError):
            dataclasses.replace(case, **refused).run()
