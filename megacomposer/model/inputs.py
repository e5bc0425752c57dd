"""What the model reads of a Batch: this CP rank's slice, and shifted targets for MTP."""

from __future__ import annotations

import dataclasses

import torch

from megacomposer.data.batch import Batch
from megacomposer.mesh.context_parallel import local_positions
from megacomposer.mesh.layout import Layout
from megacomposer.model.attention import Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One micro-batch on this rank: T tokens of the packed row, D = 1 + MTP depths.

    Row k of the [D, T] tensors belongs to depth k; depth 0 is the main head.
    """

    token_ids_DT: torch.Tensor
    """int64: token t + k of the same document, 0 beyond its end."""
    labels_DT: torch.Tensor
    """int64: the token after `token_ids_DT`; 0 where masked."""
    loss_mask_DT: torch.Tensor
    """bool: the label exists in the document and counts."""
    position_ids_T: torch.Tensor
    segments: Segments


def shift_within_documents(
    values_T: torch.Tensor, cu_seqlens: torch.Tensor, offset: int
) -> torch.Tensor:
    """values[t + offset] where t + offset is in the document of t, else 0 (False). Shape [T]."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    ends = torch.repeat_interleave(cu_seqlens[1:].long(), lengths).to(values_T.device)
    source = torch.arange(values_T.shape[0], device=values_T.device) + offset
    shifted = values_T[source.clamp(max=values_T.shape[0] - 1)]
    return torch.where(source < ends, shifted, torch.zeros_like(shifted))


def prepare_inputs(
    batch: Batch,
    layout: Layout,
    *,
    mtp_num_layers: int,
    device: torch.device,
    expert_ids_MNK: torch.Tensor | None = None,
) -> ModelInputs:
    """Shift for every depth over the whole row, then take this CP rank's tokens.

    Args:
        expert_ids_MNK: router replay: for each MoE layer (`GPT.moe_layers()` in order, the MTP
            depths last or left out) and token of the whole row, the K expert ids to use, -1 where
            unknown; any integer dtype. A row without ids of its own, such as a prompt that the
            engine had cached, is all -1. What happens to implausible ids: `kernels.moe_router`.

    Raises:
        ValueError: the row does not divide over TP (sequence parallelism) or CP, or has another
            number of tokens than the expert ids.
    """
    num_tokens = batch.token_ids.shape[0]
    if num_tokens % (layout.tp * layout.cp):
        raise ValueError(
            f"a micro-batch of {num_tokens} tokens (micro_batch_size x seq_length) cannot be split"
            f" over mesh.cp {layout.cp} x mesh.tp {layout.tp} ranks"
        )
    depths = range(1 + mtp_num_layers)
    stacked = {
        name: torch.stack(
            [shift_within_documents(getattr(batch, name), batch.cu_seqlens, k) for k in depths]
        )
        for name in ("token_ids", "labels", "loss_mask")
    }
    position_ids = batch.position_ids
    if expert_ids_MNK is not None and expert_ids_MNK.shape[1] != num_tokens:
        raise ValueError(
            f"expert ids {tuple(expert_ids_MNK.shape)} must be [MoE layers, {num_tokens}, K]"
        )
    if layout.cp > 1:
        index = local_positions(num_tokens, layout.cp_rank, layout.cp)
        stacked = {name: value[:, index] for name, value in stacked.items()}
        position_ids = position_ids[index]
        if expert_ids_MNK is not None:
            expert_ids_MNK = expert_ids_MNK[:, index.to(expert_ids_MNK.device)]
    expert_ids_MTK = (
        None if expert_ids_MNK is None else expert_ids_MNK.to(device, non_blocking=True)
    )
    return ModelInputs(
        token_ids_DT=stacked["token_ids"].to(device, non_blocking=True),
        labels_DT=stacked["labels"].to(device, non_blocking=True),
        loss_mask_DT=stacked["loss_mask"].to(device, non_blocking=True),
        position_ids_T=position_ids.to(device, non_blocking=True),
        segments=Segments(
            cu_seqlens=batch.cu_seqlens,
            cp_rank=layout.cp_rank,
            cp_size=layout.cp,
            expert_ids_MTK=expert_ids_MTK,
        ),
    )
