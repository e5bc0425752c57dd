"""megatron-core's own MoE layer (router, all-to-all dispatcher, loop over experts), for comparison.

Selected by `model.moe_backend "megatron"`. The weights are the same stacks as ours, so checkpoints,
sharding and Muon know no difference; megatron-core's modules get one expert's slice at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer as CoreMoELayer
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megacomposer.model.moe import StackedExperts


def megatron_moe_spec(shared_experts: ModuleSpec) -> ModuleSpec:
    """megatron-core's layer around these shared experts."""
    return ModuleSpec(
        module=MegatronMoELayer,
        submodules=MoESubmodules(
            experts=LoopedExperts, shared_experts=shared_experts, router=TopKRouter
        ),
    )


class LoopedExperts(StackedExperts):
    """The stacked weights, multiplied by megatron-core's `SequentialMLP`."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(num_local_experts, config)
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        loop = SequentialMLP(num_local_experts, config, linears, pg_collection=pg_collection)
        # Not a submodule: its weights, which every call replaces by slices of ours, are no
        # parameters of the model, and are dropped here.
        self._loop = (loop.to("meta"),)

    def forward(
        self, rows_PH: torch.Tensor, rows_per_expert_L: torch.Tensor, probs_P: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Rows sorted by local expert -> [P, H], weighted by the probabilities; reads the row
        counts on the host."""
        slices: dict[str, torch.Tensor] = {}
        weights = zip(self.gate_up.unbind(0), self.down.unbind(0), strict=True)
        for expert, (gate_up, down) in enumerate(weights):
            slices[f"local_experts.{expert}.linear_fc1.weight"] = gate_up
            slices[f"local_experts.{expert}.linear_fc2.weight"] = down
        arguments = (rows_PH, rows_per_expert_L, probs_P)
        return torch.func.functional_call(self._loop[0], slices, arguments)


class MegatronMoELayer(CoreMoELayer):
    """megatron-core's MoE layer with the count of tokens per expert that balance reads.

    Raises:
        ValueError: expert parallelism on the CPU.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.tokens_per_expert = torch.zeros(
            config.num_moe_experts, dtype=torch.float32, device=torch.cuda.current_device()
        )
        if self.tokens_per_expert.device.type == "cpu" and self.ep_group.size() > 1:
            # It passes row counts to the exchange as tensors where no GPU stream copied them to the
            # host before; gloo takes numbers only.
            raise ValueError(
                f"model.moe_backend 'megatron' with mesh.ep {self.ep_group.size()} needs a GPU; on"
                " the CPU use mesh.ep 1 or model.moe_backend 'megacomposer'"
            )

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs_TE, routed_TE = super().route(hidden_states, padding_mask)
        if torch.is_grad_enabled():
            self.tokens_per_expert += routed_TE.sum(dim=0)
        return probs_TE, routed_TE
