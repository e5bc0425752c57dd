"""Causal attention over packed documents, and attention under an explicit mask.

Shape suffixes: T tokens (Tq queries, Tk keys), Hq query heads, Hkv key/value heads (Hq a multiple
of Hkv), Dqk head dim of queries and keys, Dv head dim of values (Multi-head Latent Attention: 192
and 128), N segments of length L.

Every path runs kernels that torch ships. On CUDA their backward (FlashAttention-2's and the
memory-efficient one's) sums in a varying order unless `torch.use_deterministic_algorithms(True)` is
set.
"""

from __future__ import annotations

import inspect
import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from .dispatch import accumulation_dtype, choose, use_flash_varlen

# Grouped heads without a copy came with torch 2.12; 2.11 wants as many key heads as query heads.
_VARLEN_TAKES_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Causal attention inside each segment; tokens of different segments never meet.

    q: [T, Hq, Dqk], k: [T, Hkv, Dqk], v: [T, Hkv, Dv], one dtype; cu_seqlens: int32 [N + 1] on the
    CPU, first 0, last T, not decreasing (empty segments are allowed); max_seqlen: tokens, at least
    the longest segment; softmax_scale: multiplies the scores. Returns [T, Hq, Dv] in v's dtype.
    Heads are independent, so tensor parallelism over heads needs no communication here.

    Raises ValueError if a shape, a dtype or `cu_seqlens` is not as above.
    """
    check_operands("varlen_attention", q, k, v)
    bounds = segment_bounds("varlen_attention", cu_seqlens, q.shape[0], max_seqlen)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"varlen_attention: q has {q.shape[0]} tokens but k has {k.shape[0]}")
    if choose("varlen_attention", q) == "reference":
        return varlen_attention_reference(
            q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, softmax_scale=softmax_scale
        )
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if sum(length > 0 for length in lengths) <= 1 or not use_flash_varlen(
        q, max(q.shape[2], v.shape[2])
    ):
        return _segmented_attention(q, k, v, lengths, softmax_scale)
    return _flash_varlen_attention(q, k, v, cu_seqlens, max(lengths), softmax_scale)


def varlen_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> torch.Tensor:
    """`varlen_attention` through one explicit [T, T] mask, in fp32 (float64 for float64 input)."""
    tokens = q.shape[0]
    segment_bounds("varlen_attention", cu_seqlens, tokens, max_seqlen)
    mask = document_mask(cu_seqlens, tokens).to(q.device)
    return masked_attention_reference(q, k, v, mask=mask, softmax_scale=softmax_scale)


def document_mask(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [tokens, tokens] on the CPU: causal, inside each segment of `cu_seqlens`."""
    position = torch.arange(tokens)
    segment = torch.searchsorted(cu_seqlens.long(), position, right=True)
    causal = position[:, None] >= position[None, :]
    return causal & (segment[:, None] == segment[None, :])


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention where query i sees key j iff mask[i, j]: for queries that are a subset of the
    positions, as on one rank of a context-parallel axis that has gathered every key.

    q: [Tq, Hq, Dqk], k: [Tk, Hkv, Dqk], v: [Tk, Hkv, Dv], one dtype; mask: bool [Tq, Tk] on their
    device. Returns [Tq, Hq, Dv] in v's dtype. A query that sees no key gets zeros, and sends zero
    gradients. Keys may be shared with other ranks: their gradients are partial sums.

    Memory: two copies of the mask and an additive one in q's dtype, (2 + bytes of q's dtype) Tq Tk
    bytes, whatever the heads; where only the unfused path takes the operands (on the CPU, if
    Dqk != Dv), also Hq Tq Tk scores.

    Raises ValueError if a shape or dtype is not as above.
    """
    check_operands("masked_attention", q, k, v)
    check_mask("masked_attention", q, k, mask)
    if choose("masked_attention", q) == "reference":
        return masked_attention_reference(q, k, v, mask=mask, softmax_scale=softmax_scale)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return _empty_attention(q, k, v)
    # Fused kernels do not agree on a softmax over nothing: let such a query see everything, then
    # drop its result, which drops its gradients too.
    sees_any = mask.any(dim=1)
    out = F.scaled_dot_product_attention(
        _heads_first(q),
        _heads_first(_repeat_heads(k, q.shape[1])),
        _heads_first(_repeat_heads(v, q.shape[1])),
        attn_mask=mask | ~sees_any[:, None],
        scale=softmax_scale,
    )
    out = out[0].transpose(0, 1)
    return torch.where(sees_any[:, None, None], out, out.new_zeros(()))


def masked_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """`masked_attention` with the scores [Hq, Tq, Tk] written out, in fp32 (or float64)."""
    wide = accumulation_dtype(q.dtype)
    k_wide = _repeat_heads(k, q.shape[1]).to(wide)
    v_wide = _repeat_heads(v, q.shape[1]).to(wide)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k_wide) * softmax_scale
    scores = scores.masked_fill(~mask, float("-inf"))
    # A row of -inf alone has no softmax; it gets weight zero everywhere.
    scores = torch.where(mask.any(dim=1)[:, None], scores, 0.0)
    weights = torch.softmax(scores, dim=-1) * mask
    return torch.einsum("hqk,khd->qhd", weights, v_wide).to(v.dtype)


def _segmented_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], softmax_scale: float
) -> torch.Tensor:
    """One SDPA call per distinct segment length, over the segments of that length as a batch."""
    if q.shape[0] == 0:
        return _empty_attention(q, k, v)
    value_dim = v.shape[2]
    if q.is_cuda and q.dtype != torch.float32:
        q, k, v = _equal_head_dims(q, k, v)
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        if length > 0:
            members.setdefault(length, []).append(index)
    if len(members) == 1:
        (length,) = members
        out = _batched_causal(*(t.unflatten(0, (-1, length)) for t in (q, k, v)), softmax_scale)
        return out.flatten(0, 1)[..., :value_dim]
    split_q, split_k, split_v = (t.split(lengths) for t in (q, k, v))
    outs: list[torch.Tensor | None] = [None] * len(lengths)
    for indices in members.values():
        stacked = (torch.stack([s[i] for i in indices]) for s in (split_q, split_k, split_v))
        for index, out in zip(indices, _batched_causal(*stacked, softmax_scale), strict=True):
            outs[index] = out
    return torch.cat([out for out in outs if out is not None])[..., :value_dim]


def _batched_causal(
    q_NLHD: torch.Tensor, k_NLHD: torch.Tensor, v_NLHD: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """SDPA with the causal mask; returns [N, L, Hq, Dv]."""
    out = F.scaled_dot_product_attention(
        q_NLHD.transpose(1, 2),
        k_NLHD.transpose(1, 2),
        v_NLHD.transpose(1, 2),
        is_causal=True,
        scale=softmax_scale,
    )
    return out.transpose(1, 2)


def _flash_varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    softmax_scale: float,
) -> torch.Tensor:
    """torch's packed FlashAttention; since torch 2.11 a `window_size` of (-1, 0) means causal.
    `num_splits` (2.12) is not passed: only FlashAttention-3, which torch lacks, takes it."""
    value_dim = v.shape[2]
    q, k, v = _equal_head_dims(q, k, v)
    grouped = {"enable_gqa": True} if _VARLEN_TAKES_GROUPED_HEADS else {}
    if not grouped:
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    bounds = cu_seqlens.to(device=q.device, dtype=torch.int32, non_blocking=True)
    out = varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=softmax_scale,
        window_size=(-1, 0),
        **grouped,
    )
    return out[..., :value_dim]


def _equal_head_dims(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad head dims with zeros to one multiple of 8, which FlashAttention asks for. Exact: zero
    query and key columns add nothing to a score, zero value columns are cut off afterwards."""
    dim = -(-max(q.shape[2], v.shape[2]) // 8) * 8
    padded = [t if t.shape[2] == dim else F.pad(t, (0, dim - t.shape[2])) for t in (q, k, v)]
    return tuple(t if t.stride(2) == 1 else t.contiguous() for t in padded)  # type: ignore[return-value]


def _repeat_heads(x_THD: torch.Tensor, heads: int) -> torch.Tensor:
    """Each key/value head `heads / Hkv` times in a row. Grouped-query flags of SDPA are not used:
    they turn the memory-efficient kernel off."""
    kv_heads = x_THD.shape[1]
    return x_THD if kv_heads == heads else x_THD.repeat_interleave(heads // kv_heads, dim=1)


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)


def _empty_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Zeros [Tq, Hq, Dv] for no queries or no keys, connected to q, k and v so that a backward
    collective behind them still runs on this rank."""
    nothing = q.narrow(2, 0, 0).sum() + k.narrow(2, 0, 0).sum() + v.narrow(2, 0, 0).sum()
    return v.new_zeros((q.shape[0], q.shape[1], v.shape[2])) + nothing


def check_operands(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """ValueError unless q [Tq, Hq, Dqk], k [Tk, Hkv, Dqk], v [Tk, Hkv, Dv] belong together."""
    if not (
        q.dim() == k.dim() == v.dim() == 3
        and k.shape[:2] == v.shape[:2]
        and q.shape[2] == k.shape[2]
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
        and q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            f"{op}: want q [Tq, Hq, Dqk], k [Tk, Hkv, Dqk], v [Tk, Hkv, Dv] of one dtype with Hq a "
            f"multiple of Hkv, got {tuple(q.shape)} {q.dtype}, {tuple(k.shape)} {k.dtype}, "
            f"{tuple(v.shape)} {v.dtype}"
        )


def check_mask(op: str, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> None:
    """ValueError unless `mask` is bool [Tq, Tk]."""
    if mask.dtype != torch.bool or mask.shape != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"{op}: mask must be bool [Tq, Tk] = [{q.shape[0]}, {k.shape[0]}], "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )


def segment_bounds(op: str, cu_seqlens: torch.Tensor, tokens: int, max_seqlen: int) -> list[int]:
    """`cu_seqlens` as a list; ValueError unless it rises from 0 to `tokens` in steps of at most
    `max_seqlen`."""
    if cu_seqlens.device.type != "cpu" or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"{op}: cu_seqlens must be int32 [segments + 1] on the CPU, "
            f"got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    bounds: list[int] = cu_seqlens.tolist()
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to the {tokens} tokens, got {bounds}")
    longest = max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    if longest > max_seqlen:
        raise ValueError(
            f"{op}: max_seqlen {max_seqlen} is less than the longest segment {longest}"
        )
    return bounds
