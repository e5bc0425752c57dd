"""max_logits on a GPU: the Triton kernel against every logit written out in float64."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.attention_logits import max_logits, max_logits_reference

DEVICE = torch.device("cuda")
SCALE = 0.1
# (query heads, key heads, head dim)
HEADS = [(4, 4, 192), (8, 2, 128), (4, 2, 64), (4, 2, 44), (2, 1, 256), (3, 3, 5)]
SEGMENTS = [[0, 700], [0, 300, 600, 900], [0, 1, 257, 257, 258, 800], [0, 128, 256]]
# Products are exact in fp32; the sums differ by their order.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


def _operands(heads, queries: int, keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    query_heads, key_heads, dim = heads
    generator = torch.Generator(DEVICE).manual_seed(queries + keys)
    q = torch.randn(queries, query_heads, dim, device=DEVICE, generator=generator)
    k = torch.randn(keys, key_heads, dim, device=DEVICE, generator=generator)
    return [q.to(dtype), k.to(dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_segments(heads, segments: list[int], dtype: torch.dtype) -> None:
    q, k = _operands(heads, segments[-1], segments[-1], dtype)
    bounds = torch.tensor(segments, dtype=torch.int32)
    largest = max_logits(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest, exact.float(), **ROUNDING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mask_of_a_subset_of_queries(heads, dtype: torch.dtype) -> None:
    q, k = _operands(heads, 203, 509, dtype)
    mask = torch.rand(203, 509, device=DEVICE) < 0.02
    mask[40:45] = False
    largest = max_logits(q, k, mask=mask, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, mask=mask, softmax_scale=SCALE)
    torch.testing.assert_close(largest, exact.float(), **ROUNDING)


def test_pair_that_attention_never_sees_is_not_counted() -> None:
    bounds = torch.tensor([0, 200, 500], dtype=torch.int32)
    for query, key in [(10, 11), (127, 128), (300, 199), (499, 0)]:
        q = torch.zeros(500, 1, 64, device=DEVICE, dtype=torch.bfloat16)
        k = torch.zeros_like(q)
        q[query], k[key] = 10.0, 10.0
        assert max_logits(q, k, cu_seqlens=bounds, softmax_scale=1.0).tolist() == [0.0]


def test_waits_for_nothing_and_repeats_bit_for_bit() -> None:
    q, k = _operands((4, 4, 192), 900, 900, torch.bfloat16)
    bounds = torch.tensor([0, 300, 900], dtype=torch.int32)
    mask = torch.ones(900, 900, device=DEVICE, dtype=torch.bool).tril()
    cases = [{"cu_seqlens": bounds}, {"mask": mask}]
    before = [max_logits(q, k, softmax_scale=SCALE, **case) for case in cases]  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = [max_logits(q, k, softmax_scale=SCALE, **case) for case in cases]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
