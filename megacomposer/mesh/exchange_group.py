"""Process groups for exchanges that run beside kernels and must not take their multiprocessors."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist


def group_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long an NCCL group lets a collective wait."""
    options = group._get_backend(torch.device("cuda")).options
    timeout: datetime.timedelta = options._timeout
    return timeout


def exchange_group(
    members_of_groups: Sequence[Sequence[int]], *, most_blocks: int
) -> dist.ProcessGroup:
    """A new NCCL communicator for each of these disjoint sets of ranks, and this rank's own one.
    All ranks of the world call it, with the same sets.

    Its kernels have at most `most_blocks` thread blocks and the priority over others. A block
    occupies a multiprocessor that a persistent kernel has left free, or waits for that kernel's end
    while the blocks that run already wait for their peers. NCCL would take up to 32 for sends
    between GPUs of one node. It rounds the number of channels of sends up to a power of two, so the
    limit is rounded down to one.

    Raises:
        ValueError: no block is left, or NCCL is not there.
    """
    if most_blocks < 1:
        raise ValueError(f"an exchange of most_blocks={most_blocks} cannot run; give it 1 or more")
    if not dist.is_nccl_available():
        raise ValueError("this build of torch has no NCCL; use the groups of the layout")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 2 ** (most_blocks.bit_length() - 1)
    world, own = dist.group.WORLD, []
    assert world is not None
    for members in members_of_groups:
        # By all ranks, so that torch counts groups for their names. A group that its members make
        # alone is named after them, and the next one of that name would find the first one's
        # addresses in the store.
        group = dist.new_group(
            list(members),
            timeout=group_timeout(world),
            backend="nccl",
            pg_options=options,
            group_desc="exchange",
        )
        if dist.get_rank() in members:
            own.append(group)
    (mine,) = own
    return mine
