"""Configuration of the process: device, seed, determinism."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Config):
    seed: int = 1234
    """Seeds parameter initialisation and every random generator."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU of the local rank when there is one, else the CPU. `cuda` and `cpu`
    refuse to start where that is not what `auto` would take."""
    deterministic: bool = True
    """Ask torch for deterministic algorithms; an operation without one is an error."""
    collective_timeout_s: float = 1800.0
    """A collective that waits longer than this ends the run on every rank."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"runtime.seed is {self.seed}; it must be >= 0")
        if self.collective_timeout_s <= 0:
            raise ValueError(
                f"runtime.collective_timeout_s is {self.collective_timeout_s}; it must be > 0"
            )
