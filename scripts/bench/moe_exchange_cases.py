"""What moe_exchange.py times.

Shape suffixes: T tokens of a rank, K choices, R = T K rows, H hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megacomposer.kernels.bench import benchmark
from megacomposer.kernels.grouped_mlp import grouped_swiglu
from megacomposer.kernels.moe_permute import permute_into
from megacomposer.kernels.moe_routing import routing_map
from megacomposer.mesh.row_transport import CollectiveTransport, PeerTransport, RowTransport
from megacomposer.model.expert_exchange import ExpertExchange, plan_exchange

Run = Callable[[], object]

# Tokens of each rank, hidden, intermediate, experts of each rank, choices. The second has as many
# experts and rows a rank as one of 8 ranks of Kimi K2.
SHAPES = {
    "qwen3": (32768, 2048, 768, 64, 8),
    "kimi": (8192, 7168, 2048, 48, 8),
    "tiny": (64, 64, 48, 4, 3),
}


def slowest(run: Run, device: torch.device) -> float:
    """Median of the slowest rank, in ms."""
    dist.barrier()
    ms = torch.tensor(benchmark(run, device=device, warmup=5).median_ms, device=device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return float(ms)


class Layer:
    """bf16 operands and uniform routing of one rank (float32 on the CPU)."""

    def __init__(self, shape: str, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        self.group, self.device, self.ranks = dist.group.WORLD, device, dist.get_world_size()
        tokens, hidden, inner, self.local, choices = SHAPES[shape]
        self.experts = self.local * self.ranks
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(dist.get_rank())

        def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
            x = torch.empty(size, device=device, dtype=dtype).normal_(std=scale)
            return x.requires_grad_()

        weights = torch.rand(tokens, self.experts, device=device)
        self.ids_TK = weights.topk(choices).indices.sort(dim=1).values
        self.gates_TK = torch.rand(tokens, choices, device=device).requires_grad_()
        self.x_TH, self.grad_TH = normal(tokens, hidden), normal(tokens, hidden).detach()
        self.gate_up = normal(self.local, 2 * inner, hidden, scale=hidden**-0.5)
        self.down = normal(self.local, hidden, inner, scale=inner**-0.5)
        self._transports: dict[str, RowTransport] = {}

    def transport(self, name: str) -> RowTransport:
        if name not in self._transports:
            self._transports[name] = (
                CollectiveTransport(self.group)
                if name == "collective"
                else PeerTransport(self.group, self.device)
            )
        return self._transports[name]

    def passes(self, how: str, parts: int) -> tuple[Run, Run]:
        """Forward, and forward and backward, from expert ids to summed tokens."""
        leaves = (self.x_TH, self.gate_up, self.down, self.gates_TK)
        own_ids_TK = (self.ids_TK % self.local).sort(dim=1).values

        def forward() -> torch.Tensor:
            if how == "no exchange":  # as many rows to as many experts, all of this rank's tokens
                map = routing_map(own_ids_TK, self.local, ids_rise=True)
                return grouped_swiglu(*leaves[:3], map, self.gates_TK)
            plan, _ = plan_exchange(self.ids_TK, self.experts, parts, self.group)
            exchange = ExpertExchange(plan, self.transport(how))
            exchange.start(self.x_TH)
            gates_NK, map = exchange.routing(self.gates_TK, self.ids_TK)
            return grouped_swiglu(*leaves[:3], map, gates_NK, exchange)

        return forward, lambda: torch.autograd.grad(forward(), leaves, self.grad_TH)


def dispatches(
    layer: Layer, transports: list[str], peers: list[str]
) -> Iterator[tuple[str, Run, float]]:
    """(name, what brings tokens to their experts' ranks, bytes that leave this rank for others)."""
    x_TH = layer.x_TH.detach()
    row_bytes = x_TH.shape[1] * x_TH.element_size()
    if "vdev" in peers:
        yield _vdev(layer, row_bytes)
        return
    plan, _ = plan_exchange(layer.ids_TK, layer.experts, 1, layer.group)
    rank = dist.get_rank()
    copies = sum(plan.tokens[rank][0]) - plan.tokens[rank][0][rank]
    for name in transports:
        transport = layer.transport(name)

        def run(transport: RowTransport = transport) -> None:
            exchange = ExpertExchange(plan, transport)
            exchange.start(x_TH)
            exchange.started().wait(0)

        yield f"one copy a rank, {name}", run, copies * row_bytes
    if "rows" in peers:
        yield _rows(layer, row_bytes)


def _rows(layer: Layer, row_bytes: int) -> tuple[str, Run, float]:
    """One row for each expert, over `all_to_all_single`: what megatron-core's dispatcher sends."""
    map = routing_map(layer.ids_TK, layer.experts)
    counts = map.rows_per_expert.view(layer.ranks, layer.local).sum(1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    send, receive = counts.tolist(), received.tolist()
    x_TH = layer.x_TH.detach()
    rows_RH = x_TH.new_empty((map.order.shape[0], x_TH.shape[1]))
    out = x_TH.new_empty((sum(receive), x_TH.shape[1]))

    def run() -> None:
        permute_into(rows_RH, x_TH, map)
        dist.all_to_all_single(out, rows_RH, receive, send)

    others = sum(send) - send[dist.get_rank()]
    return "one row an expert, all_to_all_single", run, others * row_bytes


def _vdev(layer: Layer, row_bytes: int) -> tuple[str, Run, float]:
    """The same rows over torch's `all_to_all_vdev_2d`, which needs NVSHMEM."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend("NVSHMEM")
    map = routing_map(layer.ids_TK, layer.experts)
    x_TH, rows = layer.x_TH.detach(), map.order.shape[0]
    shapes = [(rows, x_TH.shape[1]), (2 * rows, x_TH.shape[1])]
    rows_RH, out = (symmetric.empty(*s, dtype=x_TH.dtype, device=layer.device) for s in shapes)
    splits = symmetric.empty(layer.ranks, dtype=torch.int64, device=layer.device)
    offsets = symmetric.empty(2, layer.ranks, dtype=torch.int64, device=layer.device)
    name = layer.group.group_name
    for tensor in (rows_RH, out, splits, offsets):
        symmetric.rendezvous(tensor, name)
    # One run for each rank: it takes 16 experts a rank at most.
    counts = map.rows_per_expert.view(layer.ranks, layer.local).sum(1)
    splits.copy_(counts)
    offsets.zero_()

    def run() -> None:
        permute_into(rows_RH, x_TH, map)
        torch.ops.symm_mem.all_to_all_vdev_2d(rows_RH, out, splits, offsets, name)

    others = int(counts.sum() - counts[dist.get_rank()])
    return "one row an expert, all_to_all_vdev_2d", run, others * row_bytes
