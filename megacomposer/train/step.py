"""One optimizer step."""

from __future__ import annotations

import dataclasses

import torch

from megacomposer.data.batch import Batch
from megacomposer.loss.language_model import language_model_objective, masked_sums
from megacomposer.mesh.layout import Layout
from megacomposer.model.gpt import GPT
from megacomposer.model.inputs import prepare_inputs
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.grad_norm import clip_by_global_norm, global_grad_norm
from megacomposer.optim.optimizer import Optimizer
from megacomposer.optim.qk_clip import QKClip
from megacomposer.train.balance import RouterBalance


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step reports; losses are global means in nats per counted token."""

    loss: float
    mtp_loss: float | None
    num_tokens: int
    """Tokens of the global batch, masked ones included."""
    grad_norm: float
    """Global norm before clipping; not finite when the step was skipped."""
    skipped: bool
    balance: dict[str, float]
    qk_clip: dict[str, float]
    """Metrics of QK-clip; empty where it is off."""


class TrainStep:
    """Forward, backward, gradient reduction, clipping and update over one global batch."""

    def __init__(
        self,
        model: GPT,
        layout: Layout,
        shards: list[ParameterShard],
        optimizer: Optimizer,
        *,
        clip_grad_norm: float,
        device: torch.device,
        qk_clip: QKClip | None = None,
    ) -> None:
        self.model, self.layout, self.shards, self.optimizer = model, layout, shards, optimizer
        self.clip_grad_norm, self.device, self.qk_clip = clip_grad_norm, device, qk_clip
        self.balance = RouterBalance(model)
        self._tp_partial = [shard for shard in shards if shard.sum_over_tp]

    def __call__(self, micro_batches: list[Batch], *, lr: float) -> StepResult:
        """Run one step on this DP rank's micro-batches. Collective over the world.

        A non-finite gradient norm skips the update on every rank alike (the norm is global) and
        leaves parameters, moments and router biases untouched.
        """
        config = self.model.model_config
        inputs = [
            prepare_inputs(
                batch, self.layout, mtp_num_layers=config.mtp_num_layers, device=self.device
            )
            for batch in micro_batches
        ]
        counts_D = sum_over_data_ranks(
            torch.stack([item.loss_mask_DT.sum(dim=1) for item in inputs]).sum(0), self.layout
        )
        tokens = sum(batch.token_ids.shape[0] for batch in micro_batches) * self.layout.dp
        self.balance.start_step(num_tokens=tokens)
        set_aux_loss_scale(1.0 / (len(inputs) * self.layout.dp), self.device)
        sums_D = torch.zeros(counts_D.shape, device=self.device)
        for item in inputs:
            item_sums_D = masked_sums(self.model(item), item.loss_mask_DT)
            objective = language_model_objective(
                item_sums_D, counts_D, mtp_loss_weight=config.mtp_loss_weight
            )
            objective.backward()
            sums_D += item_sums_D.detach()
        self._sum_partial_gradients()
        norm = global_grad_norm(self.shards)
        if self.clip_grad_norm:
            clip_by_global_norm(self.shards, self.clip_grad_norm, norm)
        # Every rank decides alike, since the norm is global; the decision is needed on the host.
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            self.optimizer.step(lr=lr)
        self.optimizer.zero_grad()
        clip = self.qk_clip.finish_step(apply=not skipped) if self.qk_clip else {}
        balance = self.balance.finish_step(apply=not skipped)
        means = (sum_over_data_ranks(sums_D, self.layout) / counts_D.clamp(min=1)).tolist()
        return StepResult(
            loss=means[0],
            mtp_loss=sum(means[1:]) / len(means[1:]) if len(means) > 1 else None,
            num_tokens=tokens,
            grad_norm=float(norm),
            skipped=skipped,
            balance={name: float(value) for name, value in balance.items()},
            qk_clip={name: float(value) for name, value in clip.items()},
        )

    def _sum_partial_gradients(self) -> None:
        """Add up over TP the gradients of replicated weights that saw other tokens or heads."""
        if self.layout.tp == 1:
            return
        grads = [shard.local_grad for shard in self._tp_partial]
        packed = torch.cat([grad.flatten() for grad in grads if grad is not None])
        torch.distributed.all_reduce(packed, group=self.layout.tp_group)
        offset = 0
        for grad in grads:
            if grad is not None:
                grad.copy_(packed[offset : offset + grad.numel()].view_as(grad))
                offset += grad.numel()


def sum_over_data_ranks(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum over the ranks that hold other tokens (DP x CP). TP ranks repeat the same tokens."""
    if layout.dp * layout.cp > 1:
        torch.distributed.all_reduce(values, group=layout.dp_cp_group)
    return values


def set_aux_loss_scale(scale: float, device: torch.device) -> None:
    """Weight of each micro-batch's loss in megatron-core's routers; their sum is then a mean."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale, device=device))
