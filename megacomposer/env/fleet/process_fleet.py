"""A fleet of processes on this machine, for jobs that compute, or that may take one down."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import sys

from megacomposer.env.fleet.fleet import Fleet, Worker
from megacomposer.env.fleet.job import Job, Report, WorkerLostError
from megacomposer.env.fleet.job_worker import frame, read_frame

_END_S = 10.0


class ProcessFleet(Fleet):
    """`processes` worker processes with `slots_per_process` jobs each; one that dies is replaced.

    A process ends with its executor, also when that is killed.
    """

    def __init__(self, *, processes: int, slots_per_process: int) -> None:
        super().__init__(slots_per_worker=slots_per_process, worker_wait_s=60.0)
        if processes < 1:
            raise ValueError(f"processes is {processes}; give 1 or more")
        self._processes = processes
        self._numbers = itertools.count()
        self._closed = False

    async def start(self) -> None:
        await asyncio.gather(*(self._start_one() for _ in range(self._processes)))

    async def _start_one(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megacomposer.env.fleet.job_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = _Process(f"process-{next(self._numbers)}", process)
        if self._closed:
            await worker.end(now=True)
        else:
            self.add(worker)

    async def lost(self, worker: Worker) -> None:
        known = worker.name in self.workers
        await super().lost(worker)
        if known and not self._closed:
            await self._start_one()

    async def close(self) -> None:
        self._closed = True
        await super().close()


class _Process:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        self.name = self.place = name
        self._process, self._stdin = process, process.stdin
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Report]] = {}
        self._stdin.write(frame(sys.path))
        self._reading = asyncio.create_task(self._read())

    async def call(self, job: Job) -> Report:
        if self._reading.done():
            raise WorkerLostError(f"worker {self.name} has died")
        number = next(self._numbers)
        function = pickle.dumps(job.function)  # apart: the worker must survive an import that fails
        request = frame((number, function, job.encoded_arguments(), job.timeout_s))
        answer: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._stdin.write(request)
            await self._stdin.drain()
            return await answer
        except OSError as error:
            raise WorkerLostError(f"worker {self.name}: {error}") from error
        except asyncio.CancelledError:
            if not self._stdin.is_closing():
                self._stdin.write(frame((number,)))
            raise
        finally:
            del self._calls[number]

    async def _read(self) -> None:
        assert self._process.stdout
        try:
            while True:
                number, report = await read_frame(self._process.stdout)
                call = self._calls.get(number)
                if call and not call.done():  # else it was given up: its result is not wanted
                    call.set_result(report)
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            for call in self._calls.values():
                if not call.done():
                    text = f"worker {self.name} died with exit code {code}"
                    call.set_exception(WorkerLostError(text))

    async def end(self, *, now: bool) -> None:
        if now and self._process.returncode is None:
            self._process.kill()
        self._stdin.close()  # tells it to stop its jobs
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading
