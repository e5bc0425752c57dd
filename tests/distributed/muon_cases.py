"""Parameters of every odd shape under Muon, on any layout, and steps with made-up gradients."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from parameter_shards import column_matrices, placed_shard, row_matrices

from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.placement import Placement
from megacomposer.mesh.sharding import TensorLayout, scatter_from_global
from megacomposer.model.parameters import Matrix, ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon import ShardedMuon, Trace
from megacomposer.optim.muon_exchange import Link, Pending
from megacomposer.optim.optimizer import Optimizer

STEPS = 5
# Small enough for several buckets, large enough for several matrices in one.
CONFIG = OptimConfig(name="muon", weight_decay=0.1, muon_bucket_mib=0.0012)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and what else differs from the plain one."""

    mesh: MeshConfig
    num_experts: int = 8
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    device: str = "cpu"

    @property
    def config(self) -> OptimConfig:
        return dataclasses.replace(CONFIG, **self.settings)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank has after the last step."""

    tensors: dict[str, tuple[TensorLayout, torch.Tensor]]
    """Parameters and moments by name."""
    metrics: dict[str, float]


def parameters(num_experts: int) -> list[tuple[Placement, tuple[Matrix, ...]]]:
    """Placements with their matrices: uneven rows, one-row, empty and whole shards among them."""

    def whole(rows: int, columns: int) -> tuple[Matrix, ...]:
        return (Matrix(offset=(0, 0), shape=(rows, columns)),)

    experts = (num_experts, 14, 20)
    return [
        (Placement(name="embedding", global_shape=(12, 20), tp_dim=0), ()),
        # heads that FSDP cuts anywhere
        (Placement(name="query", global_shape=(24, 20), tp_dim=0), row_matrices((24, 20), 8)),
        # heads on the columns, the middle one shared by two TP ranks
        (Placement(name="out", global_shape=(20, 24), tp_dim=1), column_matrices((20, 24), 8)),
        (
            Placement(name="gate_up", global_shape=(24, 20), tp_dim=0, halves=2),
            row_matrices((24, 20), 12),
        ),
        # four ranks keep 2, 2, 1 and 0 rows
        (Placement(name="latent", global_shape=(5, 20)), whole(5, 20)),
        (Placement(name="row", global_shape=(1, 6)), whole(1, 6)),
        (Placement(name="column", global_shape=(7, 1)), whole(7, 1)),
        (Placement(name="norm", global_shape=(20,)), ()),
        (
            Placement(name="experts.gate_up", global_shape=experts, kind="expert"),
            row_matrices(experts, 7),
        ),
        (
            Placement(name="experts.down", global_shape=(num_experts, 6, 9), kind="expert"),
            row_matrices((num_experts, 6, 9), 6),
        ),
    ]


def values(num_experts: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        placement.name: torch.randn(placement.global_shape, generator=generator)
        for placement, _ in parameters(num_experts)
    }


def gradients(num_experts: int, step: int) -> dict[str, torch.Tensor]:
    """Of one step, whole: entries of all sizes, an idle expert, negative zeros."""
    found = values(num_experts, 100 + step)
    found["experts.gate_up"][1] = 0.0
    found["experts.down"][0] *= 1e-30
    found["latent"] *= 1e8
    found["query"][3] = -0.0
    return found


def shards_on(layout: Layout, num_experts: int, device: str = "cpu") -> list[ParameterShard]:
    full = values(num_experts, 0)
    return [
        placed_shard(
            placement,
            full[placement.name],
            layout,
            matrices,
            weight_decay=placement.name not in ("norm", "column"),
            device=device,
        )
        for placement, matrices in parameters(num_experts)
    ]


def train(
    optimizer: Optimizer, shards: list[ParameterShard], num_experts: int, steps: range
) -> None:
    for step in steps:
        full = gradients(num_experts, step)
        for shard in shards:
            gradient = torch.full_like(shard.local, float("nan"))
            scatter_from_global(shard.layout, full[shard.name], gradient)
            shard.parameter.grad = gradient
        optimizer.step(lr=0.02)
        optimizer.zero_grad()


def tensors_of(
    optimizer: Optimizer, shards: list[ParameterShard]
) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
    return {shard.name: (shard.layout, shard.local) for shard in shards} | optimizer.state_tensors()


def plain_layout(mesh: MeshConfig, groups: dict[int, Any] | None = None) -> Layout:
    """This rank's layout of the world without megatron-core, its expert group out of `groups`."""
    world_size = rank = None
    if torch.distributed.is_initialized():
        world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    layout = Layout(mesh, world_size=world_size or 1, rank=rank or 0, device_type="cpu")
    if groups is not None:
        layout.expert_exchange_group = groups[mesh.ep]
    return layout


def expert_groups() -> dict[int, Any]:
    """For each EP size that divides the world, the ranks that share this rank's experts."""
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    groups = {}
    for ep in (size for size in (1, 2, 4) if world_size % size == 0):
        for ep_rank in range(ep):
            group = torch.distributed.new_group(list(range(ep_rank, world_size, ep)))
            if rank % ep == ep_rank:
                groups[ep] = group
    return groups


def run_case(
    case: Case,
    groups: dict[int, Any],
    *,
    link: Link | None = None,
    trace: Trace | None = None,
) -> Outcome:
    """A few steps of the sharded Muon on this rank."""
    layout = plain_layout(case.mesh, groups)
    shards = shards_on(layout, case.num_experts, case.device)
    optimizer = ShardedMuon(shards, case.config, layout, link=link, trace=trace)
    train(optimizer, shards, case.num_experts, range(STEPS))
    found = {name: (stored, t.cpu()) for name, (stored, t) in tensors_of(optimizer, shards).items()}
    return Outcome(found, optimizer.metrics())


def differences(found: Outcome, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what this rank stores otherwise than `expected`, given whole."""
    assert found.tensors.keys() == expected.keys()
    wrong = []
    for name, (layout, local) in found.tensors.items():
        wanted = torch.full(layout.local_shape, float("nan"))
        scatter_from_global(layout, expected[name], wanted)
        if not torch.equal(wanted, local):
            wrong.append(name)
    return wrong


class SlowLink(Link):
    """Every exchange takes this long after it has started."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s

    def exchange(self, *args: Any, **kwargs: Any) -> Pending:
        return _Late(super().exchange(*args, **kwargs), time.perf_counter() + self._delay_s)


class _Late:
    def __init__(self, pending: Pending, due_s: float) -> None:
        self._pending, self._due_s = pending, due_s

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
