"""The exchange of an expert layer over its expert-parallel group: one copy of a token for each rank
that has any of its experts, and one result back, the sum over those experts.

Shape letters: T tokens of this rank, K experts per token, S rows that it sends, N tokens that it
receives, E experts, L of them local, P parts, G ranks of the group, H hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megacomposer.kernels.moe_permute import combine, permute_into
from megacomposer.kernels.moe_routing import RoutingMap, routing_map
from megacomposer.kernels.token_exchange import Arrival, Part, Return
from megacomposer.mesh.row_transport import (
    CollectiveTransport,
    Direction,
    Move,
    RowTransport,
    Transfer,
)

Counts = list[list[list[int]]]
"""[source rank][part][rank of the expert]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Which tokens go where. `sent_map`'s rows are sorted by part, rank and token."""

    rank: int
    sent_map: RoutingMap
    """Of the pairs (t, k) whose expert is the first of its rank among t's, to S rows."""
    row_of_pair_TK: torch.Tensor
    """int64: the sent row that goes to the rank of each pair's expert."""
    sent_ranks_S: torch.Tensor
    """int64: the rank that each row goes to."""
    tokens: Counts
    """Tokens that each rank sends."""
    pairs: Counts
    """(token, expert) pairs of them."""

    @property
    def ranks(self) -> range:
        return range(len(self.tokens))

    def num_sent(self, rank: int) -> int:
        """Rows that a rank sends."""
        return sum(map(sum, self.tokens[rank]))

    def num_received(self, rank: int) -> int:
        return sum(part[rank] for source in self.tokens for part in source)

    def received_pairs(self) -> list[int]:
        """(token, expert) pairs of each part that this rank receives."""
        return [sum(part[self.rank] for part in parts) for parts in zip(*self.pairs, strict=True)]

    def moves(self, direction: Direction) -> list[Move]:
        """One for each part."""
        starts, me = [_run_starts(self.tokens, rank, direction) for rank in self.ranks], self.rank
        moves = []
        for part in range(len(self.tokens[0])):
            there = tuple(self.tokens[me][part])
            back = tuple(source[part][me] for source in self.tokens)
            sent, received = (there, back) if direction == "to_experts" else (back, there)
            moves.append(
                Move(
                    sent_rows=sent,
                    first_sent_row=starts[me][part][0],
                    received_rows=received,
                    peer_first_rows=tuple(of_rank[part][me] for of_rank in starts),
                )
            )
        return moves


def _run_starts(tokens: Counts, rank: int, direction: Direction) -> list[list[int]]:
    """[part][other rank]: where in the buffer that `rank` sends the run for the other starts.
    Buffers are sorted by part, then rank."""
    ranks, parts = range(len(tokens)), range(len(tokens[0]))
    runs = (
        tokens[rank][part][other] if direction == "to_experts" else tokens[other][part][rank]
        for part in parts
        for other in ranks
    )
    starts = list(itertools.accumulate(runs, initial=0))
    return [starts[part * len(ranks) : (part + 1) * len(ranks)] for part in parts]


def plan_exchange(
    ids_TK: torch.Tensor, num_experts: int, parts: int, group: dist.ProcessGroup
) -> tuple[ExchangePlan, torch.Tensor]:
    """The plan, and how many pairs of this rank each expert has, int64 [E].

    ids: int64 [T, K], rising for each token. Tokens are cut into `parts` runs of nearly one size.
    Reads the counts of all ranks back to the host, which waits for the device once. Collective.
    """
    torch._assert_async((ids_TK.diff(dim=1) >= 0).all())
    size, num_tokens = group.size(), ids_TK.shape[0]
    local = num_experts // size
    part_T1 = torch.arange(num_tokens, device=ids_TK.device).mul_(parts)
    part_T1 = part_T1.div_(max(num_tokens, 1), rounding_mode="floor").unsqueeze(1)
    pairs_PE = routing_map(ids_TK + part_T1 * num_experts, parts * num_experts).rows_per_expert
    ranks_TK = ids_TK.div(local, rounding_mode="floor")
    is_first_TK = torch.ones_like(ranks_TK, dtype=torch.bool)
    is_first_TK[:, 1:] = ranks_TK[:, 1:] != ranks_TK[:, :-1]
    runs = parts * size
    run_TK = torch.where(is_first_TK, ranks_TK + part_T1 * size, runs)
    whole_map = routing_map(run_TK, runs + 1)
    counts = torch.cat([whole_map.rows_per_expert[:-1], pairs_PE.view(runs, local).sum(1)])
    gathered = counts.new_empty(size * counts.shape[0])
    dist.all_gather_into_tensor(gathered, counts, group=group)
    tokens_host, pairs_host = gathered.view(size, 2, parts, size).transpose(0, 1).tolist()
    sent_map = whole_map.without_last_expert(sum(map(sum, tokens_host[group.rank()])))
    column_K = torch.arange(ids_TK.shape[1], device=ids_TK.device)
    first_TK = torch.where(is_first_TK, column_K, 0).cummax(1).values
    plan = ExchangePlan(
        rank=group.rank(),
        sent_map=sent_map,
        row_of_pair_TK=sent_map.row_of_TK.gather(1, first_TK),
        sent_ranks_S=ranks_TK.reshape(-1)[sent_map.order],
        tokens=tokens_host,
        pairs=pairs_host,
    )
    return plan, pairs_PE.view(parts, num_experts).sum(0)


class ExpertExchange:
    """A `TokenExchange` (kernels/token_exchange.py) over a transport, for one forward and backward
    of one layer."""

    def __init__(self, plan: ExchangePlan, transport: RowTransport) -> None:
        self._plan, self._transport = plan, transport
        self._out_moves, self._back_moves = plan.moves("to_experts"), plan.moves("from_experts")
        tokens = itertools.accumulate((sum(m.received_rows) for m in self._out_moves), initial=0)
        rows = itertools.accumulate(plan.received_pairs(), initial=0)
        runs = zip(itertools.pairwise(tokens), itertools.pairwise(rows), strict=True)
        self.parts = tuple(Part(tokens=slice(*t), rows=slice(*r)) for t, r in runs)
        self._started: Arrival | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.parts[-1].tokens.stop

    @property
    def num_rows(self) -> int:
        """(token, expert) pairs of them."""
        return self.parts[-1].rows.stop

    def local_map(self, ids_NK: torch.Tensor, num_local: int) -> RoutingMap:
        """The map of the received tokens to the local experts, part after part. ids: of
        `exchange_gates`."""
        num_groups = len(self.parts) * num_local
        if len(self.parts) > 1:
            in_parts = [ids_NK[part.tokens] for part in self.parts]
            shifted = [ids + index * num_local for index, ids in enumerate(in_parts)]
            ids_NK = torch.where(ids_NK < num_local, torch.cat(shifted), num_groups)
        return routing_map(ids_NK, num_groups + 1).without_last_expert(self.num_rows)

    def start(self, x_TH: torch.Tensor) -> None:
        """Sends the layer's tokens, before it begins."""
        self._started = self.send(x_TH.detach())

    def started(self) -> Arrival:
        arrival, self._started = self._started, None  # who asks keeps it no longer than it needs
        assert arrival is not None
        return arrival

    def send(self, x_TH: torch.Tensor) -> Arrival:
        plan, self._like = self._plan, x_TH.new_empty(0, x_TH.shape[1])
        sent_SH = self._transport.buffer(
            "to_experts", plan.num_sent(plan.rank), max(map(plan.num_sent, plan.ranks)), x_TH
        )
        permute_into(sent_SH, x_TH, plan.sent_map)
        tokens_NH = x_TH.new_empty((self.num_tokens, x_TH.shape[1]))
        transfers = [
            self._transport.start(sent_SH, move, tokens_NH[part.tokens])
            for move, part in zip(self._out_moves, self.parts, strict=True)
        ]
        return _Arrival(tokens_NH, transfers)

    def give_back(self) -> Return:
        plan, width = self._plan, self._like.shape[1]
        results_NH = self._transport.buffer(
            "from_experts", self.num_tokens, max(map(plan.num_received, plan.ranks)), self._like
        )
        received_SH = self._like.new_empty((plan.num_sent(plan.rank), width))

        def send(part: int) -> Transfer:
            move = self._back_moves[part]
            first = self._out_moves[part].first_sent_row
            out = received_SH[first : first + sum(move.received_rows)]
            return self._transport.start(results_NH, move, out)

        return _Return(plan.sent_map, self.parts, results_NH, received_SH, send)


class _Arrival:
    def __init__(self, tokens_NH: torch.Tensor, transfers: list[Transfer]) -> None:
        self.tokens_NH, self._transfers = tokens_NH, transfers

    def wait(self, part: int) -> None:
        self._transfers[part].wait()


class _Return:
    def __init__(
        self,
        sent_map: RoutingMap,
        parts: tuple[Part, ...],
        results_NH: torch.Tensor,
        received_SH: torch.Tensor,
        send: Callable[[int], Transfer],
    ) -> None:
        self._sent_map, self._parts, self._send = sent_map, parts, send
        self._results_NH, self._received_SH = results_NH, received_SH
        self._transfers: list[Transfer] = []

    def rows(self, part: int) -> torch.Tensor:
        return self._results_NH[self._parts[part].tokens]

    def send(self, part: int) -> None:
        assert part == len(self._transfers)
        self._transfers.append(self._send(part))

    def sum(self) -> torch.Tensor:
        for transfer in self._transfers:
            transfer.wait()
        return combine(self._received_SH, self._sent_map, self._sent_map.num_tokens)


class _ExchangeGates(torch.autograd.Function):
    """Each token's gates and local expert ids to the ranks of its experts, in one collective for
    each part; backward, the gates' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        gates_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        num_local: int,
        plan: ExchangePlan,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert gates_TK.dtype == torch.float32
        token_S = plan.sent_map.token_of_row
        local_SK = ids_TK[token_S] - plan.sent_ranks_S[:, None] * num_local
        is_there_SK = (local_SK >= 0) & (local_SK < num_local)
        ids_SK = torch.where(is_there_SK, local_SK, num_local).int()
        gates_SK = torch.where(is_there_SK, gates_TK[token_S], 0.0)
        sent = torch.cat([ids_SK, gates_SK.view(torch.int32)], dim=1)
        received = _exchange(sent, plan.moves("to_experts"), group)
        ids_NK, gates_NK = received.chunk(2, dim=1)
        ctx.plan, ctx.group = plan, group
        ctx.mark_non_differentiable(ids_NK)
        return gates_NK.contiguous().view(torch.float32), ids_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_NK: torch.Tensor, _: None
    ) -> tuple[torch.Tensor, None, None, None, None]:
        plan: ExchangePlan = ctx.plan
        grad_SK = _exchange(grad_NK.contiguous(), plan.moves("from_experts"), ctx.group)
        return grad_SK.gather(0, plan.row_of_pair_TK), None, None, None, None


def _exchange(rows: torch.Tensor, moves: list[Move], group: dist.ProcessGroup) -> torch.Tensor:
    transport = CollectiveTransport(group)
    sizes = [sum(move.received_rows) for move in moves]
    out = rows.new_empty((sum(sizes), rows.shape[1]))
    for move, part in zip(moves, out.split(sizes), strict=True):
        transport.start(rows, move, part).wait()
    return out


def exchange_gates(
    gates_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    num_experts: int,
    plan: ExchangePlan,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates [N, K] of the received tokens, and the ids of their experts among this rank's.

    gates: float32 [T, K], differentiable; ids: int64 [T, K]. Where an expert is another rank's, the
    received gate is 0 and the id is the number of local experts. Collective over the group, in
    backward too.
    """
    out: tuple[torch.Tensor, torch.Tensor] = _ExchangeGates.apply(
        gates_TK, ids_TK, num_experts // group.size(), plan, group
    )
    return out
