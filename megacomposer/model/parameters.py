"""The model's parameters as the rest of megacomposer sees them: global names, shards, matrices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DTensor

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import TensorLayout, row_layout
from megacomposer.model.config import ModelConfig
from megacomposer.model.moe import StackedExperts

if TYPE_CHECKING:
    from megacomposer.model.gpt import GPT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """One logical matrix of a parameter (head, expert, gate or up half), in global coordinates."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Same rank as the parameter; a leading expert dim has extent 1."""

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """One trainable parameter on this rank."""

    layout: TensorLayout
    parameter: torch.nn.Parameter
    """A DTensor after `fully_shard`; its local tensor is the float32 master storage."""
    kind: Literal["dense", "expert"]
    """Which of the two HSDP meshes shards it."""
    matrices: tuple[Matrix, ...] = ()
    """Logical matrices that tile the global tensor; empty for embeddings, head, router, norms."""
    weight_decay: bool = True
    sum_over_tp: bool = False
    """Replicated over TP but fed with different tokens or heads: its gradient is summed over TP."""

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def local(self) -> torch.Tensor:
        """This rank's storage, shape `layout.local_shape`; writing to it changes the parameter."""
        data = self.parameter.detach()
        return data.to_local() if isinstance(data, DTensor) else data

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's gradient shard (float32), or None before the first backward."""
        grad = self.parameter.grad
        if isinstance(grad, DTensor):
            return grad.to_local()
        return grad


def describe_parameters(model: GPT, layout: Layout) -> list[ParameterShard]:
    """Every trainable parameter with its shard on this rank, in module order.

    Call it after `parallelize`: it reads where FSDP put the rows.
    """
    shards = []
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{leaf}"
            shards.append(_describe(name, module, parameter, model.model_config, layout))
    return shards


def _describe(
    name: str,
    module: torch.nn.Module,
    parameter: torch.nn.Parameter,
    config: ModelConfig,
    layout: Layout,
) -> ParameterShard:
    # A DTensor's shape is that of the TP- or EP-local tensor: FSDP knows nothing of TP and EP.
    local_shape = tuple(parameter.shape)
    rows = local_shape[0]
    expert = isinstance(module, StackedExperts)
    columns, sum_over_tp = None, False
    if expert:
        global_shape = (rows * layout.ep, *local_shape[1:])
        pieces = [(layout.ep_rank * rows, rows)]
    elif _is_parallel(module, "ColumnParallelLinear", "VocabParallelEmbedding"):
        global_shape = (rows * layout.tp, *local_shape[1:])
        halves = 2 if name.endswith("linear_fc1.weight") else 1
        part, half = rows // halves, rows * layout.tp // halves
        pieces = [(i * half + layout.tp_rank * part, part) for i in range(halves)]
    elif _is_parallel(module, "RowParallelLinear"):
        global_shape = (rows, local_shape[1] * layout.tp)
        pieces = [(0, rows)]
        columns = (layout.tp_rank * local_shape[1], local_shape[1])
    else:
        global_shape, pieces = local_shape, [(0, rows)]
        sum_over_tp = layout.tp > 1
    split_by_tp = not expert and global_shape != local_shape
    if expert:
        shard_rank, num_shards = layout.expert_shard_rank, layout.expert_shard
        is_primary = layout.expert_replicate_rank == 0
    else:
        shard_rank, num_shards = layout.dense_shard_rank, layout.dense_shard
        is_primary = layout.dense_replicate_rank == 0 and (split_by_tp or layout.tp_rank == 0)
    # FSDP2 cuts dim 0 as torch.chunk does.
    chunk = -(-rows // num_shards)
    start = min(shard_rank * chunk, rows)
    shard = ParameterShard(
        layout=row_layout(
            name,
            global_shape,
            pieces,
            columns,
            (start, min(chunk, rows - start)),
            is_primary=is_primary,
        ),
        parameter=parameter,
        kind="expert" if expert else "dense",
        matrices=logical_matrices(name, global_shape, config),
        weight_decay=len(local_shape) > 1,
        sum_over_tp=sum_over_tp,
    )
    assert tuple(shard.local.shape) == shard.layout.local_shape, (name, shard.layout)
    return shard


def _is_parallel(module: torch.nn.Module, *suffixes: str) -> bool:
    """Whether a class of the module is megatron-core's or Transformer Engine's of that name."""
    names = [cls.__name__ for cls in type(module).__mro__]
    return any(name.endswith(suffix) for name in names for suffix in suffixes)


def logical_matrices(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[Matrix, ...]:
    """The matrices that a parameter of global `shape` consists of; empty where Muon has no say.

    Heads apart in attention projections (rows of the up-projections and of q, k, v; columns of the
    output projection), gate and up apart, every expert apart, other projections whole. Embeddings,
    output layer, router and norms have none.

    Raises:
        ValueError: the rows or columns do not add up to whole heads.
    """
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    mla = config.attention == "mla"
    heads = config.num_attention_heads
    if leaf in ("gate_up", "down"):
        halves = 2 if leaf == "gate_up" else 1
        rows = shape[1] // halves
        return tuple(
            Matrix(offset=(e, half * rows, 0), shape=(1, rows, shape[2]))
            for e in range(shape[0])
            for half in range(halves)
        )
    if leaf in ("linear_q_proj", "linear_q_up_proj"):
        return _row_blocks(shape, [config.qk_nope_head_dim + config.qk_rope_head_dim] * heads, name)
    if leaf == "linear_kv_up_proj":
        return _row_blocks(shape, [config.qk_nope_head_dim + config.v_head_dim] * heads, name)
    if leaf == "linear_qkv":
        per_group = heads // config.query_groups + 2
        blocks = [config.gqa_head_dim] * (per_group * config.query_groups)
        return _row_blocks(shape, blocks, name)
    if leaf == "linear_proj":
        size = config.v_head_dim if mla else config.gqa_head_dim
        if shape[1] != size * heads:
            raise ValueError(f"{name} has {shape[1]} columns, not {heads} heads of {size}")
        return tuple(Matrix(offset=(0, h * size), shape=(shape[0], size)) for h in range(heads))
    if leaf == "linear_fc1":
        return _row_blocks(shape, [shape[0] // 2] * 2, name)
    if leaf in ("linear_fc2", "linear_q_down_proj", "linear_kv_down_proj", "eh_proj"):
        return (Matrix(offset=(0, 0), shape=shape),)
    return ()


def _row_blocks(shape: tuple[int, ...], rows: list[int], name: str) -> tuple[Matrix, ...]:
    if sum(rows) != shape[0]:
        raise ValueError(f"{name} has {shape[0]} rows, not {len(rows)} blocks of {rows[0]}")
    offsets = [sum(rows[:i]) for i in range(len(rows))]
    return tuple(
        Matrix(offset=(offset, 0), shape=(count, shape[1]))
        for offset, count in zip(offsets, rows, strict=True)
    )
