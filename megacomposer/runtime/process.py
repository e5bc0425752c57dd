"""Start and end of one rank's process: device, process group, seeds."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import os
import random
import sys
import types
from collections.abc import Iterator
from typing import NoReturn

import numpy
import torch

from megacomposer.runtime.config import RuntimeConfig
from megacomposer.runtime.core_warnings import silence_core_warnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """This rank's place in the job and the device it computes on."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def start_process(config: RuntimeConfig) -> Iterator[Process]:
    """Join the job that torchrun describes in the environment (or be a job of one) until exit.

    Raises:
        ValueError: a CUDA device was asked for and is not there, or the CPU and one is; or there
            are fewer devices than ranks.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = _choose_device(config, local_rank)
    silence_core_warnings()
    if device.type == "cpu":
        from megacomposer.runtime.cpu_standin import install_cpu_standin

        install_cpu_standin()
    seed_everything(config.seed)
    set_determinism(config.deterministic)
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    # gloo beside NCCL: checkpoint plans and small host tensors travel without touching the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(
            backend, store=store, rank=0, world_size=1, timeout=timeout
        )
    failed = True
    try:
        yield Process(rank=rank, world_size=world_size, local_rank=local_rank, device=device)
        failed = False
    finally:
        # NCCL's teardown waits for the other ranks: one that failed alone would hang in it, its
        # error unsaid. Such a process is about to end, which is teardown enough.
        if not (failed and device.type == "cuda" and world_size > 1):
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Leave with `code`, exit handlers run and output flushed, but Python not torn down.

    A gloo thread that drops its last tensor while the interpreter is being torn down aborts the
    process (pytorch #179291; about one end of a rank in a hundred, seen with torch 2.13): a run
    that did all of its work would then exit with SIGABRT.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_process_on_error() -> None:
    """From now on, an error that nobody handles ends the process as soon as it is printed.

    Python's own teardown aborts the communicators of NCCL, which may wait for ranks that wait for
    this one: the job would hang until the collective timeout instead of ending with the error.
    """

    def print_and_end(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        end_process(130 if kind is KeyboardInterrupt else 1)

    sys.excepthook = print_and_end


def _choose_device(config: RuntimeConfig, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError(
            "runtime.device is 'cuda' but torch sees no CUDA device; use --runtime.device auto"
        )
    if config.device == "cpu" and available:
        # megatron-core asks torch.cuda for its device, and would mix the two.
        raise ValueError(
            "runtime.device is 'cpu' but torch sees a CUDA device; hide it from the process with"
            " CUDA_VISIBLE_DEVICES=''"
        )
    if not available:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU of its own: torch sees"
            f" {torch.cuda.device_count()}; lower --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (CPU and CUDA) with the same value on every rank."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def set_determinism(enabled: bool) -> None:
    """Make torch refuse operations whose result may change between two equal runs."""
    torch.use_deterministic_algorithms(enabled)
    # Filling every torch.empty costs a pass over memory and hides no read of ours: tests poison.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
