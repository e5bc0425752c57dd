"""`run_distributed`: a function on several gloo ranks, as one call inside a plain pytest test.

    from runner import run_distributed  # pytest's `pythonpath` finds it from every test

    def rank_times_ten(offset):
        return torch.distributed.get_rank() * 10 + offset

    def test_ranks_differ():
        assert run_distributed(rank_times_ten, 2, 1) == [1, 11]

The ranks are spawned, not forked, so each imports the test module anew; a function is found by its
module file and name, and must be defined at the top level of a module. Nothing hangs a test run:
at the timeout every rank that still runs prints its stacks, and exactly those processes are killed.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_POLL_S = 0.02
_GRACE_S = 10.0
"""How long the other ranks may take to fail by themselves after the first one did."""
_LOG_TAIL_LINES = 40
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message has its traceback and the end of its output."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 100.0,
    init_process_group: bool = True,
) -> list[Any]:
    """Calls `fn(*args)` on `world_size` new processes and returns their results in rank order.

    Each rank has one thread (OMP_NUM_THREADS=1), torchrun's variables (RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and a default gloo process group, unless
    `init_process_group` is False because `fn` makes its own. `args` and results are pickled.
    `timeout_s` covers everything, start included, and is below pytest's own 120 s so that a hang
    is reported here.

    Raises RankFailure if any rank raises, dies or is still running at the timeout.
    """
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as folder:
        job = _Job(fn, world_size, args, Path(folder), init_process_group)
        processes = [
            context.Process(target=_rank_main, args=job.for_rank(rank))
            for rank in range(world_size)
        ]
        try:
            with job.spawn_environment():
                for process in processes:
                    process.start()
            reason = _wait(processes, time.monotonic() + timeout_s)
            hung = [r for r, process in enumerate(processes) if process.is_alive()]
            for rank in hung:
                os.kill(processes[rank].pid, signal.SIGUSR2)  # faulthandler prints the stacks
            if hung:
                time.sleep(0.5)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        failure = job.describe_failure([p.exitcode for p in processes], hung, reason)
        if failure:
            raise RankFailure(failure)
        return [job.result(rank) for rank in range(world_size)]


def _wait(processes: list[Any], deadline: float) -> str:
    """Until all ranks ended; or returns early, and why, with the ranks that are left running."""
    failed_at = None
    while any(process.is_alive() for process in processes):
        now = time.monotonic()
        if failed_at is None and any(p.exitcode not in (None, 0) for p in processes):
            failed_at = now
        if now > deadline:
            return "still running at the timeout"
        if failed_at is not None and now > failed_at + _GRACE_S:
            return f"still running {_GRACE_S:.0f} s after another rank had failed"
        time.sleep(_POLL_S)
    return ""


class _Job:
    """One call: what goes to the ranks, and the files in which they leave results and output."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        folder: Path,
        init_process_group: bool,
    ) -> None:
        module = sys.modules[fn.__module__]
        self.name = f"{fn.__module__}.{fn.__qualname__}"
        if "<locals>" in fn.__qualname__ or module.__file__ is None:
            raise ValueError(f"{self.name} must be defined at the top level of a module file")
        self.module = (fn.__module__, module.__file__)
        self.payload = pickle.dumps((fn, args))
        self.world_size = world_size
        self.folder = folder
        self.init_process_group = init_process_group
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def for_rank(self, rank: int) -> tuple[Any, ...]:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        return (rank, self.module, self.payload, self.folder, environment, self.init_process_group)

    def spawn_environment(self) -> _Environment:
        # Read when a child's interpreter and torch start, so it must be there before them.
        return _Environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

    def result(self, rank: int) -> Any:
        return pickle.loads((self.folder / f"{rank}.result").read_bytes())

    def describe_failure(
        self, exit_codes: list[int | None], hung: list[int], hang_reason: str
    ) -> str:
        """The report of all ranks that failed, the first failure first; "" when none did."""
        reports: list[tuple[float, str]] = []
        for rank, code in enumerate(exit_codes):
            error = self.folder / f"{rank}.error"
            if error.exists():
                when, text = error.stat().st_mtime, error.read_text()
                reports.append((when, f"rank {rank} raised:\n{text}{self._output(rank)}"))
            elif rank in hung:
                text = f"rank {rank} was {hang_reason}:\n{self._output(rank)}"
                reports.append((float("inf"), text))
            elif code != 0 or not (self.folder / f"{rank}.result").exists():
                died = f"of {signal.Signals(-code).name}" if code and code < 0 else f"(exit {code})"
                reports.append((0.0, f"rank {rank} died {died}:\n{self._output(rank)}"))
        if not reports:
            return ""
        reports.sort(key=lambda item: item[0])
        head = f"{self.name} failed on {len(reports)} of {self.world_size} ranks"
        return "\n\n".join([head, *(text for _, text in reports)])

    def _output(self, rank: int) -> str:
        log = self.folder / f"{rank}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        if not lines:
            return ""
        return "\n".join(["--- end of its output:", *lines[-_LOG_TAIL_LINES:]])


class _Environment:
    """Sets environment variables inside a `with` block."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)

    def __exit__(self, *exc_info: object) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    rank: int,
    module: tuple[str, str],
    payload: bytes,
    folder: Path,
    environment: dict[str, str],
    init_process_group: bool,
) -> None:
    """The whole life of one rank."""
    # If pytest itself is killed, its `finally` never runs: die with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
    os.environ.update(environment)
    import torch

    from megacomposer.runtime.process import end_process

    torch.set_num_threads(1)
    try:
        if init_process_group:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=int(environment["WORLD_SIZE"]),
                timeout=datetime.timedelta(hours=1),  # the parent's timeout reports better
            )
        _import_file(*module)
        fn, args = pickle.loads(payload)
        result = pickle.dumps(fn(*args))
        partial = folder / f"{rank}.partial"
        partial.write_bytes(result)
        partial.rename(folder / f"{rank}.result")
        if init_process_group:
            torch.distributed.destroy_process_group()
        end_process(0)
    except BaseException:  # noqa: BLE001 - all of them are carried to the parent
        # Written whole before the process ends, so the parent never reads half a traceback.
        partial = folder / f"{rank}.partial"
        partial.write_text(traceback.format_exc())
        partial.rename(folder / f"{rank}.error")
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: teardown of a broken process group may hang or abort.
        os._exit(1)


def _import_file(name: str, file: str) -> None:
    """Makes module `name` importable from `file`: pytest's importlib mode leaves no path to it."""
    if name in sys.modules:
        return
    parents = name.split(".")[:-1]
    for depth in range(len(parents), 0, -1):
        parent = types.ModuleType(".".join(parents[:depth]))
        parent.__path__ = [str(Path(file).parents[len(parents) - depth])]
        sys.modules.setdefault(parent.__name__, parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
