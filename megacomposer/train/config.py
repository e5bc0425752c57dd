"""The configuration tree of a training run."""

from __future__ import annotations

import dataclasses

from megacomposer.checkpoint.config import CheckpointConfig
from megacomposer.config import Config
from megacomposer.data.config import DataConfig
from megacomposer.mesh.config import MeshConfig
from megacomposer.model.config import ModelConfig
from megacomposer.observe.config import ObserveConfig
from megacomposer.optim.config import OptimConfig, ScheduleConfig
from megacomposer.optim.schedule import learning_rate
from megacomposer.runtime.config import RuntimeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig(Config):
    num_steps: int
    """Optimizer steps of the whole run; the schedule ends here."""
    micro_batch_size: int
    """Sequences of one forward and backward on one DP rank."""
    global_batch_size: int
    """Sequences of one optimizer step over all ranks."""
    stop_after_steps: int = 0
    """End the process (with a checkpoint) at this step; the schedule is not shortened. 0 is off."""
    eval_interval_steps: int = 0
    """Held-out evaluation each so many steps, and before the first and after the last; 0 is off."""
    eval_sequences: int = 64
    """Held-out sequences of one evaluation; 0 takes all of them."""
    max_skipped_steps: int = 10
    """Consecutive steps with a non-finite gradient that end the run."""
    completion_prompt: str = ""
    """Printed with the model's continuation after the last step; empty prints none."""
    completion_tokens: int = 120
    """Length of that continuation, in tokens."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "micro_batch_size", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be >= 1")
        counts = ("stop_after_steps", "eval_interval_steps", "eval_sequences", "max_skipped_steps")
        for name in (*counts, "completion_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; it must be >= 0")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"train.global_batch_size {self.global_batch_size} is not a multiple of"
                f" train.micro_batch_size {self.micro_batch_size}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    run_dir: str
    """Directory of this run: config, metrics, checkpoints, logs, report. Resumed when it exists."""
    model: ModelConfig
    data: DataConfig
    train: LoopConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        if self.train.eval_interval_steps and self.data.heldout_prefix is None:
            raise ValueError(
                "train.eval_interval_steps needs data.heldout_prefix; set one, or the interval to 0"
            )
        if self.train.completion_prompt and self.mesh.cp > 1:
            raise ValueError(
                f"train.completion_prompt needs mesh.cp 1, and it is {self.mesh.cp}; set"
                " --train.completion_prompt ''"
            )
        if self.optim.qk_clip_threshold and self.model.attention == "gqa" and self.model.qk_norm:
            raise ValueError(
                "optim.qk_clip_threshold is for models without model.qk_norm, which cancels the"
                " clip; set --optim.qk_clip_threshold 0"
            )
        # Raises when the warm-up and the decay do not fit the run.
        learning_rate(self.schedule, self.optim.lr, 0, self.train.num_steps)
