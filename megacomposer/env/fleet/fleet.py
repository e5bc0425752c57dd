"""A fleet: workers with places for jobs. Who has a free one, who is lost, who comes anew."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from megacomposer.env.fleet.job import Job, Report, WorkerLostError, run_attempt


class Worker(Protocol):
    """Runs several attempts at once."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """What it shares its fate with: a machine. A second attempt goes to another place."""
        ...

    async def call(self, job: Job) -> Report:
        """Raises WorkerLostError. When it is cancelled, the job is stopped."""
        ...

    async def end(self, *, now: bool) -> None:
        """Stop it with all its jobs; `now`: it may hang, or be gone already."""
        ...


class Fleet:
    """Keeps count of the free slots of its workers; subclasses start them and replace lost ones.

    `worker_wait_s`: how long a job waits where there is no worker at all.
    """

    def __init__(self, *, slots_per_worker: int, worker_wait_s: float) -> None:
        if slots_per_worker < 1:
            raise ValueError(f"slots_per_worker is {slots_per_worker}; give 1 or more")
        self._slots = slots_per_worker
        self._wait_s = worker_wait_s
        self._used: dict[str, int] = {}
        self._workers: dict[str, Worker] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Raises ValueError or SandboxError where it cannot be used here."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Jobs that can run at once, on the workers that are there now."""
        return self._slots * len(self._workers)

    @property
    def workers(self) -> list[str]:
        return list(self._workers)

    def add(self, worker: Worker) -> None:
        self._workers[worker.name], self._used[worker.name] = worker, 0
        self._notify()

    async def acquire(self, avoid: Collection[Worker] = ()) -> Worker:
        """A slot on the worker with the fewest jobs, elsewhere than `avoid` where there is an
        elsewhere. Raises WorkerLostError where there is no worker for `worker_wait_s`."""
        while not (free := self._free(avoid)):
            changed, alone = self._changed, not self._workers
            try:
                async with asyncio.timeout(self._wait_s if alone else None):
                    await changed.wait()
            except TimeoutError:
                raise WorkerLostError(f"there was no worker for {self._wait_s:g} s") from None
        worker = min(free, key=lambda w: self._used[w.name])
        self._used[worker.name] += 1
        return worker

    def _free(self, avoid: Collection[Worker]) -> list[Worker]:
        names, places = {w.name for w in avoid}, {w.place for w in avoid}
        every = list(self._workers.values())
        elsewhere = [w for w in every if w.place not in places]
        others = [w for w in every if w.name not in names]
        return [w for w in elsewhere or others or every if self._used[w.name] < self._slots]

    def release(self, worker: Worker) -> None:
        if self._workers.get(worker.name) is worker:
            self._used[worker.name] -= 1
            self._notify()

    async def lost(self, worker: Worker) -> None:
        """Take a worker out and end it. Calls that it still has raise WorkerLostError."""
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name], self._used[worker.name]
            self._notify()
            await worker.end(now=True)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        workers = list(self._workers.values())
        self._workers.clear()
        self._used.clear()
        self._notify()
        await asyncio.gather(*(worker.end(now=False) for worker in workers))


class LocalFleet(Fleet):
    """One worker: this process. For jobs that wait more than they compute."""

    def __init__(self, *, slots: int) -> None:
        super().__init__(slots_per_worker=slots, worker_wait_s=0.0)

    async def start(self) -> None:
        self.add(_Here())

    async def lost(self, worker: Worker) -> None:
        """This process cannot be replaced: the job that hangs was cancelled, the others go on."""


class _Here:
    name = place = "local"

    async def call(self, job: Job) -> Report:
        return await run_attempt(lambda: job.function, job.encoded_arguments(), job.timeout_s)

    async def end(self, *, now: bool) -> None:
        """Nothing to end: jobs are cancelled by who called them."""
