"""What megatron-core calls on `torch.cuda` and a CPU-only process lacks.

Installed once, and only when no accelerator is there. Everything is a no-op or the CPU's own
equivalent: nothing here changes a numerical result.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Stream:
    """A stream on a device that has one implicit queue: every wait is already satisfied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = 0

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


_installed = False


def install_cpu_standin() -> None:
    """Replace the `torch.cuda` calls that megatron-core makes; idempotent.

    Raises:
        RuntimeError: an accelerator is available, so the real functions must stay.
    """
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU stand-in must not replace a real accelerator's functions")
    if _installed:
        return
    stream = _Stream()
    replacements = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 0,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]

    import megatron.core.tensor_parallel.random as core_random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # The tracker that sequence parallelism forks around the layers reads and writes these two.
    core_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    core_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    # 0.16.1 names it in the router's forward without defining it when Transformer Engine is absent.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    _installed = True
