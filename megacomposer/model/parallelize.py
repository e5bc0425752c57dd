"""Shard a model: activation recomputation first, then FSDP on the two HSDP meshes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from megacomposer.mesh.layout import Layout
from megacomposer.model.gpt import GPT


def parallelize(model: GPT, layout: Layout) -> None:
    """Shard `model` in place.

    Every transformer layer is one FSDP unit on the dense mesh; its experts are a unit of their own
    on the expert mesh. Parameters stay float32 (master weights), are gathered in the compute dtype,
    and their gradients are reduced in float32. Gradients are *summed* over ranks: the loss is
    divided by the global token count before backward, so no rank's count enters twice.
    """
    config = model.model_config
    compute_dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # Rotary angles and routing probabilities are float32 on purpose.
        cast_forward_inputs=False,
    )
    # Without shards to gather, freeing the gathered copy after forward saves nothing worth a second
    # cast of every weight in backward.
    dense_options = {"mp_policy": policy, "reshard_after_forward": layout.dense_shard > 1}
    expert_options = {"mp_policy": policy, "reshard_after_forward": layout.expert_shard > 1}
    layers = [*model.decoder.layers, *model.mtp]
    for layer in layers:
        if config.recompute == "full":
            _recompute_in_backward(layer)
        experts = _experts_of(layer)
        if experts is not None:
            fully_shard(experts, mesh=layout.expert_fsdp_mesh, **expert_options)
        fully_shard(layer, mesh=layout.dense_fsdp_mesh, **dense_options)
    fully_shard(model, mesh=layout.dense_fsdp_mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Plain sums: gloo has no pre-multiplied reduction, and both backends then agree.
            module.set_force_sum_reduction_for_comms(True)


def release_gathered_weights(model: GPT) -> None:
    """Free the whole weights that a forward without a backward leaves behind.

    FSDP would take them for current in the next forward, whatever was written to the shards since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _experts_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    transformer_layer = getattr(layer, "transformer_layer", layer)
    return getattr(transformer_layer.mlp, "experts", None)


def _recompute_in_backward(layer: torch.nn.Module) -> None:
    forward = layer.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # No dropout anywhere, so there is no random state to replay.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    layer.forward = recomputed  # type: ignore[method-assign]
