"""The next-token objective with multi-token prediction.

Shape letters: T tokens of a micro-batch on this rank, D heads (the main one, then MTP depths).
"""

from __future__ import annotations

import torch


def masked_sums(loss_DT: torch.Tensor, loss_mask_DT: torch.Tensor) -> torch.Tensor:
    """Sum of the counted losses of each head, float32 [D]."""
    return torch.where(loss_mask_DT, loss_DT, 0.0).sum(dim=1)


def language_model_objective(
    sums_D: torch.Tensor, global_counts_D: torch.Tensor, *, mtp_loss_weight: float
) -> torch.Tensor:
    """This micro-batch's additive share of the global objective, a scalar.

    Each head is a global mean, so the shares of all ranks and micro-batches add up to

        mean(main) + mtp_loss_weight * average over depths of mean(depth)      (DeepSeek-V3, eq. 25)

    whatever the layout. A head without a single counted label contributes 0.

    Args:
        sums_D: `masked_sums` of this micro-batch, in nats.
        global_counts_D: counted labels of each head in the whole global batch, over all ranks.
    """
    means_D = sums_D / global_counts_D.clamp(min=1)
    if means_D.shape[0] == 1:
        return means_D[0]
    return means_D[0] + mtp_loss_weight * means_D[1:].mean()
