"""Start and end of a process: device, process group, seeds, and what is left behind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from megacomposer.runtime.config import RuntimeConfig
from megacomposer.runtime.cpu_standin import install_cpu_standin
from megacomposer.runtime.process import seed_everything, set_determinism, start_process
from runner import run_distributed

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")


def job_of_one() -> dict[str, Any]:
    """Two starts one after the other without torchrun's variables, and what each one sees."""
    from megatron.core import parallel_state

    from megacomposer.mesh.config import MeshConfig
    from megacomposer.mesh.layout import Layout

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    seen: dict[str, Any] = {"places": []}
    for _ in range(2):
        with start_process(RuntimeConfig(seed=5, collective_timeout_s=30.0)) as process:
            value = torch.tensor(3.0)
            torch.distributed.all_reduce(value)
            place = (process.rank, process.world_size, process.local_rank, str(process.device))
            seen["places"].append((*place, process.is_main, float(value)))
            seen["backend"] = torch.distributed.get_backend()
            seen["seed"] = torch.initial_seed()
            layout = Layout(MeshConfig(), world_size=1, rank=0, device_type="cpu")
            layout.start()
            seen["tp_ranks"] = torch.distributed.get_process_group_ranks(layout.tp_group)
        seen["group_left"] = torch.distributed.is_initialized()
        seen["core_left"] = parallel_state.model_parallel_is_initialized()
    seen["current_device"] = str(torch.cuda.current_device())
    try:
        with start_process(RuntimeConfig(seed=5)):
            raise KeyError("inside")
    except KeyError:
        seen["group_left_by_error"] = torch.distributed.is_initialized()
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_distributed(job_of_one, 1, init_process_group=False, timeout_s=400.0)[0]


@WITHOUT_CUDA
def test_job_of_one_needs_a_launcher(seen: dict[str, Any]) -> None:
    assert seen["places"] == [(0, 1, 0, "cpu", True, 3.0)] * 2
    assert seen["backend"] == "gloo"
    assert seen["seed"] == 5
    assert seen["tp_ranks"] == [0]
    assert seen["current_device"] == "cpu"


@WITHOUT_CUDA
def test_end_of_a_process_leaves_its_groups_behind(seen: dict[str, Any]) -> None:
    assert not seen["group_left"]
    assert not seen["core_left"]
    assert not seen["group_left_by_error"]


@WITHOUT_CUDA
def test_cuda_without_a_device_falls_back_to_the_cpu() -> None:
    refusal = pytest.raises(ValueError, match="runtime.device is 'cuda' but torch sees no CUDA")
    with refusal, start_process(RuntimeConfig(device="cuda")):
        pass
    assert not torch.distributed.is_initialized()


def test_cpu_run_takes_the_devices_of_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refusal = pytest.raises(ValueError, match=r"'cpu' but torch sees .* CUDA_VISIBLE_DEVICES=''")
    with refusal, start_process(RuntimeConfig(device="cpu")):
        pass
    assert not torch.distributed.is_initialized()


def test_more_ranks_than_devices_share_one_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    refusal = pytest.raises(ValueError, match="local rank 2 has no GPU of its own: torch sees 2")
    with refusal, start_process(RuntimeConfig()):
        pass


def test_stand_in_replaces_a_real_accelerators_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="must not replace a real accelerator"):
        install_cpu_standin()
    assert torch.cuda.current_device is before


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_seed_leaves_a_generator_out() -> None:
    # NumPy takes 32 bits, Python and torch more.
    for seed in (0, 1234, 2**40 + 1):
        seed_everything(seed)
        first = draws()
        seed_everything(seed)
        assert draws() == first
        seed_everything(seed + 1)
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_determinism_is_not_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    try:
        set_determinism(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        set_determinism(False)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", -1, r"runtime\.seed is -1; it must be >= 0"),
        ("collective_timeout_s", 0.0, r"runtime\.collective_timeout_s is 0\.0"),
    ],
)
def test_impossible_runtime_is_accepted(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeConfig(**{field: value})  # type: ignore[arg-type]


def test_the_end_of_a_process_loses_neither_output_nor_exit_handlers_nor_its_code() -> None:
    code = """
import atexit, sys
from megacomposer.runtime.process import end_process
atexit.register(lambda: print("handler", flush=True))
sys.stdout.write("unflushed ")
end_process(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (3, "unflushed handler\n")


def test_an_error_waits_for_what_python_would_wait_for() -> None:
    code = """
import threading, time
from megacomposer.runtime.process import end_process_on_error
end_process_on_error()
threading.Thread(target=time.sleep, args=(600,)).start()
raise KeyError("what went wrong")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("KeyError: 'what went wrong'\n")
