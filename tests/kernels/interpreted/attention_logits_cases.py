"""Cases of the Triton max_logits for the interpreter; run by test_attention_logits.py."""

from __future__ import annotations

import pytest
import torch

from megacomposer.kernels.attention_logits import max_logits, max_logits_reference

SCALE = 0.3
# Head dims that need one tile, two, and padding of either.
HEADS = [(2, 2, 48), (4, 2, 44), (3, 1, 5), (1, 1, 64), (2, 2, 24)]
SEGMENTS = [[0, 150], [0, 40, 40, 41, 130, 200], [0, 64, 128], [0, 1]]


@pytest.fixture(autouse=True)
def _triton_on_poisoned_memory(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setenv("MEGACOMPOSER_KERNELS", "triton")


def _operands(heads, queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(queries + keys)
    query_heads, key_heads, dim = heads
    return torch.randn(queries, query_heads, dim), torch.randn(keys, key_heads, dim)


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_segments(heads, segments: list[int]) -> None:
    q, k = _operands(heads, segments[-1], segments[-1])
    bounds = torch.tensor(segments, dtype=torch.int32)
    largest = max_logits(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest, exact.float())


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_mask(heads) -> None:
    q, k = _operands(heads, 70, 133)
    mask = torch.rand(133, 70).T < 0.02  # not contiguous
    largest = max_logits(q, k, mask=mask, softmax_scale=SCALE)
    exact = max_logits_reference(q, k, mask=mask, softmax_scale=SCALE)
    torch.testing.assert_close(largest, exact.float())


@pytest.mark.parametrize(
    "pair", [(10, 11), (63, 64), (100, 69), (140, 5)], ids=["next", "block", "before", "first"]
)
def test_pair_that_attention_never_sees_is_not_counted(pair: tuple[int, int]) -> None:
    q, k = torch.zeros(150, 1, 4), torch.zeros(150, 1, 4)
    q[pair[0]], k[pair[1]] = 10.0, 10.0
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)
    assert max_logits(q, k, cu_seqlens=bounds, softmax_scale=1.0).tolist() == [0.0]


@pytest.mark.parametrize("pair", [(69, 0), (149, 70), (149, 149), (64, 63), (0, 0)])
def test_pair_at_the_edge_of_a_block_is_counted(pair: tuple[int, int]) -> None:
    q, k = torch.zeros(150, 1, 4), torch.zeros(150, 1, 4)
    q[pair[0]], k[pair[1]] = 10.0, 10.0
    bounds = torch.tensor([0, 70, 150], dtype=torch.int32)
    assert max_logits(q, k, cu_seqlens=bounds, softmax_scale=1.0).tolist() == [400.0]


def test_negative_maxima_are_not_lost_to_padding() -> None:
    q, k = torch.ones(70, 2, 5), -torch.ones(70, 1, 5)
    bounds = torch.tensor([0, 70], dtype=torch.int32)
    assert max_logits(q, k, cu_seqlens=bounds, softmax_scale=1.0).tolist() == [-5.0, -5.0]
    mask = torch.ones(70, 70, dtype=torch.bool)
    assert max_logits(q, k, mask=mask, softmax_scale=1.0).tolist() == [-5.0, -5.0]


def test_strided_operands_and_expanded_keys() -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 30, 40).transpose(0, 1)[..., 7:31]
    k = torch.randn(30, 1, 24).expand(-1, 3, -1)
    bounds = torch.tensor([0, 30], dtype=torch.int32)
    largest = max_logits(q, k, cu_seqlens=bounds, softmax_scale=SCALE)
    dense = max_logits(q.contiguous(), k.contiguous(), cu_seqlens=bounds, softmax_scale=SCALE)
    assert torch.equal(largest, dense)


def test_override_refuses_a_head_that_is_too_wide() -> None:
    x = torch.ones(2, 1, 257)
    with pytest.raises(ValueError, match="cannot run in Triton"):
        max_logits(x, x, cu_seqlens=torch.tensor([0, 2], dtype=torch.int32), softmax_scale=1.0)
