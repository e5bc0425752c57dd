"""The Triton routing map: three launches, no sort, no atomics, no host sync.

Pairs (token, choice) are taken in blocks. A histogram of every block; a running sum over the blocks
of each expert; then the row of a pair is where its expert starts, plus the pairs of that expert in
earlier blocks, plus those earlier in its own block. So the map is stable by construction.

Shape suffixes: T tokens, K experts per token, E experts, R = T K pairs, B blocks of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pairs that a program ranks, by comparing each with every other of them: so many compares a pair.
# Doubling it doubles those, halving it doubles the counts [B, E] that the scan reads and writes.
_PAIRS = 128
# Pairs compared with all others at a time; more of them take more registers.
_STEP = 16
# Experts whose counts or starts a program holds at once; more come in turns.
_MAX_EXPERTS = 1024
# Blocks and experts of one step of the scan: 32 bytes, a sector, of every line of counts.
_SCAN_BLOCKS = 1024
_SCAN_EXPERTS = 8
_SCAN_WARPS = 16


def map_tensors(
    expert_ids_TK: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`order`, `token_of_row`, `row_of_TK` and `rows_per_expert` of a RoutingMap, all int64.

    expert_ids: [T, K], any integer dtype and strides, not empty. An id that is not in
    0..num_experts-1 is a device-side assertion, and nothing is written out of bounds for it.
    """
    tokens, choices = expert_ids_TK.shape
    pairs = tokens * choices
    blocks = triton.cdiv(pairs, _PAIRS)
    options = {"dtype": torch.int64, "device": expert_ids_TK.device}
    order, token_of_row = (torch.empty(pairs, **options) for _ in range(2))
    row_of_TK = torch.empty((tokens, choices), **options)
    rows_per_expert = torch.empty(num_experts, **options)
    # Counts become running sums, of which only those of 2^31 pairs and more need int64.
    count_dtype = torch.int32 if pairs < 2**31 else torch.int64
    counts_BE = torch.empty((blocks, num_experts), dtype=count_dtype, device=order.device)
    chunk = min(_MAX_EXPERTS, max(32, triton.next_power_of_2(num_experts)))
    experts = torch.empty(blocks * _PAIRS, dtype=torch.int32, device=order.device)
    # `debug` keeps the assertion; its overflow checks of every sum would only cost time.
    _count_kernel[(blocks,)](
        expert_ids_TK, pairs, *expert_ids_TK.stride(), num_experts, experts, counts_BE,
        K=choices, PAIRS=_PAIRS, CHUNK=chunk,
        num_warps=4, debug=True, sanitize_overflow=False,
    )  # fmt: skip
    _scan_kernel[(triton.cdiv(num_experts, _SCAN_EXPERTS),)](
        counts_BE, rows_per_expert, blocks, num_experts,
        BLOCKS=_SCAN_BLOCKS, EXPERTS=_SCAN_EXPERTS, num_warps=_SCAN_WARPS,
    )  # fmt: skip
    _place_kernel[(blocks,)](
        experts, num_experts, counts_BE, rows_per_expert, order, token_of_row, row_of_TK,
        K=choices, PAIRS=_PAIRS, STEP=_STEP, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return order, token_of_row, row_of_TK, rows_per_expert


@triton.jit
def _count_kernel(
    ids_ptr, pairs, token_stride, choice_stride, num_experts, experts_ptr, counts_ptr,
    K: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a dense copy of the ids, -1 past the last pair, and counts of this block's experts."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    exists = pair < pairs
    token = pair // K
    offset = token * token_stride + (pair - token * K) * choice_stride
    # Compared in int64: an id of 2^32 must not pass for 0. (Large uint64 ids turn negative.)
    expert = tl.load(ids_ptr + offset, mask=exists, other=0).to(tl.int64)
    is_expert = (expert >= 0) & (expert < num_experts)
    tl.device_assert(is_expert, "routing_map: an expert id is outside 0..num_experts-1")
    expert = tl.where(exists & is_expert, expert, -1).to(tl.int32)
    tl.store(experts_ptr + pair, expert)
    counts_ptr += tl.program_id(0).to(tl.int64) * num_experts
    for first in range(0, num_experts, CHUNK):
        slot = expert - first
        counted = (slot >= 0) & (slot < CHUNK)
        counts = tl.histogram(tl.where(counted, slot, 0), CHUNK, mask=counted)
        column = first + tl.arange(0, CHUNK)
        tl.store(counts_ptr + column, counts, mask=column < num_experts)


@triton.jit
def _scan_kernel(
    counts_ptr, rows_per_expert_ptr, blocks, num_experts,
    BLOCKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Replaces each count by the sum of those of the same expert in earlier blocks."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    total = tl.zeros((EXPERTS,), dtype=counts_ptr.dtype.element_ty)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        pointer = counts_ptr + block.to(tl.int64)[:, None] * num_experts + expert[None, :]
        mask = (block < blocks)[:, None] & is_expert[None, :]
        count = tl.load(pointer, mask=mask, other=0)
        tl.store(pointer, tl.cumsum(count, axis=0) - count + total[None, :], mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(rows_per_expert_ptr + expert, total.to(tl.int64), mask=is_expert)


@triton.jit
def _starts(expert, rows_per_expert_ptr, num_experts, PAIRS: tl.constexpr, CHUNK: tl.constexpr):
    """The first row of each pair's expert, int64 [PAIRS]."""
    start = tl.zeros((PAIRS,), dtype=tl.int64)
    rows_before = tl.zeros((1,), dtype=tl.int64)
    for first in range(0, num_experts, CHUNK):
        column = first + tl.arange(0, CHUNK)
        rows = tl.load(rows_per_expert_ptr + column, mask=column < num_experts, other=0)
        starts = tl.cumsum(rows, axis=0) - rows + rows_before
        slot = expert - first
        inside = (slot >= 0) & (slot < CHUNK)
        found = tl.gather(starts, tl.where(inside, slot, 0), 0)
        start = tl.where(inside, found, start)
        rows_before += tl.sum(rows, axis=0)
    return start


@triton.jit
def _place_kernel(
    experts_ptr, num_experts, earlier_ptr, rows_per_expert_ptr,
    order_ptr, token_of_row_ptr, row_of_ptr,
    K: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAIRS)
    experts_ptr += block * PAIRS
    expert = tl.load(experts_ptr + lane)
    exists = expert >= 0
    same = tl.zeros((STEP, PAIRS), dtype=tl.int32)
    for first in range(0, PAIRS, STEP):
        other = first + tl.arange(0, STEP)
        other_expert = tl.load(experts_ptr + other)
        is_earlier = other[:, None] < lane[None, :]
        same += (is_earlier & (other_expert[:, None] == expert[None, :])).to(tl.int32)
    rank = tl.sum(same, axis=0)
    row = _starts(expert, rows_per_expert_ptr, num_experts, PAIRS, CHUNK) + rank
    row += tl.load(earlier_ptr + block * num_experts + expert, mask=exists, other=0)
    pair = block * PAIRS + lane
    tl.store(order_ptr + row, pair, mask=exists)
    tl.store(token_of_row_ptr + row, pair // K, mask=exists)
    tl.store(row_of_ptr + pair, row, mask=exists)
