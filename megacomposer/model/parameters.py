"""The model's parameters as the rest of megacomposer sees them: global names, shards, matrices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.tensor import DTensor

from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.mesh.sharding import TensorLayout
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
    is_router: bool = False
    """A MoE layer's router, by its name."""
    sum_over_tp: bool = False
    """Replicated over TP but fed with different tokens or heads: its gradient is summed over TP."""
    placement: Placement | None = None
    """Where every other rank keeps its part; None for a shard cut by hand."""

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


def describe_parameters(
    model: GPT, layout: Layout, *, split_output_heads: bool = True
) -> list[ParameterShard]:
    """Every trainable parameter with its shard on this rank, in module order.

    Call it after `parallelize`: it checks what FSDP stores here. `split_output_heads` is that of
    `logical_matrices`.
    """
    shards = []
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            placement = _placement(f"{module_name}.{leaf}", module, parameter, layout)
            shard = ParameterShard(
                layout=placement.on(layout),
                parameter=parameter,
                kind=placement.kind,
                matrices=logical_matrices(
                    placement.name,
                    placement.global_shape,
                    model.model_config,
                    split_output_heads=split_output_heads,
                ),
                weight_decay=len(placement.global_shape) > 1,
                is_router=placement.name.endswith(".router.weight"),
                sum_over_tp=(
                    layout.tp > 1 and placement.kind == "dense" and placement.tp_dim is None
                ),
                placement=placement,
            )
            assert tuple(shard.local.shape) == shard.layout.local_shape, shard.layout
            shards.append(shard)
    return shards


def _placement(
    name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, layout: Layout
) -> Placement:
    # A DTensor's shape is that of the TP- or EP-local tensor: FSDP knows nothing of TP and EP.
    rows, *tail = parameter.shape
    if isinstance(module, StackedExperts):
        return Placement(name=name, global_shape=(rows * layout.ep, *tail), kind="expert")
    if _is_parallel(module, "ColumnParallelLinear", "VocabParallelEmbedding"):
        halves = 2 if name.endswith("linear_fc1.weight") else 1
        return Placement(name=name, global_shape=(rows * layout.tp, *tail), tp_dim=0, halves=halves)
    if _is_parallel(module, "RowParallelLinear"):
        return Placement(name=name, global_shape=(rows, tail[0] * layout.tp), tp_dim=1)
    return Placement(name=name, global_shape=(rows, *tail))


def _is_parallel(module: torch.nn.Module, *suffixes: str) -> bool:
    """Whether a class of the module is megatron-core's or Transformer Engine's of that name."""
    names = [cls.__name__ for cls in type(module).__mro__]
    return any(name.endswith(suffix) for name in names for suffix in suffixes)


def logical_matrices(
    name: str, shape: tuple[int, ...], config: ModelConfig, *, split_output_heads: bool = True
) -> tuple[Matrix, ...]:
    """The matrices that a parameter of global `shape` consists of; empty where Muon has no say.

    Heads apart in attention projections (rows of the up-projections and of q, k, v; columns of the
    output projection unless `split_output_heads` is False), gate and up apart, every expert apart,
    other projections whole. Embeddings, output layer, router and norms have none.

    Raises:
        ValueError: the rows or columns do not add up to whole heads.
    """
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
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
        size = config.v_head_dim if config.attention == "mla" else config.gqa_head_dim
        if shape[1] != size * heads:
            raise ValueError(f"{name} has {shape[1]} columns, not {heads} heads of {size}")
        if not split_output_heads:
            return (Matrix(offset=(0, 0), shape=shape),)
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
