"""A fleet on a Ray cluster: one or more actors on each machine that has what jobs need.

    fleet = RayFleet(slots_per_worker=16, placement=RayPlacement(resources={"sandbox": 1}))
    async with Executor(fleet, journal=run / "jobs.jsonl") as executor:

Machines may come and go: new ones get actors, and jobs of lost ones run again elsewhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from megacomposer.config import Config
from megacomposer.env.fleet.fleet import Fleet, Worker
from megacomposer.env.fleet.job import Function, Job, Report, WorkerLostError, run_attempt
from megacomposer.env.sandbox import BackendUnavailableError

_LOG = logging.getLogger(__name__)
_END_S = 10.0
_CONTROL_CALLS = 2
"""Slots of an actor besides those for jobs, so that it answers when it is full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayPlacement(Config):
    """Where actors go."""

    address: str = "auto"
    """Of the cluster. A cluster that this process is connected to already is used as it is."""
    workers_per_node: int = 1
    num_cpus: float = 1.0
    """Of each actor, for Ray's accounting; sandboxes have limits of their own."""
    resources: dict[str, float] = dataclasses.field(default_factory=dict)
    """Custom resources, such as {"sandbox": 1}: only nodes that have them get actors."""
    poll_s: float = 5.0
    """How often machines that come or go are looked for."""
    start_s: float = 120.0
    """For an actor to start, before its node is passed over."""


class RayFleet(Fleet):
    """Actors that run `slots_per_worker` jobs each."""

    def __init__(self, *, slots_per_worker: int, placement: RayPlacement | None = None) -> None:
        place = placement or RayPlacement()
        super().__init__(slots_per_worker=slots_per_worker, worker_wait_s=2 * place.start_s)
        self._place = place
        self._count = 0
        self._connected_here = False
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises BackendUnavailableError: no Ray, no cluster, or no node that has the resources."""
        try:
            import ray
        except ImportError as error:
            raise BackendUnavailableError(
                f"Ray is not installed ({error}); pip install 'megacomposer[ray]'"
            ) from error
        if not ray.is_initialized():
            try:
                await asyncio.to_thread(ray.init, address=self._place.address, log_to_driver=False)
            except ConnectionError as error:
                raise BackendUnavailableError(f"no Ray cluster: {error}") from error
            self._connected_here = True
        await self._staff_nodes()
        if not self.workers:
            wanted = {"CPU": self._place.num_cpus, **self._place.resources}
            await self.close()
            raise BackendUnavailableError(f"no node of the Ray cluster has {wanted}")
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        import ray

        while True:
            await asyncio.sleep(self._place.poll_s)
            try:
                await self._staff_nodes()
            except (ray.exceptions.RayError, OSError) as error:
                _LOG.warning("the Ray cluster does not answer: %s", error)

    async def _staff_nodes(self) -> None:
        """Let go of actors on nodes that are gone, and start those that are missing."""
        import ray

        nodes = await asyncio.to_thread(ray.nodes)
        alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
        for worker in list(self._workers.values()):
            if worker.place not in alive:
                _LOG.warning("node %s is gone, and worker %s with it", worker.place, worker.name)
                await self.lost(worker)
        missing = []
        wanted = {"CPU": self._place.num_cpus, **self._place.resources}
        for node, has in alive.items():
            room = [int(has.get(name, 0.0) // amount) for name, amount in wanted.items() if amount]
            there = sum(worker.place == node for worker in self._workers.values())
            missing += [node] * (min([self._place.workers_per_node, *room]) - there)
        await asyncio.gather(*(self._start_one(node) for node in missing))

    async def _start_one(self, node: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor: Any = (
            ray.remote(_JobActor)
            .options(
                num_cpus=self._place.num_cpus,
                resources=self._place.resources,
                max_concurrency=self._slots + _CONTROL_CALLS,
                max_restarts=0,  # the executor decides what runs again
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        self._count += 1
        worker = _Actor(f"{node[:8]}-{self._count}", node, actor)
        try:
            async with asyncio.timeout(self._place.start_s):
                await actor.ready.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            _LOG.warning("no worker on node %s: %s", node, error or "it took too long")
            await worker.end(now=True)
        else:
            self.add(worker)

    async def lost(self, worker: Worker) -> None:
        """Its neighbours on the same node are asked for a sign of life at once: a retry must not
        go from one dead actor to the next."""
        await super().lost(worker)
        same = [w for w in self._workers.values() if w.place == worker.place]
        for other in same:
            assert isinstance(other, _Actor)
            if not await other.answers():
                await super().lost(other)

    async def close(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().close()
        if self._connected_here:
            import ray

            await asyncio.to_thread(ray.shutdown)


class _JobActor:
    """Runs in a process of the cluster."""

    async def ready(self) -> None:
        return None

    async def call(
        self, load: Callable[[], str | Function], arguments: bytes, timeout_s: float
    ) -> Report:
        return await run_attempt(load, arguments, timeout_s)


class _Actor:
    """The executor's handle of an actor."""

    def __init__(self, name: str, node: str, actor: Any) -> None:
        self.name, self.place, self._actor = name, node, actor
        self._calls: set[Any] = set()

    async def call(self, job: Job) -> Report:
        import ray

        function = job.function
        reference = self._actor.call.remote(
            lambda: function, job.encoded_arguments(), job.timeout_s
        )
        self._calls.add(reference)
        try:
            report = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except ray.exceptions.RayError as error:
            text = str(error).strip().partition("\n")[0]
            raise WorkerLostError(f"worker {self.name}: {text}") from error
        finally:
            self._calls.discard(reference)
        assert isinstance(report, Report)
        return report

    async def answers(self) -> bool:
        import ray

        try:
            async with asyncio.timeout(_END_S):
                await self._actor.ready.remote()
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    async def end(self, *, now: bool) -> None:
        import ray

        calls = list(self._calls)
        if calls and not now:
            for reference in calls:
                ray.cancel(reference)
            endings = [asyncio.ensure_future(_ended(reference)) for reference in calls]
            await asyncio.wait(endings, timeout=_END_S)
        ray.kill(self._actor)


async def _ended(reference: Any) -> None:
    await asyncio.gather(reference, return_exceptions=True)
