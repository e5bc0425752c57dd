"""Context parallelism: how one packed row is spread over the ranks that share it.

The row of T tokens is cut into 2 * cp equal chunks and rank i takes chunks i and 2 * cp - 1 - i, so
that every rank does the same share of causal attention. (As in Composer 2, technical report 6.1,
and megatron-core.)
"""

from __future__ import annotations

import torch


def local_positions(num_tokens: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Row indices that `cp_rank` holds, int64 [num_tokens / cp_size], ascending.

    Raises:
        ValueError: 2 * cp_size does not divide num_tokens.
    """
    if num_tokens % (2 * cp_size):
        raise ValueError(
            f"a row of {num_tokens} tokens cannot be cut into 2 * cp = {2 * cp_size} equal chunks:"
            " change data.seq_length or train.micro_batch_size"
        )
    chunks = torch.arange(num_tokens).view(2 * cp_size, -1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def gathered_positions(num_tokens: int, cp_size: int) -> torch.Tensor:
    """Row index of each entry after an all-gather over the group in rank order, int64 [T]."""
    return torch.cat([local_positions(num_tokens, rank, cp_size) for rank in range(cp_size)])
