"""Muon on sharded parameters: matrices travel to the ranks that orthogonalise them, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from megacomposer.kernels.muon_update import (
    PieceTable,
    apply_update,
    copy_rectangles,
    pack,
    update_momentum,
)
from megacomposer.kernels.newton_schulz import power_of_two_scale
from megacomposer.mesh.exchange_group import exchange_group
from megacomposer.mesh.layout import Layout
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.muon_exchange import (
    Exchange,
    Held,
    Link,
    UpdateTable,
    local_work,
)
from megacomposer.optim.muon_owners import Kind
from megacomposer.optim.muon_plan import MuonPlan, PlannedMatrix, make_plan
from megacomposer.optim.muon_schedule import Task, run_tasks
from megacomposer.optim.muon_state import MuonState
from megacomposer.optim.orthogonal import (
    WIRE_DTYPES,
    decay_factor,
    orthogonalize_stacks,
    update_coefficient,
)

Trace = list[tuple[str, int, float]]
"""(event, bucket or chunk, `time.perf_counter()` seconds), as the host comes by."""


class ShardedMuon(MuonState):
    """Muon for the parameters that have logical matrices, AdamW for all others.

    Equal to `MuonReference` bit for bit, whatever the layout; there are the formulas. Each step
    updates the momentum in place, sends each matrix, scaled and cast, to one owner, and the
    orthogonalised matrix back to every rank that stores a part (`muon_plan` says who and when).
    Matrices that only their owner stores do not travel; work on them and on AdamW's parameters
    fills the waits.

    Construction is collective, and so is `step`: every rank passes the same parameters in the same
    order, empty shards included. Nothing in a step waits for the device on the host.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        config: OptimConfig,
        layout: Layout,
        *,
        link: Link | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`link` and `trace` are for tests: how exchanges start, and a list to note events in.

        Raises:
            ValueError: a shard does not say where the other ranks keep theirs, matrices do not add
                up, or the ranks' plans differ.
        """
        super().__init__(shards, config)
        self._layout = layout
        self._link = Link() if link is None else link
        self._trace = trace
        self._wire = WIRE_DTYPES[config.muon_wire_dtype]
        self._device = self._shards[0].local.device
        self.plan = self._make_plan()
        self._build_tables()
        self._allocate()
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._groups = self._make_groups()
        self._connect()

    def _make_plan(self) -> MuonPlan:
        parameters = []
        for shard in self._matrix_shards:
            if shard.placement is None:
                raise ValueError(f"{shard.name} has no placement; optim.name='muon' plans by it")
            assert shard.placement.on(self._layout).blocks == shard.layout.blocks, shard.name
            parameters.append((shard.placement, shard.matrices))
        plan = make_plan(
            parameters,
            self._layout,
            steps=self._config.muon_ns_steps,
            bucket_bytes=self._config.muon_bucket_mib * 2**20,
            wire_bytes=self._wire.itemsize,
        )
        if plan.world_size > 1:
            digests: list[str | None] = [None] * plan.world_size
            # The settings too: the number of buffers, for one, decides the order of exchanges.
            dist.all_gather_object(digests, f"{plan.digest} {self._config}")
            _check_digests(digests)
        return plan

    def _build_tables(self) -> None:
        plan, rank, device = self.plan, self._layout.rank, self._device
        self._held = held = Held(plan, rank)
        self._momentum_table = PieceTable(
            [
                held.piece(plan, i, piece, 0)
                for i, pieces in held.pieces.items()
                for piece in pieces
            ],
            device,
        )
        self._exchanges = [
            Exchange(plan, bucket, held, self._members(bucket.kind), rank, device)
            for bucket in plan.buckets
        ]
        self._local = [
            (work, work.updates())
            for work in local_work(
                plan,
                rank,
                held,
                device,
                limit_bytes=self._config.muon_bucket_mib * 2**20,
                wire_bytes=self._wire.itemsize,
                chunks=len(self._exchanges) + 1,
            )
        ]
        # Only matrices in several pieces have a largest entry that one rank cannot know.
        split = [i for i, matrix in enumerate(plan.matrices) if _is_split(plan, matrix)]
        place = {index: i for i, index in enumerate(split)}
        own = [index for index in held.number if index in place]
        self._num_split = len(split)
        numbers = [[held.number[i] for i in own], [place[i] for i in own]]
        self._split_numbers, self._split_places = torch.tensor(numbers, dtype=torch.int64).to(
            device
        )

    def _members(self, kind: Kind) -> range:
        own = self._layout.ep_rank if kind == "expert" else 0
        return self._members_of_groups(kind)[own]

    def _members_of_groups(self, kind: Kind) -> list[range]:
        """Of every group of the world that exchanges this kind."""
        layout = self._layout
        count = layout.ep if kind == "expert" else 1
        return [range(first, layout.world_size, count) for first in range(count)]

    def _make_groups(self) -> dict[Kind, dist.ProcessGroup]:
        """Of the exchanges. On CUDA, where Newton-Schulz leaves multiprocessors to them, each has a
        communicator that takes no more than its share of those."""
        kinds = sorted({bucket.kind for bucket in self.plan.buckets})
        reserved = self._config.muon_reserved_sms
        if self._device.type == "cuda" and reserved and kinds:
            most_blocks = max(1, reserved // len(kinds))
            return {
                kind: exchange_group(self._members_of_groups(kind), most_blocks=most_blocks)
                for kind in kinds
            }
        groups: dict[Kind, dist.ProcessGroup] = {}
        for kind in kinds:
            world = dist.group.WORLD
            assert world is not None
            groups[kind] = self._layout.expert_exchange_group if kind == "expert" else world
        return groups

    def _allocate(self) -> None:
        """Buffers that every step uses again; each slot serves one exchange after another."""

        def buffer(elements: int) -> torch.Tensor:
            return torch.empty(elements, dtype=self._wire, device=self._device)

        exchanges = self._exchanges
        self._slots = [
            _Slot(
                held=buffer(max(exchange.held_elements for exchange in exchanges)),
                owned=buffer(max(exchange.owned_elements for exchange in exchanges)),
                stacks=buffer(max(exchange.stacks.elements for exchange in exchanges)),
            )
            for _ in range(min(self._config.muon_buffers, len(exchanges)))
        ]
        self._local_stacks = buffer(max((w.stacks.elements for w, _ in self._local), default=0))

    def _connect(self) -> None:
        """One tiny exchange for each group that will be used: NCCL connects at the first."""
        for kind, group in self._groups.items():
            ranks = dist.get_process_group_ranks(group)
            assert ranks == list(self._members(kind)), (kind, ranks)
            tiny = torch.zeros(len(ranks), dtype=torch.uint8, device=self._device)
            dist.all_to_all_single(torch.empty_like(tiny), tiny, group=group)

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        """Updates every parameter in place from its gradient; ValueError if one has none."""
        gradients = self._matrix_gradients()
        self._link.reset()
        config = self._config
        amax = update_momentum(
            gradients,
            self._momenta,
            self._momentum_table,
            mu=config.muon_momentum,
            nesterov=config.muon_nesterov,
            num_matrices=len(self._held.number),
        )
        whole_scales = power_of_two_scale(amax)
        with self._communication():
            scales = self._reduced_scales(amax) if self._num_split else whole_scales
        run = _Step(
            gradients=gradients,
            parameters=[shard.local for shard in self._matrix_shards],
            amax=amax,
            whole_scales=whole_scales,
            scales=scales,
            lr=lr,
        )
        tasks = [
            self._run_exchange(number, exchange, self._slots[number % len(self._slots)], run)
            for number, exchange in enumerate(self._exchanges)
        ]
        fillers: list[Callable[[], None]] = [lambda: self._step_adamw(lr)]
        for chunk in range(len(self._local)):
            fillers.append(functools.partial(self._step_local, chunk, run))
        run_tasks(tasks, fillers, len(self._slots))
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _reduced_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale of every matrix of which this rank stores a piece, equal at all its holders."""
        shared = torch.zeros(self._num_split, device=self._device)
        shared[self._split_places] = amax[self._split_numbers]
        self._link.reduce_max(shared)
        whole = amax.clone()
        whole[self._split_numbers] = shared[self._split_places]
        return power_of_two_scale(whole)

    def _run_exchange(self, number: int, exchange: Exchange, slot: _Slot, run: _Step) -> Task:
        if exchange.is_idle:
            yield
            yield
            return
        group = self._groups[exchange.kind]
        if exchange.gathers:
            with self._communication():
                self._pack(exchange.pack, run, run.scales, slot.held)
                pending = self._link.exchange(slot.held, slot.owned, exchange.gather, group)
            self._note("gather starts", number)
            yield
            pending.wait()
            self._note("gather ends", number)
            copy_rectangles(slot.owned, slot.stacks, exchange.assembly)
        else:
            yield
            self._pack(exchange.pack, run, run.whole_scales, slot.stacks)
        self._note("compute", number)
        results = self._orthogonalize(exchange.stacks.views(slot.stacks))
        for result, table in zip(results, exchange.disassembly, strict=True):
            copy_rectangles(result.view(-1), slot.owned, table)
        with self._communication():
            pending = self._link.exchange(slot.owned, slot.held, exchange.scatter, group)
        self._note("scatter starts", number)
        yield
        pending.wait()
        self._note("scatter ends", number)
        self._apply(exchange.update, slot.held, run)

    def _step_local(self, chunk: int, run: _Step) -> None:
        self._note("local", chunk)
        work, updates = self._local[chunk]
        self._pack(work.table, run, run.whole_scales, self._local_stacks)
        results = self._orthogonalize(work.stacks.views(self._local_stacks))
        for result, update in zip(results, updates, strict=True):
            self._apply(update, result.view(-1), run)

    def _step_adamw(self, lr: float) -> None:
        self._note("adamw", 0)
        self._adamw.step(lr=lr * self._config.muon_adam_lr_multiplier)

    def _pack(
        self, table: PieceTable, run: _Step, scales: torch.Tensor, target: torch.Tensor
    ) -> None:
        pack(
            run.gradients,
            self._momenta,
            table,
            mu=self._config.muon_momentum,
            nesterov=self._config.muon_nesterov,
            scales=scales,
            out=target,
        )

    def _apply(self, update: UpdateTable, values: torch.Tensor, run: _Step) -> None:
        config, shards = self._config, self._matrix_shards
        coefficients, decays = {}, {}
        for rule in {*update.rules}:  # of thousands of heads and experts, a few
            coefficients[rule] = update_coefficient(config, rule.rows, rule.columns, run.lr)
            has_decay = shards[rule.parameter].weight_decay
            decays[rule] = decay_factor(config, run.lr, weight_decay=has_decay)
        apply_update(
            run.parameters,
            update.table,
            values,
            coefficients=[coefficients[rule] for rule in update.rules],
            decays=[decays[rule] for rule in update.rules],
            cautious=config.muon_cautious_decay,
        )

    def _orthogonalize(self, stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        reserved = self._config.muon_reserved_sms if self._exchanges else 0
        return orthogonalize_stacks(stacks, self._config, reserved_sms=reserved)

    @contextlib.contextmanager
    def _communication(self) -> Iterator[None]:
        """On CUDA, the stream of packing and exchanges, after all that was asked of this one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _note(self, event: str, number: int) -> None:
        if self._trace is not None:
            self._trace.append((event, number, time.perf_counter()))

    def metrics(self) -> dict[str, float]:
        """This rank's last step: exchanges, and the plan's largest load over the mean."""
        return {
            "optim/muon_predicted_imbalance": self.plan.imbalance,
            "optim/muon_collectives": float(self._link.collectives),
            "optim/muon_sent_bytes": float(self._link.sent_bytes),
            "optim/muon_received_bytes": float(self._link.received_bytes),
            "optim/muon_reduced_bytes": float(self._link.reduced_bytes),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slot:
    """Buffers of one exchange, wire dtype."""

    held: torch.Tensor
    """Pieces that this rank stores: sent to the owners, later received from them."""
    owned: torch.Tensor
    """Pieces of the matrices that it owns: received, later sent back."""
    stacks: torch.Tensor
    """Those matrices, whole."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What the parts of one step share."""

    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]
    amax: torch.Tensor
    """Kept for the communication stream, which reads it at its own time."""
    whole_scales: torch.Tensor
    """Right for the matrices that this rank stores whole."""
    scales: torch.Tensor
    """Right for all; belongs to the communication stream."""
    lr: float


def _is_split(plan: MuonPlan, matrix: PlannedMatrix) -> bool:
    return len(plan.parameters[matrix.parameter].geometry.holders[matrix.index]) > 1


def _check_digests(digests: Sequence[str | None]) -> None:
    most = max(sorted({*digests}, key=str), key=digests.count)
    differing = [rank for rank, digest in enumerate(digests) if digest != most]
    if differing:
        raise ValueError(
            f"ranks {differing} made another Muon plan than the rest; every rank needs the same "
            "model, mesh and optim settings, and the same version of this code"
        )
