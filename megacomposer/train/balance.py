"""Router balance over the global batch: expert biases, the auxiliary loss's loads, and metrics.

Biases without a loss: Wang et al. 2024, arXiv 2408.15664.
"""

from __future__ import annotations

import torch

from megacomposer.model.gpt import GPT


class RouterBalance:
    """Counts tokens per expert over the global batch, for each router's bias and auxiliary loss."""

    def __init__(self, model: GPT) -> None:
        self._layers = list(model.moe_layers().values())
        self._routers = model.routers()
        self._rate = model.model_config.router_bias_update_rate
        self._by_error = model.model_config.router_bias_update == "error"

    def start_step(self, *, num_tokens: int) -> None:
        """Before the first forward of a step: `num_tokens` of all its micro-batches and ranks."""
        for router in self._routers:
            router.start_step(num_tokens)

    @torch.no_grad()
    def finish_step(self, *, apply: bool) -> dict[str, torch.Tensor]:
        """Reduce the counts, move biases and loads (unless the step was skipped), clear the counts.

        The bias of an expert rises when it got fewer tokens than the mean, falls when it got more:
        by the update rate, or by it times the error relative to the mean. Its load becomes its
        share of the rows, for the auxiliary loss of the next step. One all-reduce over the world
        for all layers.

        Returns:
            Load, loss and replay metrics as 0-d tensors; empty for a dense model.
        """
        if not self._layers:
            return {}
        counts_LE = torch.stack([layer.tokens_per_expert for layer in self._layers])
        num_experts = counts_LE.shape[1]
        sums = counts_LE
        if self._routers:
            statistics = torch.stack([router.statistics for router in self._routers])
            sums = torch.cat([counts_LE, statistics], dim=1)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(sums)
        counts_LE = sums[:, :num_experts]
        mean_L1 = counts_LE.mean(dim=1, keepdim=True)
        # No token at all is a load of 0, not 0 / 0.
        load_LE = counts_LE / mean_L1.clamp(min=1 / num_experts)
        largest_bias = counts_LE.new_zeros(())
        for layer, counts_E, mean_1 in zip(self._layers, counts_LE, mean_L1, strict=True):
            layer.tokens_per_expert.zero_()
            bias = layer.router.expert_bias
            if bias is not None:
                if apply:
                    bias += self._rate * self._towards_balance(counts_E, mean_1)
                largest_bias = torch.maximum(largest_bias, bias.abs().max())
        metrics = {
            "train/expert_load_max_over_mean": load_LE.max(),
            "train/expert_load_min_over_mean": load_LE.min(),
            "train/expert_bias_max": largest_bias,
        }
        if self._routers:
            metrics |= self._router_metrics(sums[:, num_experts:], load_LE)
            if apply:
                self._set_loads(counts_LE)
            for router in self._routers:
                router.step_tokens = 0
        return metrics

    def _towards_balance(self, counts_E: torch.Tensor, mean_1: torch.Tensor) -> torch.Tensor:
        short_E = mean_1 - counts_E
        return short_E / mean_1.clamp(min=1e-9) if self._by_error else torch.sign(short_E)

    def _router_metrics(
        self, statistics: torch.Tensor, load_LE: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Losses before their weights (the balancing one with this step's loads, where its gradient
        had those of the step before) and shares of replayed ids, means over layers. The latter only
        where this rank had ids to replay."""
        first = self._routers[0]
        *_, squares_L, tokens_L, replayed_L, substituted_L = statistics.unbind(dim=1)
        tokens_L = tokens_L.clamp(min=1)
        metrics = {}
        if first.aux_loss_coeff:
            # E sum_e load_e P_e with load as a share, which is load over mean divided by E.
            sums_LE = statistics[:, : load_LE.shape[1]]
            metrics["train/aux_loss"] = ((load_LE * sums_LE).sum(dim=1) / tokens_L).mean()
        if first.z_loss_coeff:
            metrics["train/router_z_loss"] = (squares_L / tokens_L).mean()
        if any(router.replayed for router in self._routers):
            slots = (tokens_L * first.rule.num_chosen).sum()
            given = (replayed_L + substituted_L).sum()
            metrics["train/router_replayed_frac"] = replayed_L.sum() / slots
            metrics["train/router_substituted_frac"] = substituted_L.sum() / given.clamp(min=1)
        return metrics

    def _set_loads(self, counts_LE: torch.Tensor) -> None:
        for router, counts_E in zip(self._routers, counts_LE, strict=True):
            if router.expert_load is not None:
                total = counts_E.sum()
                share_E = counts_E / total.clamp(min=1)
                router.expert_load.copy_(torch.where(total > 0, share_E, router.expert_load))
