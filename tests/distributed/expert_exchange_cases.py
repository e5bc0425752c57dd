"""One expert layer over the ranks of a group: what each rank computes, for comparison with one."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from megacomposer.kernels.grouped_mlp import grouped_swiglu, grouped_swiglu_reference
from megacomposer.kernels.moe_routing import routing_map
from megacomposer.mesh.row_transport import CollectiveTransport, PeerTransport, RowTransport
from megacomposer.model.expert_exchange import ExpertExchange, exchange_gates, plan_exchange

EXPERTS, CHOICES, HIDDEN, INNER = 8, 3, 32, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tokens: tuple[int, ...]
    """Of each rank."""
    routing: str = "random"
    parts: int = 1
    dtype: torch.dtype = torch.float32

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

    def operands(self) -> dict[str, torch.Tensor]:
        """Of all ranks and experts."""
        generator = torch.Generator().manual_seed(2)
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


def on_one_rank(case: Case) -> dict[str, torch.Tensor]:
    """The layer's result and gradients in float64."""
    wide = {name: x.double() for name, x in case.operands().items()}
    leaves = [wide[name].requires_grad_() for name in ("x", "gate_up", "down", "gates")]
    map = routing_map(case.ids(), EXPERTS)
    out = grouped_swiglu_reference(*leaves[:3], map, leaves[3])
    grads = torch.autograd.grad(out, leaves, wide["grad"])
    return dict(zip(("out", "x", "gate_up", "down", "gates"), (out.detach(), *grads), strict=True))


def on_this_rank(case: Case, transport: RowTransport, device: torch.device) -> dict[str, Any]:
    """This rank's part of the same, on the CPU, and how many rows it sent."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    local = EXPERTS // dist.get_world_size()
    first = sum(case.tokens[:rank])
    tokens, experts = (
        slice(first, first + case.tokens[rank]),
        slice(rank * local, (rank + 1) * local),
    )
    operands = {name: x.to(device) for name, x in case.operands().items()}
    x, gates = (operands[name][tokens].requires_grad_() for name in ("x", "gates"))
    gate_up, down = (operands[name][experts].requires_grad_() for name in ("gate_up", "down"))
    ids = case.ids().to(device)[tokens]
    plan, pairs_E = plan_exchange(ids, EXPERTS, case.parts, group)
    exchange = ExpertExchange(plan, transport)
    exchange.start(x)
    gates_NK, ids_NK = exchange_gates(gates, ids, plan, group)
    map = exchange.local_map(ids_NK, local)
    out = grouped_swiglu(x, gate_up, down, map, gates_NK, exchange)
    grads = torch.autograd.grad(out, (x, gate_up, down, gates), operands["grad"][tokens])
    named = dict(zip(("out", "x", "gate_up", "down", "gates"), (out.detach(), *grads), strict=True))
    result: dict[str, Any] = {name: x.cpu() for name, x in named.items()}
    return result | {"sent": plan.num_sent(rank), "pairs": pairs_E.cpu()}


def on_gloo(cases: list[Case]) -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    transport = CollectiveTransport(dist.group.WORLD)
    return [on_this_rank(case, transport, torch.device("cpu")) for case in cases]


def on_gpus(cases: list[Case], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Both transports, each case several times in a row, so that buffers are used again."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    transports = {"collective": CollectiveTransport(group), "peer": PeerTransport(group, device)}
    results = {
        name: [on_this_rank(case, transport, device) for case in cases for _ in range(repeats)]
        for name, transport in transports.items()
    }
    torch.cuda.synchronize()
    dist.barrier()
    return results
