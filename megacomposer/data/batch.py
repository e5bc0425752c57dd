"""Batch: the narrow waist between data and training."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch: `micro_batch_size` packed sequences laid end to end in one row of T tokens.

    Documents never see each other: attention is limited to `cu_seqlens` segments, positions restart
    in each, and a label never crosses one.
    """

    token_ids: torch.Tensor
    """int64 [T]."""
    labels: torch.Tensor
    """int64 [T]: the next token of the same document; 0 where `loss_mask` is False."""
    loss_mask: torch.Tensor
    """bool [T]: True where the label counts."""
    position_ids: torch.Tensor
    """int64 [T]: index of the token inside its segment."""
    cu_seqlens: torch.Tensor
    """int32 [segments + 1] on the CPU: segment boundaries; first 0, last T."""

    def to(self, device: torch.device) -> Batch:
        """The same batch with the per-token tensors on `device`; `cu_seqlens` stays on the CPU."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("token_ids", "labels", "loss_mask", "position_ids")
        }
        return dataclasses.replace(self, **moved)
