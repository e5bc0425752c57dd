"""Every random number generator of a process as tensors, and back, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy
import torch

_EXTRA = "extra/"


def capture_rng(extra: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The state of Python's, NumPy's and torch's generators (current CUDA device, if any).

    `extra` adds named tensors of the caller's, such as the state of a generator of its own; they
    come back from `restore_rng`. All results are CPU tensors.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    assert kind == "MT19937", kind  # the only kind of NumPy's global generator
    state = {
        "python/words": torch.tensor([version, *words], dtype=torch.int64),
        "python/gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy/words": torch.tensor(
            [*numpy.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64
        ),
        "numpy/gauss": torch.tensor([cached], dtype=torch.float64),
        "torch/cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["torch/cuda"] = torch.cuda.get_rng_state()
    for name, tensor in (extra or {}).items():
        state[_EXTRA + name] = tensor.detach().cpu().clone()
    return state


def restore_rng(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put back what `capture_rng` took and return the `extra` tensors it was given.

    Raises ValueError when the state is of another kind of device, before anything is restored.
    """
    if ("torch/cuda" in state) != torch.cuda.is_available():
        saved, here = ("a CUDA", "none") if "torch/cuda" in state else ("no CUDA", "one")
        raise ValueError(
            f"the random state is of a process with {saved} device and this one has {here}; a run "
            "continues bit for bit only on the same kind of device"
        )
    version, *words = state["python/words"].tolist()
    gauss = state["python/gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *words, position, has_gauss = state["numpy/words"].tolist()
    cached = state["numpy/gauss"].item()
    keys = numpy.array(words, dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", keys, position, has_gauss, cached))
    torch.set_rng_state(state["torch/cpu"])
    if "torch/cuda" in state:
        torch.cuda.set_rng_state(state["torch/cuda"])
    return {
        name.removeprefix(_EXTRA): tensor
        for name, tensor in state.items()
        if name.startswith(_EXTRA)
    }
