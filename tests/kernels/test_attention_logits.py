"""max_logits on the CPU: the torch path against every logit written out in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megacomposer.kernels import attention_logits
from megacomposer.kernels.attention_logits import max_logits, max_logits_reference

SCALE = 0.3
# (query heads, key heads, head dim)
HEADS = [(4, 4, 12), (6, 2, 16), (3, 1, 5)]
SEGMENTS = [[0, 17], [0, 5, 5, 11, 12, 29], [0, 0, 1]]


def _operands(heads, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    query_heads, key_heads, dim = heads
    q = torch.randn(queries, query_heads, dim, generator=generator)
    return q, torch.randn(keys, key_heads, dim, generator=generator)


def _bounds(segments: list[int]) -> torch.Tensor:
    return torch.tensor(segments, dtype=torch.int32)


def test_triton_kernel_agrees_with_every_logit_written_out(
    run_interpreted: Callable[[str], None],
) -> None:
    run_interpreted("attention_logits_cases.py")


@pytest.mark.parametrize("block_scores", [1, 200, 2**22])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_blocks_of_rows_miss_no_pair_and_add_none(
    heads, segments, block_scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_logits, "_BLOCK_SCORES", block_scores)
    q, k = _operands(heads, segments[-1], segments[-1])
    bounds = _bounds(segments)
    largest = max_logits(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    assert largest.dtype == torch.float32
    assert exact.dtype == torch.float64
    torch.testing.assert_close(largest, exact.float())


@pytest.mark.parametrize("block_scores", [1, 200, 2**22])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mask_of_a_subset_of_queries(heads, block_scores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_logits, "_BLOCK_SCORES", block_scores)
    q, k = _operands(heads, 7, 19)
    mask = torch.rand(7, 19, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[2] = False
    largest = max_logits(q, k, mask=mask, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, mask=mask, softmax_scale=SCALE)
    torch.testing.assert_close(largest, exact.float())


def test_reference_is_the_largest_of_the_pairs_one_by_one() -> None:
    q, k = _operands((4, 2, 3), 9, 9)
    expected = [-float("inf")] * 4
    for start, end in [(0, 4), (4, 9)]:
        for i in range(start, end):
            for j in range(start, i + 1):
                for head in range(4):
                    logit = SCALE * float(q[i, head].double() @ k[j, head // 2].double())
                    expected[head] = max(expected[head], logit)
    exact = max_logits_reference(q, k, cu_seqlens=_bounds([0, 4, 9]), softmax_scale=SCALE)
    assert exact.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("pair", [(3, 4), (6, 2)], ids=["future key", "other document"])
def test_pair_that_attention_never_sees_is_not_counted(pair: tuple[int, int]) -> None:
    q, k = torch.zeros(9, 1, 4), torch.zeros(9, 1, 4)
    q[pair[0]], k[pair[1]] = 10.0, 10.0
    largest = max_logits(q, k, cu_seqlens=_bounds([0, 5, 9]), softmax_scale=1.0)
    assert largest.tolist() == [0.0]


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_head_without_a_pair_is_minus_infinity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", name)
    nothing = [float("-inf")] * 2
    q, k = torch.ones(3, 2, 4), torch.ones(5, 1, 4)
    unseen = torch.zeros(3, 5, dtype=torch.bool)
    assert max_logits(q, k, mask=unseen, softmax_scale=1.0).tolist() == nothing
    assert max_logits(q[:0], k, mask=unseen[:0], softmax_scale=1.0).tolist() == nothing
    assert max_logits(q, k[:0], mask=unseen[:, :0], softmax_scale=1.0).tolist() == nothing
    assert max_logits(q[:0], k[:0], cu_seqlens=_bounds([0]), softmax_scale=1.0).tolist() == nothing


def test_bf16_products_are_accumulated_in_fp32() -> None:
    q, k = _operands((2, 2, 200), 30, 30)
    q, k = q.bfloat16(), k.bfloat16()
    bounds = _bounds([0, 30])
    largest = max_logits(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    torch.testing.assert_close(largest, exact.float(), rtol=1e-6, atol=0.0)


def test_result_holds_no_graph_and_negative_maxima_stay_negative() -> None:
    q, k = torch.ones(4, 2, 3, requires_grad=True), -torch.ones(4, 1, 3)
    largest = max_logits(q, k, cu_seqlens=_bounds([0, 4]), softmax_scale=0.5)
    assert not largest.requires_grad
    assert largest.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softmax_scale": 0.0}, "softmax_scale 0.0 must be positive"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "exactly one of cu_seqlens and mask"),
        ({"cu_seqlens": None}, "exactly one of cu_seqlens and mask"),
        ({"cu_seqlens": _bounds([0, 3])}, "max_logits: cu_seqlens must rise from 0 to the 4"),
        ({"cu_seqlens": None, "mask": torch.ones(4, 4)}, "max_logits: mask must be bool"),
        ({"k": torch.ones(5, 1, 3)}, "q has 4 tokens but k has 5"),
        ({"k": torch.ones(4, 1, 2)}, "max_logits: want q"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    arguments = {"k": torch.ones(4, 1, 3), "cu_seqlens": _bounds([0, 4]), "softmax_scale": 1.0}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        max_logits(torch.ones(4, 2, 3), **arguments)
