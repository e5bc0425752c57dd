"""AdamW on parameter shards: every rank updates what it stores, without communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from megacomposer.mesh.sharding import TensorLayout
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.moments import local_gradients, moment_entry, new_moment


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101), element by element.

    Works on local tensors, never on DTensors: the dense and the expert mesh may then share one
    multi-tensor call. Equal to `torch.optim.AdamW` bit for bit on the same device, and independent
    of how the parameters are sharded.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        router_lr_multiplier: float = 1.0,
    ) -> None:
        self._shards = list(shards)
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._weight_decay, self._router_lr_multiplier = weight_decay, router_lr_multiplier
        self._step_count = 0
        self._exp_avgs = [new_moment(shard) for shard in self._shards]
        self._exp_avg_sqs = [new_moment(shard) for shard in self._shards]

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        """Updates every parameter in place from its gradient; ValueError if one has none."""
        gradients = local_gradients(self._shards)
        self._step_count += 1
        alike: dict[tuple[float, float], list[int]] = {}
        for i, shard in enumerate(self._shards):
            if gradients[i].numel() > 0:
                rate = lr * self._router_lr_multiplier if shard.is_router else lr
                decay = self._weight_decay if shard.weight_decay else 0.0
                alike.setdefault((rate, decay), []).append(i)
        for (rate, decay), chosen in alike.items():
            self._update(chosen, gradients, rate, decay)

    def _update(
        self, chosen: list[int], gradients: list[torch.Tensor], lr: float, weight_decay: float
    ) -> None:
        parameters = [self._shards[i].local for i in chosen]
        on_cuda = parameters[0].is_cuda
        # the functional form adds 1; one small device tensor, so that nothing waits for the host
        steps = torch.full(
            (len(chosen),),
            float(self._step_count - 1),
            device=parameters[0].device if on_cuda else "cpu",
        )
        adamw(
            parameters,
            [gradients[i] for i in chosen],
            [self._exp_avgs[i] for i in chosen],
            [self._exp_avg_sqs[i] for i in chosen],
            [],
            list(steps.unbind()),
            foreach=False,
            fused=on_cuda,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Drops every gradient."""
        for shard in self._shards:
            shard.parameter.grad = None

    def state_tensors(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """`optim/<name>/exp_avg` and `.../exp_avg_sq`, float32, laid out as the parameter."""
        entries: dict[str, tuple[TensorLayout, torch.Tensor]] = {}
        for shard, first, second in zip(
            self._shards, self._exp_avgs, self._exp_avg_sqs, strict=True
        ):
            entries.update(
                [
                    moment_entry(shard, "exp_avg", first),
                    moment_entry(shard, "exp_avg_sq", second),
                ]
            )
        return entries

    def state_scalars(self) -> dict[str, int | float]:
        """`step`: how many updates were made; the bias correction depends on it."""
        return {"step": self._step_count}

    def load_state_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restores what `state_scalars` returned; ValueError if it holds anything else."""
        if set(scalars) != {"step"}:
            raise ValueError(
                f"optimizer scalars must be exactly ['step'], got {sorted(scalars)}; "
                "was the checkpoint written by another optimizer?"
            )
        self._step_count = int(scalars["step"])

    def metrics(self) -> dict[str, float]:
        """Nothing."""
        return {}
