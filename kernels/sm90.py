"""The library of CUDA C++ kernels for Hopper, built from csrc/*_sm90.cu, loaded through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

_logger = logging.getLogger(__name__)
_LIBRARY = Path(__file__).with_name("_sm90.so")


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU and the library was built; warns once where only that is
    missing, since what runs instead is slower."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    if _LIBRARY.exists():
        return True
    _logger.warning(
        "csrc/*_sm90.cu are not built: Newton-Schulz and the expert MLP run slower on %s; put nvcc"
        " on PATH and reinstall (pip install -e .)",
        torch.cuda.get_device_name(device),
    )
    return False


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_LIBRARY))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_stream(device: torch.device) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def check(error: int, what: str) -> None:
    """Raises RuntimeError for a code other than 0: a cudaError_t, a CUresult, or -1."""
    if error:
        meaning = "libcuda.so.1 has no cuTensorMapEncodeTiled" if error == -1 else f"CUDA {error}"
        raise RuntimeError(f"{what}: {meaning}")
