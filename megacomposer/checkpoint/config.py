"""What a run saves, how often, and what it starts from. No torch here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Config):
    """Settings of the native checkpoints under `<run_dir>/checkpoints`."""

    save_interval_steps: int = 500
    """Optimizer steps between two checkpoints; 0 saves only after the last step."""
    save_final: bool = True
    """Save after the last step; a benchmark that throws its weights away turns it off."""
    keep_last: int = 3
    """How many checkpoints stay on disk, the newest ones; 0 keeps every one."""
    load_from: Path | None = None
    """Start a new run from this: a `step_*` directory, or a run directory (its newest checkpoint).

    A run that has checkpoints of its own continues from the newest of those instead. None starts
    with fresh weights.
    """
    load_model_only: bool = False
    """Take only the weights from `load_from`: fresh moments, step 0, a fresh data position."""
    skip_corrupt: bool = False
    """Step back to an older checkpoint, with a warning, when the newest one is damaged.

    False refuses and names the damaged file, so that nobody repeats steps without knowing it.
    """

    def __post_init__(self) -> None:
        for name in ("save_interval_steps", "keep_last"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"checkpoint.{name} is {getattr(self, name)}; it must be 0 or more"
                )
        if self.load_model_only and self.load_from is None:
            raise ValueError(
                "checkpoint.load_model_only needs checkpoint.load_from; name the checkpoint or run "
                "directory to take the weights from"
            )
