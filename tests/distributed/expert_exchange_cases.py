"""One expert layer over the ranks of a group: what each rank computes, for comparison with one."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from megacomposer.kernels import grouped_mlp
from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.moe_routing import routing_map
from megacomposer.mesh.row_transport import CollectiveTransport, PeerTransport, RowTransport
from megacomposer.model.expert_exchange import ExpertExchange, plan_exchange

EXPERTS, CHOICES, HIDDEN, INNER = 8, 3, 136, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: tuple[int, ...]
    """Of each rank."""
    routing: str = "random"
    parts: int = 1
    dtype: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()
    """Operands that need no gradient."""

    def ids(self) -> torch.Tensor:
        """[all tokens, K], rising."""
        total = sum(self.tokens)
        generator = torch.Generator().manual_seed(1)
        weights = torch.ones(total, EXPERTS)
        if self.routing == "first four":  # ranks with the others get nothing
            weights[:, EXPERTS // 2 :] = 0
        if self.routing == "one":
            return torch.full((total, CHOICES), 5)
        return weights.multinomial(CHOICES, generator=generator).sort(dim=1).values

    def operands(self, seed: int = 2) -> dict[str, torch.Tensor]:
        """Of all ranks and experts."""
        generator = torch.Generator().manual_seed(seed)
        total = sum(self.tokens)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(self.dtype)

        return {
            "x": normal(total, HIDDEN),
            "gate_up": normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
            "down": normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
            "gates": torch.rand(total, CHOICES, generator=generator),
            "grad": normal(total, HIDDEN),
        }


def on_one_rank(case: Case, seed: int = 2) -> dict[str, torch.Tensor]:
    """The layer's result and gradients in float64."""
    leaves = {name: x.double() for name, x in case.operands(seed).items()}
    grad = leaves.pop("grad")
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in case.frozen)
    map = routing_map(case.ids(), EXPERTS)
    weights = (leaves["gate_up"], leaves["down"])
    out = grouped_swiglu_reference(leaves["x"], *weights, map, leaves["gates"])
    return _with_gradients(out, leaves, grad)


def _with_gradients(
    out: torch.Tensor, leaves: dict[str, torch.Tensor], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(out, list(trained.values()), grad)
    return {"out": out.detach()} | dict(zip(trained, grads, strict=True))


def on_this_rank(
    case: Case, transport: RowTransport, device: torch.device, seed: int = 2
) -> dict[str, Any]:
    """This rank's part of the same, on the CPU, and how many rows it sent. Its results are made in
    three blocks of columns, of 64 and the rest."""
    grouped_mlp._GATHER_BYTES = 1  # this process is the case's own
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    local, first = EXPERTS // dist.get_world_size(), sum(case.tokens[:rank])
    tokens = slice(first, first + case.tokens[rank])
    experts = slice(rank * local, (rank + 1) * local)
    slices = {"gate_up": experts, "down": experts}
    leaves = {
        name: x[slices.get(name, tokens)].to(device).requires_grad_(name not in case.frozen)
        for name, x in case.operands(seed).items()
    }
    grad = leaves.pop("grad").detach()
    ids = case.ids().to(device)[tokens]
    plan, pairs_E = plan_exchange(ids, EXPERTS, case.parts, group)
    exchange = ExpertExchange(plan, transport)
    exchange.start(leaves["x"])
    gates_NK, map = exchange.routing(leaves["gates"], ids)
    weights = (leaves["gate_up"], leaves["down"])
    out = grouped_swiglu(leaves["x"], *weights, map, gates_NK, exchange)
    found = _with_gradients(out, leaves, grad)
    result: dict[str, Any] = {name: x.cpu() for name, x in found.items()}
    return result | {"sent": plan.num_sent(rank), "pairs": pairs_E.cpu()}


def on_gloo(cases: list[Case]) -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    transport = CollectiveTransport(dist.group.WORLD)
    return [on_this_rank(case, transport, torch.device("cpu")) for case in cases]


def on_gpus(cases: list[Case], seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Both transports; each case with the operands of each seed, so that what a buffer held before
    would show."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    transports = {"collective": CollectiveTransport(group), "peer": PeerTransport(group, device)}
    results = {
        name: [on_this_rank(case, transport, device, seed) for case in cases for seed in seeds]
        for name, transport in transports.items()
    }
    torch.cuda.synchronize()
    dist.barrier()
    return results
