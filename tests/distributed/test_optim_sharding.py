"""Sharded optimizers against unsharded ones, on gloo ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from parameter_shards import column_matrices, row_matrices, set_gradient, shard_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megacomposer.mesh.sharding import gather_to_global, row_layout
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.grad_norm import clip_by_global_norm, global_grad_norm
from megacomposer.optim.optimizer import build_optimizer
from runner import run_distributed

SHAPES = {
    "query": (24, 20),
    "out": (20, 24),
    "gate_up": (28, 20),
    "experts": (6, 14, 20),
    "replicated": (10, 20),
    "one_owner": (9, 4),
    "embedding": (11, 20),
    "norm": (20,),
}
MATRICES: dict[str, tuple[Matrix, ...]] = {
    "query": row_matrices((24, 20), 8),
    "out": column_matrices((20, 24), 8),
    "gate_up": row_matrices((28, 20), 14),
    "experts": row_matrices((6, 14, 20), 7),
    "replicated": (Matrix(offset=(0, 0), shape=(10, 20)),),
    "one_owner": (Matrix(offset=(0, 0), shape=(9, 4)),),
}
# per rank: the rows it stores of tensors that only FSDP splits; uneven, across heads, and empty
ROWS: dict[int, dict[str, list[tuple[int, int]]]] = {
    2: {
        "query": [(0, 13), (13, 11)],
        "experts": [(0, 5), (5, 1)],
        "one_owner": [(9, 0), (0, 9)],
        "embedding": [(0, 6), (6, 5)],
        "norm": [(0, 20), (20, 0)],
    },
    4: {
        "query": [(0, 7), (7, 7), (14, 7), (21, 3)],
        "experts": [(0, 2), (2, 3), (5, 1), (6, 0)],
        "one_owner": [(9, 0), (9, 0), (0, 9), (9, 0)],
        "embedding": [(0, 3), (3, 3), (6, 3), (9, 2)],
        "norm": [(0, 5), (5, 5), (10, 5), (15, 5)],
    },
}
OPTIMIZERS = ("adamw", "muon_reference")
STEPS = 4
CLIP = 10.0


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _gradients(step: int) -> dict[str, torch.Tensor]:
    gradients = _values(100 + step)
    gradients["experts"][2] = 0.0  # an expert that saw no token
    gradients["query"][3] = -0.0
    return gradients


def _shards(rank: int, world_size: int) -> list[ParameterShard]:
    """All parameters, as this rank of a made-up layout stores them; world size 1 is unsharded."""
    shards = []
    for name, full in _values(0).items():
        extra: dict[str, Any] = {
            "matrices": MATRICES.get(name, ()),
            "weight_decay": full.ndim > 1,
            "kind": "expert" if name == "experts" else "dense",
        }
        if world_size == 1:
            shards.append(shard_of(name, full, **extra))
        elif name == "replicated":
            shards.append(shard_of(name, full, is_primary=rank == 1, **extra))
        elif name == "out":  # columns over tensor parallelism of 2, rows over the rest
            rows = 20 // (world_size // 2)
            column_piece, storage = (rank % 2 * 12, 12), (rank // 2 * rows, rows)
            shards.append(shard_of(name, full, storage, column_piece=column_piece, **extra))
        elif name == "gate_up":  # TP keeps half of gate and half of up, FSDP cuts across the two
            pieces = [(rank % 2 * 7, 7), (14 + rank % 2 * 7, 7)]
            storage = (0, 14) if world_size == 2 else [(0, 9), (9, 5)][rank // 2]
            shards.append(shard_of(name, full, storage, row_pieces=pieces, **extra))
        else:
            shards.append(shard_of(name, full, ROWS[world_size][name][rank], **extra))
    return shards


@dataclasses.dataclass(frozen=True)
class Outcome:
    values: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    norm: float


def _train(rank: int, world_size: int, optimizer_name: str) -> Outcome:
    """Parameters and moments after a few steps, gathered; and the last gradient norm."""
    shards = _shards(rank, world_size)
    optimizer = build_optimizer(OptimConfig(name=optimizer_name), shards)
    for step in range(STEPS):
        for shard in shards:
            set_gradient(shard, _gradients(step)[shard.name])
        norm = global_grad_norm(shards)
        clip_by_global_norm(shards, CLIP, norm)
        optimizer.step(lr=0.01)
        optimizer.zero_grad()
    assert optimizer.state_scalars() == {"step": STEPS}
    return Outcome(
        {shard.name: gather_to_global(shard.layout, shard.local) for shard in shards},
        {
            key: gather_to_global(layout, tensor)
            for key, (layout, tensor) in optimizer.state_tensors().items()
        },
        norm.item(),
    )


def train_sharded() -> dict[str, Outcome]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return {name: _train(rank, world_size, name) for name in OPTIMIZERS}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As on the ranks: the order of a sum may depend on the thread count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharding_changes_parameters_or_moments(world_size: int) -> None:
    outcomes = run_distributed(train_sharded, world_size)
    for optimizer_name in OPTIMIZERS:
        expected = _train(0, 1, optimizer_name)
        for name, start in _values(0).items():
            assert not torch.equal(expected.values[name], start)
        for outcome in (by_name[optimizer_name] for by_name in outcomes):
            for name, value in expected.values.items():
                assert torch.equal(outcome.values[name], value), (optimizer_name, name)
            assert outcome.moments.keys() == expected.moments.keys()
            for key, moment in expected.moments.items():
                assert torch.equal(outcome.moments[key], moment), key
            assert outcome.norm == expected.norm


def norms_on_rank() -> tuple[float, float, torch.dtype, int]:
    """The norm before and after clipping, its dtype, and how many collectives it took."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shards = _shards(rank, world_size)
    for shard in shards:
        set_gradient(shard, _gradients(0)[shard.name])
    calls = []
    all_reduce = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = counted
    norm = global_grad_norm(shards)
    torch.distributed.all_reduce = all_reduce
    clip_by_global_norm(shards, 3.0, norm)
    return norm.item(), global_grad_norm(shards).item(), norm.dtype, len(calls)


def test_norm_counts_a_replica_twice_or_a_shard_never() -> None:
    squares = sum(g.double().square().sum().item() for g in _gradients(0).values())
    for before, after, dtype, calls in run_distributed(norms_on_rank, 4):
        assert before == pytest.approx(math.sqrt(squares), rel=1e-6)
        assert after == pytest.approx(3.0, rel=1e-5)
        assert dtype == torch.float32
        assert calls == 1


class TwoKinds(torch.nn.Module):
    """A dense weight of 5 rows and a stack of 3 experts, so that 4 and 2 ranks share unevenly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dense = torch.nn.Linear(6, 5, bias=False)
        self.experts = torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(torch.empty(3, 6, 5))
        self.experts.forward = lambda x: torch.einsum("bi,eoi->bo", x, self.experts.weight)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.dense(x)).square().mean()


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The (start, length) that FSDP2 gives part `index`: full chunks first, then what is left."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def _describe(model: TwoKinds, rank: int, world_size: int) -> list[ParameterShard]:
    dense_parts, expert_parts = (4, 2) if world_size == 4 else (1, 1)
    shards = []
    for name, parameter, parts, kind in [
        ("dense", model.dense.weight, dense_parts, "dense"),
        ("experts", model.experts.weight, expert_parts, "expert"),
    ]:
        shape = tuple(parameter.shape)
        storage = _chunk(shape[0], parts, rank % parts)
        layout = row_layout(name, shape, [(0, shape[0])], None, storage, is_primary=rank < parts)
        matrices = row_matrices(shape, shape[-2])
        shards.append(
            ParameterShard(layout=layout, parameter=parameter, kind=kind, matrices=matrices)
        )
    return shards


def train_fsdp() -> dict[str, dict[str, torch.Tensor]]:
    return {name: _train_model(name, sharded=True) for name in OPTIMIZERS}


def _train_model(optimizer_name: str, *, sharded: bool) -> dict[str, torch.Tensor]:
    rank, world_size = (torch.distributed.get_rank(), 4) if sharded else (0, 1)
    model = TwoKinds()
    if sharded:
        dense_mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
        expert_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.dense, mesh=dense_mesh)
        fully_shard(model.experts, mesh=expert_mesh)
    shards = _describe(model, rank, world_size)
    optimizer = build_optimizer(OptimConfig(name=optimizer_name), shards)
    for step in range(3):
        # the same input on every rank: their average gradient is that of one process
        model(torch.randn(7, 6, generator=torch.Generator().manual_seed(step))).backward()
        clip_by_global_norm(shards, 1.0, global_grad_norm(shards))
        optimizer.step(lr=0.05)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    return {shard.name: gather_to_global(shard.layout, shard.local) for shard in shards}


def test_fsdp_on_two_meshes_trains_another_model() -> None:
    outcomes = run_distributed(train_fsdp, 4)
    for optimizer_name in OPTIMIZERS:
        expected = _train_model(optimizer_name, sharded=False)
        for values in (by_name[optimizer_name] for by_name in outcomes):
            for name, value in expected.items():
                # the average over 4 equal gradients is exact, so only the update could differ
                assert torch.equal(values[name], value), (optimizer_name, name)
