"""The exchange of an expert layer over its expert-parallel group: one copy of a token for each rank
that has any of its experts, and one result back, the sum over those experts.

Shape letters: T tokens of this rank, K experts per token, S rows that it sends, N tokens that it
receives, E experts, L of them local, P parts, G ranks of the group, H hidden.
"""

from __future__ import annotations

import dataclasses
import functools
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

    group: dist.ProcessGroup
    num_local: int
    """L."""
    sent_map: RoutingMap
    """Of the pairs (t, k) whose expert is the first of its rank among t's, to S rows."""
    is_first_TK: torch.Tensor
    """Which pairs those are."""
    tokens: Counts
    """Tokens that each rank sends."""
    pairs: Counts
    """(token, expert) pairs of them."""

    @property
    def rank(self) -> int:
        return self.group.rank()

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

    def row_of_pair_TK(self) -> torch.Tensor:
        """int64: the sent row that went to the rank of each pair's expert."""
        # Rows rise from one rank to the next. Along the first dim, since torch's scan of short rows
        # is slow: 0.34 ms for [32768, 8] on an H200.
        rows_KT = torch.where(self.is_first_TK, self.sent_map.row_of_TK, -1).t().contiguous()
        return rows_KT.cummax(0).values.t()

    @functools.cached_property
    def out_moves(self) -> list[Move]:
        """Of tokens to the experts, one for each part."""
        return self._moves("to_experts")

    @functools.cached_property
    def back_moves(self) -> list[Move]:
        """Of results from the experts, one for each part."""
        return self._moves("from_experts")

    def _moves(self, direction: Direction) -> list[Move]:
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
    local, runs = num_experts // size, parts * size
    if parts > 1:
        part_T1 = torch.arange(num_tokens, device=ids_TK.device).unsqueeze(1) * parts
        part_T1 = part_T1.div_(max(num_tokens, 1), rounding_mode="floor")
        ids_TK = ids_TK + part_T1 * num_experts
    pairs_PE = routing_map(ids_TK, parts * num_experts).rows_per_expert
    run_TK = ids_TK.div(local, rounding_mode="floor")  # ranks, those of each part apart
    is_first_TK = run_TK.diff(dim=1, prepend=run_TK.new_full((1, 1), -1).expand(num_tokens, 1)) > 0
    whole_map = routing_map(torch.where(is_first_TK, run_TK, runs), runs + 1)
    counts = torch.cat([whole_map.rows_per_expert[:-1], pairs_PE.view(runs, local).sum(1)])
    gathered = counts.new_empty(size * counts.shape[0])
    dist.all_gather_into_tensor(gathered, counts, group=group)
    tokens_host, pairs_host = gathered.view(size, 2, parts, size).transpose(0, 1).tolist()
    sent_map = whole_map.without_last_expert(sum(map(sum, tokens_host[group.rank()])))
    plan = ExchangePlan(
        group=group,
        num_local=local,
        sent_map=sent_map,
        is_first_TK=is_first_TK,
        tokens=tokens_host,
        pairs=pairs_host,
    )
    return plan, pairs_PE if parts == 1 else pairs_PE.view(parts, num_experts).sum(0)


class ExpertExchange:
    """A `TokenExchange` (kernels/token_exchange.py) over a transport, for one forward and backward
    of one layer."""

    def __init__(self, plan: ExchangePlan, transport: RowTransport) -> None:
        self._plan, self._transport = plan, transport
        received = (sum(move.received_rows) for move in plan.out_moves)
        tokens = itertools.accumulate(received, initial=0)
        rows = itertools.accumulate(plan.received_pairs(), initial=0)
        runs = zip(itertools.pairwise(tokens), itertools.pairwise(rows), strict=True)
        self.parts = tuple(Part(tokens=slice(*t), rows=slice(*r)) for t, r in runs)
        self._started: _Arrival | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.parts[-1].tokens.stop

    @property
    def num_rows(self) -> int:
        """(token, expert) pairs of them."""
        return self.parts[-1].rows.stop

    def start(self, x_TH: torch.Tensor) -> None:
        """Sends the first part of the layer's tokens; `started` sends the others."""
        self._started = self._pack(x_TH.detach())
        self._started.send(1)

    def routing(
        self, gates_TK: torch.Tensor, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, RoutingMap]:
        """Gates [N, K] of the tokens that come, and their map to the local experts, part by part.

        gates: float32 [T, K], differentiable: each reaches the gradient from its expert's rank;
        ids: int64 [T, K], rising. Collective, in backward too. After `start`, since a collective
        waits for those before it, and the first part is what the experts wait for anyway.
        """
        gates_NK, ids_NK = _ExchangeGates.apply(gates_TK, ids_TK, self._plan)
        num_local, none = self._plan.num_local, len(self.parts) * self._plan.num_local
        num_experts = len(self._plan.ranks) * num_local
        # Round the circle of all experts, from this rank's first: those of others come last.
        ids_NK = (ids_NK - self._plan.rank * num_local).remainder_(num_experts)
        ids_NK.clamp_(max=num_local)
        if len(self.parts) > 1:
            is_none_NK = ids_NK == num_local
            for index, part in enumerate(self.parts):
                ids_NK[part.tokens] += index * num_local
            ids_NK.masked_fill_(is_none_NK, none)
        whole_map = routing_map(ids_NK, none + 1, ids_rise=True)
        return gates_NK, whole_map.without_last_expert(self.num_rows)

    def started(self) -> Arrival:
        arrival, self._started = self._started, None  # who asks keeps it no longer than it needs
        assert arrival is not None
        arrival.send(len(self.parts))
        return arrival

    def send(self, x_TH: torch.Tensor) -> Arrival:
        arrival = self._pack(x_TH)
        arrival.send(len(self.parts))
        return arrival

    def _pack(self, x_TH: torch.Tensor) -> _Arrival:
        plan, self._like = self._plan, x_TH.new_empty(0, x_TH.shape[1])
        sent_SH = self._transport.buffer(
            "to_experts", plan.num_sent(plan.rank), max(map(plan.num_sent, plan.ranks)), x_TH
        )
        permute_into(sent_SH, x_TH, plan.sent_map)
        tokens_NH = x_TH.new_empty((self.num_tokens, x_TH.shape[1]))

        def send(part: int) -> Transfer:
            out = tokens_NH[self.parts[part].tokens]
            return self._transport.start(sent_SH, plan.out_moves[part], out)

        return _Arrival(tokens_NH, send)

    def give_back(self) -> Return:
        plan, width = self._plan, self._like.shape[1]
        results_NH = self._transport.buffer(
            "from_experts", self.num_tokens, max(map(plan.num_received, plan.ranks)), self._like
        )
        received_SH = self._like.new_empty((plan.num_sent(plan.rank), width))

        def send(part: int) -> Transfer:
            move, first = plan.back_moves[part], plan.out_moves[part].first_sent_row
            out = received_SH[first : first + sum(move.received_rows)]
            return self._transport.start(results_NH, move, out)

        return _Return(plan.sent_map, self.parts, results_NH, received_SH, send)


class _Arrival:
    def __init__(self, tokens_NH: torch.Tensor, send: Callable[[int], Transfer]) -> None:
        self.tokens_NH, self._send = tokens_NH, send
        self._transfers: list[Transfer] = []

    def send(self, parts: int) -> None:
        """All parts up to that number which are not under way."""
        for part in range(len(self._transfers), parts):
            self._transfers.append(self._send(part))

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
    """Each token's gates and expert ids to the ranks of its experts, in one collective for each
    part; backward, the gates' gradients."""

    @staticmethod
    def forward(
        ctx: Any, gates_TK: torch.Tensor, ids_TK: torch.Tensor, plan: ExchangePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert gates_TK.dtype == torch.float32
        both = torch.cat([ids_TK.int(), gates_TK.view(torch.int32)], dim=1)
        sent = both.index_select(0, plan.sent_map.token_of_row)
        ids_NK, gates_NK = _exchange(sent, plan.out_moves, plan.group).chunk(2, dim=1)
        ctx.plan = plan
        ctx.mark_non_differentiable(ids_NK)
        return gates_NK.contiguous().view(torch.float32), ids_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NK: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        plan: ExchangePlan = ctx.plan
        grad_SK = _exchange(grad_NK.contiguous(), plan.back_moves, plan.group)
        return grad_SK.gather(0, plan.row_of_pair_TK()), None, None


def _exchange(rows: torch.Tensor, moves: list[Move], group: dist.ProcessGroup) -> torch.Tensor:
    transport = CollectiveTransport(group)
    sizes = [sum(move.received_rows) for move in moves]
    out = rows.new_empty((sum(sizes), rows.shape[1]))
    for move, part in zip(moves, out.split(sizes), strict=True):
        transport.start(rows, move, part).wait()
    return out
