"""Packed and masked attention on a GPU, in the kernels that torch ships."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from megacomposer.kernels.attention import (
    masked_attention,
    masked_attention_reference,
    varlen_attention,
    varlen_attention_reference,
)
from megacomposer.kernels.bench import relative_error

DEVICE = torch.device("cuda")
SCALE = 0.1
# (query heads, key heads, head dim of queries and keys, head dim of values)
HEADS = [(8, 8, 128, 128), (8, 2, 128, 128), (4, 4, 192, 128), (4, 2, 64, 64), (4, 2, 44, 24)]
SEGMENTS = [[0, 700], [0, 300, 600, 900], [0, 1, 257, 257, 258, 800]]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _operands(heads, tokens: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    query_heads, key_heads, dim, value_dim = heads
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [(query_heads, dim), (key_heads, dim), (key_heads, value_dim)]
    shapes.append((query_heads, value_dim))
    return [
        torch.randn(tokens, *shape, device=DEVICE, generator=generator).to(dtype)
        for shape in shapes
    ]


def _bounds(segments: list[int]) -> dict[str, torch.Tensor | int]:
    return {
        "cu_seqlens": torch.tensor(segments, dtype=torch.int32),
        "max_seqlen": max(b - a for a, b in itertools.pairwise(segments)),
    }


def _with_gradients(fn, q, k, v, grad, **arguments) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = fn(*leaves, softmax_scale=SCALE, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _torch_attention(q, k, v, *, softmax_scale, mask=None):
    """One SDPA call, heads repeated by hand."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    causal = mask is None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=softmax_scale
    )
    return out[0].transpose(0, 1)


def _torch_packed(q, k, v, *, softmax_scale, cu_seqlens, max_seqlen):
    parts = [
        _torch_attention(q[a:b], k[a:b], v[a:b], softmax_scale=softmax_scale)
        for a, b in itertools.pairwise(cu_seqlens.tolist())
        if b > a
    ]
    return torch.cat(parts)


def _assert_at_most_twice_as_wrong(ours, theirs, exact) -> None:
    for name, a, b, e in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) <= 2 * relative_error(b, e) + 1e-7, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_error_is_at_most_twice_that_of_sdpa(heads, segments, dtype) -> None:
    operands = _operands(heads, segments[-1], dtype)
    wide = [t.double() for t in operands]
    exact = _with_gradients(varlen_attention_reference, *wide, **_bounds(segments))
    theirs = _with_gradients(_torch_packed, *operands, **_bounds(segments))
    ours = _with_gradients(varlen_attention, *operands, **_bounds(segments))
    _assert_at_most_twice_as_wrong(ours, theirs, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_masked_error_is_at_most_twice_that_of_sdpa(heads, dtype) -> None:
    q, _, _, grad = _operands(heads, 203, dtype, seed=1)
    _, k, v, _ = _operands(heads, 509, dtype, seed=2)
    mask = torch.rand(203, 509, device=DEVICE) < 0.5
    operands = (q, k, v, grad)
    wide = [t.double() for t in operands]
    exact = _with_gradients(masked_attention_reference, *wide, mask=mask)
    theirs = _with_gradients(_torch_attention, *operands, mask=mask)
    ours = _with_gradients(masked_attention, *operands, mask=mask)
    _assert_at_most_twice_as_wrong(ours, theirs, exact)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_query_that_sees_no_key_gets_zeros_and_finite_gradients(heads) -> None:
    operands = _operands(heads, 130, torch.bfloat16)
    mask = torch.ones(130, 130, dtype=torch.bool, device=DEVICE).tril()
    mask[40:45] = False
    out, *grads = _with_gradients(masked_attention, *operands, mask=mask)
    assert not out[40:45].any()
    assert not grads[0][40:45].any()
    assert all(t.isfinite().all() for t in grads)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("segments", [[0, 300, 600, 900], [0, 100, 430, 431, 900]], ids=str)
def test_changing_one_document_leaves_every_other_bit_identical(
    heads, segments, deterministic: None
) -> None:
    operands = _operands(heads, 900, torch.bfloat16)
    start, end = segments[1:3]
    changed = [t.clone() for t in operands[:3]]
    for tensor in changed:
        tensor[start:end] = 7.0
    before = _with_gradients(varlen_attention, *operands, **_bounds(segments))
    after = _with_gradients(varlen_attention, *changed, operands[3], **_bounds(segments))
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:start], b[:start])
        assert torch.equal(a[end:], b[end:])
        assert not torch.equal(a[start:end], b[start:end])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
def test_gradients_repeat_in_deterministic_mode(heads, segments, deterministic: None) -> None:
    operands = _operands(heads, segments[-1], torch.bfloat16)
    first = _with_gradients(varlen_attention, *operands, **_bounds(segments))
    for _ in range(10):
        again = _with_gradients(varlen_attention, *operands, **_bounds(segments))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("heads", [(32, 32, 192, 128), (32, 4, 128, 128)], ids=str)
@pytest.mark.parametrize("segments", [[0, 8192], [0, 3000, 8192], None], ids=str)
def test_scores_are_never_written_out(heads, segments) -> None:
    """32 heads of 8192 x 8192 bf16 scores are 4 GiB; the operands and results are 1 GiB."""
    operands = _operands(heads, 8192, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if segments is None:
        mask = torch.ones(8192, 8192, dtype=torch.bool, device=DEVICE).tril()
        _with_gradients(masked_attention, *operands, mask=mask)
    else:
        _with_gradients(varlen_attention, *operands, **_bounds(segments))
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30


def test_zero_tokens_keep_the_graph() -> None:
    q, k, v, _ = (t.requires_grad_() for t in _operands(HEADS[1], 0, torch.bfloat16))
    out = varlen_attention(
        q, k, v, cu_seqlens=torch.zeros(1, dtype=torch.int32), max_seqlen=0, softmax_scale=SCALE
    )
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert v.grad.shape == v.shape
