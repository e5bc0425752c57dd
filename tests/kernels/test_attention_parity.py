"""Packed and masked attention on the CPU against scores written out in float64."""

from __future__ import annotations

import inspect
import itertools
import math

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from megacomposer.kernels.attention import (
    _equal_head_dims,
    _segmented_attention,
    masked_attention,
    masked_attention_reference,
    varlen_attention,
    varlen_attention_reference,
)
from megacomposer.kernels.bench import relative_error

# (query heads, key heads, head dim of queries and keys, head dim of values)
HEADS = [(4, 4, 16, 16), (4, 2, 16, 16), (6, 1, 8, 8), (2, 2, 24, 16), (4, 2, 12, 20)]
# one segment; equal ones; unequal with single tokens; empty ones first, between and last
SEGMENTS = [[0, 11], [0, 5, 10, 15], [0, 1, 8, 9, 16, 19], [0, 0, 4, 4, 11, 11], [0, 0, 7, 7]]


def _operands(heads, tokens: int, dtype=torch.float32, seed: int = 0) -> list[torch.Tensor]:
    query_heads, key_heads, dim, value_dim = heads
    torch.manual_seed(seed)
    shapes = [(query_heads, dim), (key_heads, dim), (key_heads, value_dim)]
    return [torch.randn(tokens, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def _bounds(segments: list[int]) -> dict[str, torch.Tensor | int]:
    return {
        "cu_seqlens": torch.tensor(segments, dtype=torch.int32),
        "max_seqlen": max(b - a for a, b in itertools.pairwise(segments)),
    }


def _with_gradients(fn, operands, grad, **arguments) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    out = fn(*leaves, softmax_scale=0.3, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_attention_and_its_gradients_match_the_formula(heads, segments) -> None:
    operands = _operands(heads, segments[-1])
    grad = torch.randn(segments[-1], heads[0], heads[3])
    got = _with_gradients(varlen_attention, operands, grad, **_bounds(segments))
    exact = _with_gradients(
        varlen_attention_reference, [t.double() for t in operands], grad, **_bounds(segments)
    )
    for a, e in zip(got, exact, strict=True):
        assert a.shape == e.shape
        assert relative_error(a, e) < 2e-6


def test_the_formula_is_a_softmax_over_earlier_tokens_of_the_same_document() -> None:
    q, k, v = (t.detach() for t in _operands((2, 1, 3, 2), 5, torch.float64))
    out = varlen_attention_reference(q, k, v, softmax_scale=0.5, **_bounds([0, 2, 5]))
    for token, start in enumerate([0, 0, 2, 2, 2]):
        for head in range(2):
            terms = [
                math.exp(0.5 * float(q[token, head] @ k[key, 0])) for key in range(start, token + 1)
            ]
            mean = sum(w * v[start + i, 0] for i, w in enumerate(terms)) / sum(terms)
            torch.testing.assert_close(out[token, head], mean)


@pytest.mark.parametrize("segments", [[0, 6, 12, 18], [0, 3, 12, 18], [0, 6, 12, 12, 18]], ids=str)
@pytest.mark.parametrize("poison", [7.0, float("nan")])
def test_changing_one_document_leaves_every_other_bit_identical(segments, poison) -> None:
    operands = _operands((4, 2, 16, 16), 18)
    grad = torch.randn(18, 4, 16)
    start, end = segments[1], segments[2]
    changed = [t.detach().clone() for t in operands]
    for tensor in changed:
        tensor[start:end] = poison
    before = _with_gradients(varlen_attention, operands, grad, **_bounds(segments))
    after = _with_gradients(varlen_attention, changed, grad, **_bounds(segments))
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:start], b[:start])
        assert torch.equal(a[end:], b[end:])
        assert not torch.equal(a[start:end], b[start:end])


def test_a_later_token_never_reaches_an_earlier_one() -> None:
    operands = [t.detach() for t in _operands((2, 2, 8, 8), 9)]
    before = varlen_attention(*operands, softmax_scale=0.3, **_bounds([0, 9]))
    for tensor in operands:
        tensor[6:] = 100.0
    after = varlen_attention(*operands, softmax_scale=0.3, **_bounds([0, 9]))
    assert torch.equal(after[:6], before[:6])
    assert not torch.equal(after[6:], before[6:])


@pytest.mark.parametrize("segments", [[0], [0, 0], [0, 0, 0]], ids=str)
def test_zero_tokens_keep_the_graph(segments) -> None:
    operands = _operands((4, 2, 8, 6), 0)
    out = varlen_attention(
        *operands,
        cu_seqlens=torch.tensor(segments, dtype=torch.int32),
        max_seqlen=0,
        softmax_scale=1.0,
    )
    assert out.shape == (0, 4, 6)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in operands)


def test_expanded_and_strided_operands_and_gradients_are_ordinary() -> None:
    q, k, v = (t.detach() for t in _operands((4, 2, 16, 16), 10))
    # as slices of one fused projection
    fused = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1)
    parts = fused.split([64, 32, 32], dim=1)
    views = [p.unflatten(1, (-1, 16)) for p in parts]
    grad = torch.ones(()).expand(10, 4, 16)
    bounds = _bounds([0, 4, 10])
    leaves = [t.detach().requires_grad_() for t in views]
    out = varlen_attention(*leaves, softmax_scale=0.3, **bounds)
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    expected = _with_gradients(varlen_attention, [q, k, v], grad.contiguous(), **bounds)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_those_of_the_forward() -> None:
    operands = _operands((4, 2, 3, 2), 6, torch.float64)

    def packed(q, k, v):
        return varlen_attention(q, k, v, softmax_scale=0.7, **_bounds([0, 2, 6]))

    def masked(q, k, v):
        mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
        return masked_attention(q, k, v, mask=mask, softmax_scale=0.7)

    assert torch.autograd.gradcheck(packed, operands)
    assert torch.autograd.gradcheck(masked, operands)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_masked_attention_and_its_gradients_match_the_formula(heads) -> None:
    q, _, _ = _operands(heads, 7, seed=1)
    _, k, v = _operands(heads, 12, seed=2)
    mask = torch.rand(7, 12) < 0.5
    mask[:, 3] = True
    grad = torch.randn(7, heads[0], heads[3])
    got = _with_gradients(masked_attention, (q, k, v), grad, mask=mask)
    wide = [t.double() for t in (q, k, v)]
    exact = _with_gradients(masked_attention_reference, wide, grad, mask=mask)
    for a, e in zip(got, exact, strict=True):
        assert relative_error(a, e) < 2e-6


def test_queries_of_a_context_parallel_rank_get_what_packed_attention_gives_them() -> None:
    """Mirrored chunks of two documents: the rank holds positions 0-2 and 9-11 of 12."""
    operands = _operands((4, 2, 16, 8), 12)
    segment = torch.tensor([0] * 5 + [1] * 7)
    mine = torch.tensor([0, 1, 2, 9, 10, 11])
    mask = (mine[:, None] >= torch.arange(12)) & (segment[mine][:, None] == segment)
    q, k, v = operands
    part = masked_attention(q[mine], k, v, mask=mask, softmax_scale=0.3)
    whole = varlen_attention(q, k, v, softmax_scale=0.3, **_bounds([0, 5, 12]))
    torch.testing.assert_close(part, whole[mine])


@pytest.mark.parametrize("value_dim", [16, 12])
def test_query_that_sees_no_key_gets_zeros_and_sends_finite_zero_gradients(value_dim) -> None:
    operands = _operands((2, 2, 16, value_dim), 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2] = False
    grad = torch.randn(6, 2, value_dim)
    out, *grads = _with_gradients(masked_attention, operands, grad, mask=mask)
    exact = _with_gradients(
        masked_attention_reference, [t.double() for t in operands], grad, mask=mask
    )
    assert torch.equal(out[2], torch.zeros(2, value_dim))
    assert torch.equal(grads[0][2], torch.zeros(2, 16))
    for a, e in zip([out, *grads], exact, strict=True):
        assert relative_error(a, e) < 2e-6


@pytest.mark.parametrize(("queries", "keys"), [(0, 4), (3, 0), (0, 0)])
def test_masked_attention_over_nothing_is_zero_and_keeps_the_graph(queries, keys) -> None:
    q, _, _ = _operands((2, 1, 8, 4), queries)
    _, k, v = _operands((2, 1, 8, 4), keys)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    out = masked_attention(q, k, v, mask=mask, softmax_scale=1.0)
    assert torch.equal(out, torch.zeros(queries, 2, 4))
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, v))


def test_padding_head_dims_for_flash_attention_is_exact() -> None:
    q, k, v = _operands((2, 2, 12, 5), 6, torch.float64)
    padded = _equal_head_dims(q, k, v)
    assert {t.shape[2] for t in padded} == {16}
    out = _segmented_attention(*padded, [2, 4], 0.3)
    torch.testing.assert_close(out[..., :5], _segmented_attention(q, k, v, [2, 4], 0.3))
    assert not out[..., 5:].any()


def test_installed_torch_takes_the_arguments_that_the_cuda_path_passes() -> None:
    arguments = {"scale": 1.0, "window_size": (-1, 0)}
    inspect.signature(varlen_attn).bind(*range(7), **arguments)


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        (torch.tensor([0, 3], dtype=torch.int32), 3, "rise from 0 to the 4 tokens"),
        (torch.tensor([1, 4], dtype=torch.int32), 4, "rise from 0"),
        (torch.tensor([0, 3, 2, 4], dtype=torch.int32), 4, "rise from 0"),
        (torch.tensor([0, 4]), 4, "int32"),
        (torch.tensor([0, 1, 4], dtype=torch.int32), 2, "longest segment 3"),
    ],
)
def test_wrong_segment_bounds_are_refused(cu_seqlens, max_seqlen, message) -> None:
    with pytest.raises(ValueError, match=message):
        varlen_attention(
            *_operands((2, 1, 8, 8), 4),
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            softmax_scale=1.0,
        )


def test_operands_that_do_not_fit_together_are_refused() -> None:
    q, k, v = _operands((3, 3, 8, 8), 4)
    bad = [(q, k[:, :2], v[:, :2]), (q, k[..., :4], v), (q, k, v[:3]), (q, k.double(), v)]
    for operands in bad:
        with pytest.raises(ValueError, match="multiple of Hkv"):
            varlen_attention(*operands, softmax_scale=1.0, **_bounds([0, 4]))
    with pytest.raises(ValueError, match="bool"):
        masked_attention(q, k, v, mask=torch.ones(4, 4), softmax_scale=1.0)
    with pytest.raises(ValueError, match="4 tokens but k has 3"):
        varlen_attention(q, k[:3], v[:3], softmax_scale=1.0, **_bounds([0, 4]))
