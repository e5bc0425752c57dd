"""Executor: many independent jobs on a fleet, each with exactly one result.

    async with Executor(LocalFleet(slots=8), journal=run / "jobs.jsonl") as executor:
        async for result in executor.run(jobs):
            ...

Infrastructure that fails (SandboxError, a dead process or machine) is tried again elsewhere, and
in the end reported as that; it never looks like a result of the task.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sized
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from megacomposer.config import Config
from megacomposer.env.fleet.fleet import Fleet, Worker
from megacomposer.env.fleet.job import Job, JobResult, Outcome, Report, WorkerLostError
from megacomposer.env.fleet.job_journal import JobJournal

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryPolicy(Config):
    """What happens when infrastructure fails."""

    attempts: int = 3
    """Of one job, the first included."""
    pause_s: float = 0.5
    """Before the second attempt; doubled before each further one."""
    pause_limit_s: float = 10.0
    hang_s: float = 60.0
    """A worker that has not answered so long after a job's `timeout_s` is taken for dead."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; give 1 or more")


class Executor:
    """Runs jobs on `fleet`, as many at once as it has places.

    With `journal`, a file, results are on disk before they are given out, and an executor that is
    started again with the same jobs runs only what has no final result; `recorded` has the others.
    """

    def __init__(
        self, fleet: Fleet, *, journal: Path | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self._fleet = fleet
        self._retry = retry or RetryPolicy()
        self._journal = JobJournal(journal) if journal else None
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self._tasks: dict[str, asyncio.Task[JobResult]] = {}
        self._stoppable: set[str] = set()
        self._cancelled: set[str] = set()
        self._left = self._running = self._retried = self._skipped = 0
        self._ended = dict.fromkeys(Outcome, 0)
        self._draining = False

    @property
    def recorded(self) -> dict[str, JobResult]:
        """Final results in the journal, those of earlier runs included, by job."""
        return dict(self._journal.results) if self._journal else {}

    def metrics(self) -> dict[str, int]:
        """Counts of jobs, for metrics.jsonl: queued (waiting for a slot, or between attempts) and
        running now; since the start retried (attempts after the first), skipped (by the journal),
        and one for each Outcome."""
        # a task that is done is counted by its outcome, though its callback may not have run yet
        unfinished = sum(not task.done() for task in self._tasks.values())
        counts = {
            "queued": self._left + unfinished - self._running,
            "running": self._running,
            "retried": self._retried,
            "skipped": self._skipped,
            **{outcome.value: count for outcome, count in self._ended.items()},
        }
        return {f"rollout/jobs/{name}": count for name, count in counts.items()}

    async def start(self) -> None:
        await self._fleet.start()

    async def run(self, jobs: Iterable[Job]) -> AsyncIterator[JobResult]:
        """Results as they come. Jobs are taken from `jobs` when there is room for them.

        Leaving the loop early stops what runs; use `contextlib.aclosing` then. Raises ValueError
        for an id that comes twice or is of another job in the journal.
        """
        left = len(jobs) if isinstance(jobs, Sized) else 0
        self._left += left
        source, seen = iter(jobs), set[str]()
        mine: set[asyncio.Task[JobResult]] = set()
        more = True
        try:
            while True:
                while more and not self._draining and len(mine) < max(1, self._fleet.capacity):
                    job = next(source, None)
                    if job is None:
                        more = False
                        break
                    if left > 0:
                        left, self._left = left - 1, self._left - 1
                    if task := self._begin(job, seen):
                        mine.add(task)
                if not mine:
                    return
                done, mine = await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            self._left -= left
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)

    def _begin(self, job: Job, seen: set[str]) -> asyncio.Task[JobResult] | None:
        """None: the journal has its result."""
        if job.id in seen or job.id in self._tasks:
            raise ValueError(f"job id {job.id!r} comes twice; ids must be unique")
        seen.add(job.id)
        if self._journal and self._journal.has(job):
            self._skipped += 1
            return None
        task = asyncio.create_task(self._complete(job))
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id))
        return task

    def cancel(self, job_id: str) -> None:
        """Stop a job, or keep it from starting; its result is CANCELLED, unless it has ended."""
        self._cancelled.add(job_id)
        if job_id in self._stoppable:
            self._tasks[job_id].cancel()

    def drain(self) -> None:
        """Start no more jobs; `run` ends when those that run have ended."""
        self._draining = True

    async def close(self) -> None:
        """Stop all jobs and the fleet. Jobs without a result run again next time."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._fleet.close()
        if self._journal:
            self._journal.close()
            self._journal = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # One job -------------------------------------------------------------------------------------

    async def _complete(self, job: Job) -> JobResult:
        """Attempts until there is a result, which is on disk before anyone is told."""
        self._stoppable.add(job.id)
        try:
            if job.id in self._cancelled:
                raise asyncio.CancelledError
            result = await self._attempts(job)
        except asyncio.CancelledError:
            if job.id not in self._cancelled:
                raise
            result = JobResult(id=job.id, outcome=Outcome.CANCELLED)
        finally:
            self._stoppable.discard(job.id)
        if self._journal:
            write = asyncio.create_task(self._write(self._journal, job, result))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)
            await asyncio.shield(write)  # a line that was begun is finished
        self._ended[result.outcome] += 1
        return result

    async def _write(self, journal: JobJournal, job: Job, result: JobResult) -> None:
        async with self._writing:
            await asyncio.to_thread(journal.append, job, result)

    async def _attempts(self, job: Job) -> JobResult:
        tried: list[Worker] = []
        name, began = "", time.monotonic()
        for attempt in range(1, self._retry.attempts + 1):
            if attempt > 1:
                self._retried += 1
                pause_s = self._retry.pause_s * 2 ** (attempt - 2)
                await asyncio.sleep(min(pause_s, self._retry.pause_limit_s))
            try:
                worker = await self._fleet.acquire(tried)
                name, began = worker.name, time.monotonic()
                tried.append(worker)
                report = await self._attempt(worker, job)
            except WorkerLostError as error:
                report = Report(outcome=Outcome.INFRASTRUCTURE, error=str(error))
            if report.outcome is not Outcome.INFRASTRUCTURE:
                break
            reason = report.error.strip().rpartition("\n")[2]
            _LOG.warning("job %s, attempt %d on %s: %s", job.id, attempt, name or "?", reason)
        return JobResult(
            id=job.id,
            outcome=report.outcome,
            value=msgspec.json.decode(report.value),
            error=report.error,
            attempts=attempt,
            worker=name,
            wall_s=time.monotonic() - began,
        )

    async def _attempt(self, worker: Worker, job: Job) -> Report:
        """Raises WorkerLostError, after the worker was taken out: an attempt that was given up can
        send no second result."""
        self._running += 1
        try:
            async with asyncio.timeout(job.timeout_s + self._retry.hang_s):
                return await worker.call(job)
        except TimeoutError:
            await self._fleet.lost(worker)
            raise WorkerLostError(f"worker {worker.name} does not answer") from None
        except WorkerLostError:
            await self._fleet.lost(worker)
            raise
        finally:
            self._running -= 1
            self._fleet.release(worker)
