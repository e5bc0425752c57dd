"""What a run reports about itself, and how often."""

from __future__ import annotations

import dataclasses

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObserveConfig(Config):
    log_interval_steps: int = 1
    """Steps between two lines in the log and in metrics.jsonl; the first and last are there too."""
    tensorboard: bool = False
    """Also write every metric as TensorBoard events to `tensorboard/` in the run directory."""
    progress: bool = True
    """Show a progress bar on rank 0 when stderr is a terminal."""
    profile_start_step: int = 10
    """First step to profile, numbered as in metrics.jsonl; the first few allocate and compile."""
    profile_num_steps: int = 0
    """Steps to profile; 0 turns the profiler off."""
    profile_ranks: tuple[int, ...] = (0,)
    """Global ranks that profile. Each writes its own trace; a trace of a large step is large."""

    def __post_init__(self) -> None:
        if self.log_interval_steps < 1:
            raise ValueError(
                f"observe.log_interval_steps is {self.log_interval_steps}; it must be >= 1"
            )
        if self.profile_start_step < 0:
            raise ValueError(
                f"observe.profile_start_step is {self.profile_start_step}; it must be >= 0"
            )
        if self.profile_num_steps < 0:
            raise ValueError(
                f"observe.profile_num_steps is {self.profile_num_steps}; it must be >= 0 (0: off)"
            )
        if self.profile_num_steps and not self.profile_ranks:
            raise ValueError(
                "observe.profile_ranks is empty but profile_num_steps is"
                f" {self.profile_num_steps}; name a rank or set profile_num_steps to 0"
            )
        if any(rank < 0 for rank in self.profile_ranks):
            raise ValueError(f"observe.profile_ranks is {self.profile_ranks}; ranks are >= 0")
