"""When every rank of a world that is not here would be done with what in a step of Muon.

Bytes over rates, and measured Newton-Schulz times, on one timeline of compute and one of exchanges
in the order of the step. Exchanges are taken to run beside the kernels without slowing them, at the
full rate of the links. In each, a rank starts with the last and ends with the last of the ranks
that it exchanges with. Latencies and launches are left out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from megacomposer.optim.cost import (
    ADAMW_BYTES,
    APPLY_BYTES,
    MOMENTUM_BYTES,
    PACK_BYTES,
    Rates,
    Table,
    measured_table,
)
from megacomposer.optim.muon_schedule import Task, run_tasks
from megacomposer.optim.muon_traffic import BucketWork, LocalWork, PerRank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(Rates):
    """One H200 of many."""

    state_bytes: float = 120e9
    """Most that parameters, gradients and moments of one GPU may take of its 141 GB."""
    calibrated: Table = ()
    """Newton-Schulz times that go before those of the package's table."""

    @property
    def measured(self) -> Table:
        """All measured Newton-Schulz times."""
        own = {(row.rows, row.columns) for row in self.calibrated}
        others = [row for row in measured_table() if (row.rows, row.columns) not in own]
        return (*self.calibrated, *others)


class Timeline:
    """When each rank is done with what, in the order in which `ShardedMuon` asks for it."""

    def __init__(self, machine: Machine, wire_bytes: int, muon: PerRank, adamw: PerRank) -> None:
        self._machine, self._wire_bytes = machine, wire_bytes
        self._muon, self._adamw = muon, adamw
        self.elementwise_s = np.zeros_like(muon)
        self._alone_s = np.zeros_like(muon)
        self._compute = np.zeros_like(muon)
        """When each rank's compute stream is free."""
        self._exchange = np.zeros_like(muon)
        """The same of the stream of packing and exchanges."""

    @property
    def exchange_s(self) -> float:
        """Seconds that the links of the busiest rank are in use."""
        return float(self._alone_s.max())

    def run(self, buckets: list[BucketWork], local: LocalWork, buffers: int) -> float:
        """Seconds until the last rank is done."""
        self._compute += self._pass(self._muon, MOMENTUM_BYTES)
        parts = len(buckets) + 1
        local_s = (
            local.newton_schulz_s / parts
            + self._pass(local.elements, PACK_BYTES + APPLY_BYTES + 2 * self._wire_bytes) / parts
        )
        adamw_s = self._pass(self._adamw, ADAMW_BYTES) / parts

        def fill() -> None:
            self._compute += local_s + adamw_s

        tasks = [self._run_bucket(work) for work in buckets]
        run_tasks(tasks, [fill] * parts, min(buffers, len(buckets)))
        return float(np.maximum(self._compute, self._exchange).max())

    def _run_bucket(self, work: BucketWork) -> Task:
        pack_s = self._pass(work.packed, PACK_BYTES + self._wire_bytes)
        if work.gathers:
            gathered = self._send(work, is_gather=True, pack_s=pack_s)
            yield
            self._compute = np.maximum(self._compute, gathered)
        else:
            yield
            self._compute += pack_s
        copy_s = self._pass(work.copied, 2 * self._wire_bytes)
        self._compute += work.newton_schulz_s + copy_s
        scattered = self._send(work, is_gather=False, pack_s=np.zeros_like(pack_s))
        yield
        self._compute = np.maximum(self._compute, scattered)
        self._compute += self._pass(work.applied, APPLY_BYTES + self._wire_bytes)

    def _send(self, work: BucketWork, *, is_gather: bool, pack_s: PerRank) -> PerRank:
        """When each rank has what it receives."""
        machine = self._machine
        flow = work.gather if is_gather else work.scatter
        alone_s = flow.seconds(self._wire_bytes, machine.near_bytes_per_s, machine.far_bytes_per_s)
        start_s = flow.latest(np.maximum(self._exchange, self._compute) + pack_s)
        self._exchange = flow.latest(start_s + alone_s)
        self._alone_s += alone_s
        return self._exchange

    def _pass(self, elements: PerRank, element_bytes: int) -> PerRank:
        seconds: PerRank = elements * element_bytes / self._machine.elementwise_bytes_per_s
        self.elementwise_s += seconds
        return seconds
