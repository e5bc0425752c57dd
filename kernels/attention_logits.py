"""The largest attention logit of each head, which QK-clip watches (Kimi K2, arXiv 2507.20534).

Shape suffixes: T tokens (Tq queries, Tk keys), Hq query heads, Hkv key heads (Hq a multiple of
Hkv), D head dim of queries and keys.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from .attention import check_mask, check_operands, document_mask, segment_bounds
from .dispatch import accumulation_dtype, choose

# 16 MiB of float32 scores at a time in the torch path
_BLOCK_SCORES = 2**22


def max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    softmax_scale: float,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """max over the pairs that attention sees of softmax_scale * q . k, float32 [Hq].

    q: [Tq, Hq, D], k: [Tk, Hkv, D], one dtype. Exactly one of `cu_seqlens` (as in
    `varlen_attention`: causal inside each segment, Tq = Tk) and `mask` (as in `masked_attention`,
    bool [Tq, Tk]) says which pairs count. A head that sees no pair gets -inf. The products are
    accumulated in float32. Not differentiable: the result is detached. Nothing waits for the
    device. Heads are independent; a maximum over tokens split between ranks is left to the caller.

    Raises ValueError if a shape or dtype is not as above, or softmax_scale is not positive.
    """
    _check(q, k, cu_seqlens, mask, softmax_scale)
    q, k = q.detach(), k.detach()
    implementation = choose("max_logits", q)
    if implementation == "reference":
        exact = max_logits_reference(
            q, k, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, mask=mask
        )
        return exact.float()
    if q.shape[0] == 0 or k.shape[0] == 0:
        return torch.full((q.shape[1],), float("-inf"), device=q.device)
    largest = _max_products_triton if implementation == "triton" else _max_products_torch
    return largest(q, k, cu_seqlens, mask) * softmax_scale


def max_logits_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    softmax_scale: float,
    cu_seqlens: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`max_logits` with all logits [Hq, Tq, Tk] written out, float64 throughout."""
    if mask is None:
        assert cu_seqlens is not None
        mask = document_mask(cu_seqlens, q.shape[0]).to(q.device)
    repeated = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.double(), repeated) * softmax_scale
    logits = logits.masked_fill(~mask, float("-inf")).flatten(1)
    nothing = logits.new_full((logits.shape[0], 1), float("-inf"))
    return torch.cat([logits, nothing], dim=1).amax(dim=1)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    mask: torch.Tensor | None,
    softmax_scale: float,
) -> None:
    check_operands("max_logits", q, k, k)
    if not softmax_scale > 0:
        raise ValueError(f"max_logits: softmax_scale {softmax_scale} must be positive")
    if (cu_seqlens is None) == (mask is None):
        raise ValueError("max_logits: give exactly one of cu_seqlens and mask")
    if mask is not None:
        check_mask("max_logits", q, k, mask)
    if cu_seqlens is not None:
        segment_bounds("max_logits", cu_seqlens, q.shape[0], q.shape[0])
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"max_logits: q has {q.shape[0]} tokens but k has {k.shape[0]}")


def _max_products_torch(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Largest q . k of each head, over blocks of query rows; float32 [Hq]."""
    wide = accumulation_dtype(q.dtype)
    tokens, heads, _ = q.shape
    bounds = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    position = torch.arange(tokens, device=q.device)
    k_wide = k.to(wide)
    largest = torch.full((heads,), float("-inf"), dtype=wide, device=q.device)
    for start, end in itertools.pairwise(bounds):
        width = k.shape[0] if mask is not None else end - start
        rows = max(1, _BLOCK_SCORES // (heads * max(width, 1)))
        for first in range(start, end, rows):
            stop = min(first + rows, end)
            if mask is not None:
                keys, seen = k_wide, mask[first:stop]
            else:
                keys = k_wide[start:stop]
                seen = position[first:stop, None] >= position[None, start:stop]
            block = _block_maximum(q[first:stop].to(wide), keys, seen)
            largest = torch.maximum(largest, block)
    return largest.float()


def _block_maximum(q_RHD: torch.Tensor, k_SGD: torch.Tensor, seen_RS: torch.Tensor) -> torch.Tensor:
    """Largest product of each head where `seen`; G key heads."""
    groups = k_SGD.shape[1]
    q_GXD = q_RHD.unflatten(1, (groups, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    products = torch.bmm(q_GXD, k_SGD.permute(1, 2, 0))
    products = products.view(q_RHD.shape[1], q_RHD.shape[0], k_SGD.shape[0])
    return products.masked_fill(~seen_RS, float("-inf")).amax(dim=(1, 2))


def _max_products_triton(
    q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Largest q . k of each head; one program per head and block of queries; float32 [Hq]."""
    q, k = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k))
    tokens, heads, dim = q.shape
    block_q, block_k, stages, warps = _tile(q.dtype)
    dim_low, dim_high = _split_dim(dim)
    blocks = triton.cdiv(tokens, block_q)
    largest = torch.empty((blocks, heads), dtype=torch.float32, device=q.device)
    if mask is not None:
        seen = mask.contiguous().view(torch.uint8)
    else:
        assert cu_seqlens is not None
        seen = _segment_starts(cu_seqlens, tokens, q.device)
    _max_products_kernel[(heads, blocks)](
        q, k, seen, largest, tokens, k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), heads // k.shape[1],
        D=dim, DIM_LOW=dim_low, DIM_HIGH=dim_high, BLOCK_Q=block_q, BLOCK_K=block_k,
        MASKED=mask is not None, num_stages=stages, num_warps=warps,
    )  # fmt: skip
    return largest.amax(dim=0)


def _segment_starts(cu_seqlens: torch.Tensor, tokens: int, device: torch.device) -> torch.Tensor:
    """int32 [tokens]: where the segment of each token starts."""
    bounds = cu_seqlens.to(device, non_blocking=True)
    position = torch.arange(tokens, dtype=torch.int32, device=device)
    return bounds[torch.searchsorted(bounds, position, right=True) - 1]


def _tile(dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(queries, keys, pipeline stages, warps). Fixed, so that a head's result does not depend on
    the others. Query and key tiles of a 256-wide head fit in the 227 KiB of an H200's SM."""
    return (32, 32, 1, 4) if dtype == torch.float32 else (128, 128, 2, 8)


def _split_dim(dim: int) -> tuple[int, int]:
    """Two tile widths (powers of 2 >= 16, or 0 for the second) that cover a head dim such as 192
    without padding it to the next power of 2."""
    low = max(16, 2 ** (dim.bit_length() - 1))
    rest = dim - low
    return low, 0 if rest <= 0 else max(16, triton.next_power_of_2(rest))


@triton.jit
def _max_products_kernel(
    q_ptr,
    k_ptr,
    seen_ptr,
    largest_ptr,
    tokens,
    keys,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    heads_per_key_head,
    D: tl.constexpr,
    DIM_LOW: tl.constexpr,
    DIM_HIGH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):
    # seen_ptr: the mask as bytes [tokens, keys], or the start of each token's segment.
    head = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows of a causal mask first
    query = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query_ok = query < tokens
    low = tl.arange(0, DIM_LOW)
    q_row = q_ptr + query.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    k_ptr += (head // heads_per_key_head).to(tl.int64) * k_head_stride
    q_low = tl.load(
        q_row[:, None] + low[None, :], mask=query_ok[:, None] & (low < D)[None, :], other=0.0
    )
    if DIM_HIGH > 0:
        high = DIM_LOW + tl.arange(0, DIM_HIGH)
        q_high = tl.load(
            q_row[:, None] + high[None, :], mask=query_ok[:, None] & (high < D)[None, :], other=0.0
        )
    if MASKED:
        begin, end = 0, keys
    else:
        begin = tl.load(seen_ptr + block * BLOCK_Q) // BLOCK_K * BLOCK_K
        end = tl.minimum(tokens, (block + 1) * BLOCK_Q)
        segment = tl.load(seen_ptr + query, mask=query_ok, other=0)
    best = tl.full((BLOCK_Q, BLOCK_K), float("-inf"), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        key_ok = key < keys
        k_row = k_ptr + key.to(tl.int64) * k_token_stride
        k_low = tl.load(
            k_row[None, :] + low[:, None], mask=key_ok[None, :] & (low < D)[:, None], other=0.0
        )
        products = tl.dot(q_low, k_low, input_precision="ieee")
        if DIM_HIGH > 0:
            k_high = tl.load(
                k_row[None, :] + high[:, None],
                mask=key_ok[None, :] & (high < D)[:, None],
                other=0.0,
            )
            products = tl.dot(q_high, k_high, products, input_precision="ieee")
        counted = query_ok[:, None] & key_ok[None, :]
        if MASKED:
            seen = seen_ptr + query.to(tl.int64)[:, None] * keys + key[None, :]
            counted = tl.load(seen, mask=counted, other=0) != 0
        else:
            counted &= (key[None, :] <= query[:, None]) & (key[None, :] >= segment[:, None])
        best = tl.maximum(best, tl.where(counted, products, float("-inf")))
    largest = tl.max(tl.max(best, axis=1), axis=0)
    tl.store(largest_ptr + block.to(tl.int64) * tl.num_programs(0) + head, largest)
