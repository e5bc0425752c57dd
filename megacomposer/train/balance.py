"""Router balance without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664)."""

from __future__ import annotations

import torch

from megacomposer.model.gpt import GPT


class RouterBalance:
    """Counts tokens per expert over the global batch and moves each router's selection bias."""

    def __init__(self, model: GPT) -> None:
        self._layers = list(model.moe_layers().values())
        self._rate = model.model_config.router_bias_update_rate

    @torch.no_grad()
    def finish_step(self, *, apply: bool) -> dict[str, torch.Tensor]:
        """Reduce the counts, move the biases (unless the step was skipped), clear the counts.

        The bias of an expert rises by the update rate when it got fewer tokens than the mean, falls
        when it got more. One all-reduce over the world for all layers.

        Returns:
            Load metrics as 0-d tensors; empty for a dense model.
        """
        if not self._layers:
            return {}
        counts_LE = torch.stack([layer.tokens_per_expert for layer in self._layers])
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(counts_LE)
        mean_L1 = counts_LE.mean(dim=1, keepdim=True)
        largest_bias = counts_LE.new_zeros(())
        for layer, counts_E, mean_1 in zip(self._layers, counts_LE, mean_L1, strict=True):
            layer.tokens_per_expert.zero_()
            bias = layer.router.expert_bias
            if bias is not None:
                if apply:
                    bias += self._rate * torch.sign(mean_1 - counts_E)
                largest_bias = torch.maximum(largest_bias, bias.abs().max())
        # No token at all is a load of 0, not 0 / 0.
        load_LE = counts_LE / mean_L1.clamp(min=1 / counts_LE.shape[1])
        return {
            "train/expert_load_max_over_mean": load_LE.max(),
            "train/expert_load_min_over_mean": load_LE.min(),
            "train/expert_bias_max": largest_bias,
        }
