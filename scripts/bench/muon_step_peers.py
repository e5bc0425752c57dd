"""The optimizers that muon_step.py puts beside ours, on the same parameters and ranks."""

from __future__ import annotations

import math

import torch
from muon_step_model import LR, Model, Step
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.optimizer import build_optimizer


def adamw(model: Model) -> Step:
    """Our AdamW of all parameters, each rank what it stores."""
    optimizer = build_optimizer(OptimConfig(name="adamw"), model.shards, model.layout)
    return lambda: optimizer.step(lr=LR)


def dion(model: Model, *, gram: bool = False) -> Step:
    """dion's Muon. It moves a stack of matrices that is cut through its matrices by `all_to_all`,
    shares the work on parameters that all ranks store, and leaves whole matrices where they are."""
    import torch._dynamo
    from dion import Muon

    torch._dynamo.config.recompile_limit = 64  # it compiles its passes for each shape
    mesh = None
    if model.layout.world_size > 1:
        mesh = init_device_mesh(model.device.type, (model.layout.world_size,))
    stacks = [_stacked(shard, model, mesh) for shard in model.shards if shard.matrices]
    rest = [shard.parameter for shard in model.shards if not shard.matrices]
    return Muon(
        [{"params": stacks}, {"params": rest, "algorithm": "adamw"}],
        distributed_mesh=mesh,
        lr=LR,
        mu=0.95,
        weight_decay=0.1,
        nesterov=True,
        adjust_lr="rms_norm",
        use_triton=model.device.type == "cuda",
        use_polar_express=False,
        use_gram_newton_schulz=gram,
    ).step


def _stacked(shard: ParameterShard, model: Model, mesh: DeviceMesh | None) -> torch.nn.Parameter:
    """The parameter as the stack of equal matrices that dion takes: a view of the same storage, or
    a transposed copy where heads tile the columns, which costs it the same."""
    first, local, gradient = shard.matrices[0], shard.local, shard.local_grad
    assert gradient is not None
    total = len(shard.matrices) * first.rows * first.columns
    is_here = local.numel() == total
    if first.columns != local.shape[-1]:
        local, gradient = local.mT, gradient.mT
        shape, cut_dim = (-1, first.columns, local.shape[-1]), 2
    elif local.numel() % (first.rows * first.columns) == 0:
        shape, cut_dim = (-1, first.rows, first.columns), 0
    else:
        shape, cut_dim = (len(shard.matrices), -1, first.columns), 1
    parts = [x.reshape(shape) for x in (local, gradient)]
    if not is_here:
        is_even = local.numel() * model.layout.world_size == total
        if mesh is None or not is_even or (cut_dim == 1 and len(shard.matrices) > 1):
            raise ValueError(f"{shard.name} is cut in a way that dion has no layout for")
        parts = [DTensor.from_local(x, mesh, [Shard(cut_dim)]) for x in parts]
    parameter = torch.nn.Parameter(parts[0])
    parameter.grad = parts[1]
    return parameter


def megatron_layer_wise(model: Model) -> Step:
    """megatron-core's layer-wise distributed Muon: every rank has all parameters in bfloat16, each
    owner the master weights and momentum of its own, and results travel by one all-gather at the
    end. One matrix at a time."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    if any(shard.local.numel() != math.prod(shard.layout.global_shape) for shard in model.shards):
        raise ValueError("it needs all parameters on every rank: mesh dense_shard=1,expert_shard=1")
    matrices, others = [], []
    for shard in model.shards:
        whole = shard.local.view(-1, shard.local.shape[-1])
        gradient = shard.local_grad
        assert gradient is not None
        gradient = gradient.view(whole.shape)
        parts = _matrix_slices(shard) if shard.matrices else [(slice(None), slice(None))]
        for part in parts:
            parameter = torch.nn.Parameter(whole[part].bfloat16().contiguous())
            parameter.main_grad = gradient[part].contiguous()
            (matrices if shard.matrices else others).append(parameter)
    muon = TensorParallelMuon(
        [{"params": matrices}], lr=LR, weight_decay=0.1, momentum=0.95, nesterov=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    adam = torch.optim.AdamW([{"params": others}], lr=LR, fused=True)
    optimizer = LayerWiseDistributedOptimizer(
        [muon, adam],
        OptimizerConfig(optimizer="dist_muon", lr=LR, bf16=True, clip_grad=0.0),
        ProcessGroupCollection.use_mpu_process_groups(),
        init_state_fn_list=[None, None],
    )

    def step() -> object:
        assert not optimizer.prepare_grads()
        return optimizer.step_with_ready_grads()

    return step


def _matrix_slices(shard: ParameterShard) -> list[tuple[slice, slice]]:
    """Of each matrix in the parameter with its leading dims folded into rows."""
    found = []
    for matrix in shard.matrices:
        leading = matrix.offset[0] * shard.local.shape[1] if len(matrix.offset) == 3 else 0
        row, column = leading + matrix.offset[-2], matrix.offset[-1]
        found.append((slice(row, row + matrix.rows), slice(column, column + matrix.columns)))
    return found
