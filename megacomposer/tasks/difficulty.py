"""How hard a task is, from what happened on it, and which tasks to draw next.

    sampler = TaskSampler(DifficultyConfig(), {task.id: effort_estimate(task) for task in tasks})
    for id in sampler.draw(step, 8): ...
    sampler.record(id, passes=3, rollouts=8, turns=41.0, thinking_tokens=5200.0)
    sampler.save(path)

Composer's reports say that later stages take more of the harder data, by the number of turns and
of thinking tokens, that tasks are selected dynamically through the run, and that no prompt is
trained on twice. How exactly they do not say: every constant here is our choice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from megacomposer.config import Config
from megacomposer.env.task import Task

_FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DifficultyConfig(Config):
    """Which tasks are drawn. All constants are our choice: none is published."""

    seed: int = 0
    """With the step, fixes each draw."""
    single_epoch: bool = False
    """No task is drawn twice, as Composer trains; difficulty then only orders untried tasks, by
    estimate."""
    window_groups: int = 8
    """Groups of rollouts that the pass rate is taken from, newest first; 0: all."""
    prior_passes: float = 0.5
    """Passes that each task is credited with at first (alpha of the Beta prior)."""
    prior_failures: float = 0.5
    """Failures that each task is charged with at first (beta of the Beta prior)."""
    peak_pass_frac: float = 0.4
    """Pass rate at which a task is drawn most. Under one half, since the policy gets better."""
    sharpness: float = 2.0
    """How fast the weight falls beside the peak; 0 draws all tasks alike."""
    floor_weight: float = 0.05
    """Least weight of an active task, relative to 1 at the peak; never-solved tasks keep it."""
    untried_weight: float = 1.0
    """Weight of a task before its first group."""
    retire_pass_frac: float = 0.9
    """Pass rate of each of the last `retire_groups` groups from which a task is retired."""
    retire_groups: int = 2
    """Groups in a row for that."""
    revisit_frac: float = 0.02
    """Share of draws that goes to retired tasks, to see whether they are still solved."""
    curriculum_start_step: int = 0
    """From here on, tasks that take more turns and thinking tokens are drawn more."""
    curriculum_end_step: int = 0
    """Here that has its full strength; equal to the start: it is off."""
    curriculum_strength: float = 1.5
    """Logarithm of the ratio in which the most and the least effortful task are drawn, at the end,
    other things equal."""

    def __post_init__(self) -> None:
        for name in ("prior_passes", "prior_failures", "floor_weight", "untried_weight"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0 and finite")
        if not 0.0 < self.peak_pass_frac < 1.0:
            raise ValueError(f"peak_pass_frac is {self.peak_pass_frac}; it must be in (0, 1)")
        if not 0.0 <= self.revisit_frac < 1.0:
            raise ValueError(f"revisit_frac is {self.revisit_frac}; it must be in [0, 1)")
        if self.window_groups < 0 or self.retire_groups < 1 or self.sharpness < 0.0:
            raise ValueError("window_groups and sharpness must be >= 0, retire_groups >= 1")
        if self.window_groups and self.retire_groups > self.window_groups:
            raise ValueError(
                f"retire_groups {self.retire_groups} is more than window_groups"
                f" {self.window_groups}"
            )
        if self.curriculum_end_step < self.curriculum_start_step:
            raise ValueError("curriculum_end_step must not be before curriculum_start_step")


class TaskRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is known about one task."""

    estimate: float = 0.0
    """Effort as guessed from the task itself, in any unit that orders tasks."""
    groups: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(passes, rollouts) of the last groups, oldest first."""
    passes: int = 0
    rollouts: int = 0
    """Both since the start."""
    turns: float = 0.0
    """Mean over all rollouts."""
    thinking_tokens: float = 0.0
    draws: int = 0
    retired: bool = False


class _State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: int
    draws: int
    revisits: int
    tasks: dict[str, TaskRecord]


class TaskSampler:
    """Draws task ids. Its draws follow from the config, the step, and what was recorded before.

    `tasks` is id -> estimated effort (`effort_estimate`).
    """

    def __init__(self, config: DifficultyConfig, tasks: Mapping[str, float]) -> None:
        self.config = config
        self._tasks: dict[str, TaskRecord] = {}
        self._draws = self._revisits = 0
        for id, estimate in tasks.items():
            self.add(id, estimate)

    def add(self, id: str, estimate: float = 0.0) -> None:
        """A new task, such as one made while training runs. A known id keeps what is known."""
        if not math.isfinite(estimate):
            raise ValueError(f"the estimate of task {id} is {estimate}; it must be finite")
        if id not in self._tasks:
            self._tasks[id] = TaskRecord(estimate=estimate)

    def known(self, id: str) -> TaskRecord:
        """A copy of the record. KeyError for an unknown id."""
        return msgspec.convert(msgspec.to_builtins(self._tasks[id]), TaskRecord)

    def pass_frac(self, id: str) -> float:
        """Posterior mean of the task's pass rate over the window."""
        record, config = self._tasks[id], self.config
        passes = sum(group[0] for group in record.groups)
        rollouts = sum(group[1] for group in record.groups)
        prior = config.prior_passes + config.prior_failures
        return (passes + config.prior_passes) / (rollouts + prior)

    def weights(self, step: int) -> dict[str, float]:
        """What each task that may be drawn weighs at `step`; retired ones share `revisit_frac`."""
        allowed = {
            id: record
            for id, record in self._tasks.items()
            if not (self.config.single_epoch and record.draws)
        }
        active = {id: record for id, record in allowed.items() if not record.retired}
        efforts = self._effort_ranks(active)
        lean = self.config.curriculum_strength * self._curriculum(step)
        weights = {
            id: self._weight(id, record) * math.exp(lean * (efforts[id] - 0.5))
            for id, record in active.items()
        }
        retired = [id for id, record in allowed.items() if record.retired]
        share = self.config.revisit_frac
        if retired and share:
            total = math.fsum(weights.values())
            each = total * share / (1.0 - share) / len(retired) if weights else 1.0
            weights.update(dict.fromkeys(retired, each))
        return weights

    def draw(self, step: int, count: int) -> tuple[str, ...]:
        """`count` different tasks for `step`, likelier ones first; fewer where no more are left.

        By weight, without replacement (Efraimidis and Spirakis 2006), from a hash of seed, step and
        id: neither the order of tasks nor earlier draws matter.
        """
        if count < 1:
            raise ValueError(f"count is {count}; it must be >= 1")
        keys = {
            id: -math.log(self._uniform(step, id)) / weight
            for id, weight in self.weights(step).items()
        }
        chosen = tuple(sorted(keys, key=lambda id: (keys[id], id))[:count])
        for id in chosen:
            self._tasks[id].draws += 1
            self._draws += 1
            self._revisits += self._tasks[id].retired
        return chosen

    def record(
        self, id: str, *, passes: int, rollouts: int, turns: float, thinking_tokens: float
    ) -> None:
        """A finished group on the task; `turns` and `thinking_tokens` are means over its rollouts.

        Leave out rollouts that the infrastructure failed. KeyError for an unknown id, ValueError
        for counts that cannot be.
        """
        if not 0 <= passes <= rollouts or rollouts < 1:
            raise ValueError(f"task {id}: {passes} passes of {rollouts} rollouts cannot be")
        if not (math.isfinite(turns) and math.isfinite(thinking_tokens)):
            raise ValueError(f"task {id}: turns and thinking_tokens must be finite")
        record, config = self._tasks[id], self.config
        before, record.rollouts = record.rollouts, record.rollouts + rollouts
        record.passes += passes
        share = rollouts / (before + rollouts)
        record.turns += share * (turns - record.turns)
        record.thinking_tokens += share * (thinking_tokens - record.thinking_tokens)
        record.groups.append((passes, rollouts))
        if config.window_groups:
            del record.groups[: -config.window_groups]
        last = record.groups[-config.retire_groups :]
        solved = [passed / of >= config.retire_pass_frac for passed, of in last]
        if record.retired:
            record.retired = solved[-1]  # one bad revisit brings it back
        else:
            record.retired = len(solved) == config.retire_groups and all(solved)

    def metrics(self) -> dict[str, float]:
        """The `data/task...` metrics."""
        active = [id for id, record in self._tasks.items() if not record.retired]
        unsolved = sum(r.rollouts > 0 and not r.passes for r in self._tasks.values())
        rates = [self.pass_frac(id) for id in active]
        return {
            "data/tasks_active": float(len(active)),
            "data/tasks_retired": float(len(self._tasks) - len(active)),
            "data/tasks_unsolved": float(unsolved),
            "data/task_pass_frac_mean": math.fsum(rates) / len(rates) if rates else 0.0,
            "data/task_draws": float(self._draws),
            "data/task_revisits": float(self._revisits),
        }

    def save(self, path: Path) -> None:
        """Write the state as JSON, all or nothing."""
        state = _State(
            format=_FORMAT, draws=self._draws, revisits=self._revisits, tasks=self._tasks
        )
        partial = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(msgspec.to_builtins(state), sort_keys=True, allow_nan=False))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    @classmethod
    def load(cls, config: DifficultyConfig, path: Path) -> TaskSampler:
        """The sampler that `save` wrote. ValueError names the file and what is wrong with it."""
        try:
            state = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), _State)
        except OSError as error:
            raise ValueError(f"cannot read sampler state {path}: {error.strerror}") from error
        except (msgspec.ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"sampler state {path}: {error}") from error
        if state.format != _FORMAT:
            raise ValueError(f"sampler state {path}: format {state.format}, expected {_FORMAT}")
        sampler = cls(config, {})
        sampler._tasks, sampler._draws = state.tasks, state.draws
        sampler._revisits = state.revisits
        return sampler

    # Weights.

    def _weight(self, id: str, record: TaskRecord) -> float:
        config = self.config
        if not record.rollouts:
            return config.untried_weight
        if not record.passes:
            return config.floor_weight
        rate, peak = self.pass_frac(id), config.peak_pass_frac
        # The Beta density with its mode at the peak, and 1 there.
        log_weight = peak * math.log(rate / peak)
        log_weight += (1.0 - peak) * math.log((1.0 - rate) / (1.0 - peak))
        return max(config.floor_weight, math.exp(config.sharpness * log_weight))

    def _curriculum(self, step: int) -> float:
        """0 before the curriculum starts, 1 when it has its full strength."""
        start, end = self.config.curriculum_start_step, self.config.curriculum_end_step
        if end == start:
            return 0.0
        return min(max((step - start) / (end - start), 0.0), 1.0)

    def _effort_ranks(self, records: Mapping[str, TaskRecord]) -> dict[str, float]:
        """Rank of each task's effort in [0, 1]: of turns and thinking tokens, else of estimates."""
        tried = {id: r for id, r in records.items() if r.rollouts}
        guessed = _ranks({id: record.estimate for id, record in records.items()})
        turns = _ranks({id: record.turns for id, record in tried.items()})
        tokens = _ranks({id: record.thinking_tokens for id, record in tried.items()})
        return {id: (turns[id] + tokens[id]) / 2 if id in tried else guessed[id] for id in records}

    def _uniform(self, step: int, id: str) -> float:
        """In (0, 1), from seed, step and id."""
        text = f"{self.config.seed}/{step}/{id}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        return ((number >> 11) + 0.5) / (1 << 53)


def _ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Each value's rank over the largest rank, ties shared; 0.5 where all are equal."""
    ordered = sorted(set(values.values()))
    if len(ordered) < 2:
        return dict.fromkeys(values, 0.5)
    place = {value: index / (len(ordered) - 1) for index, value in enumerate(ordered)}
    return {id: place[value] for id, value in values.items()}


def effort_estimate(task: Task) -> float:
    """Effort from what is known when a task is made: lines, files and tests, each by its logarithm.

    Orders tasks before anyone has tried them; the unit means nothing.
    """
    names: Iterable[str] = ("deleted_lines", "changed_lines", "files", "edited_files", "symbols")
    sizes = [task.difficulty.get(name, 0.0) for name in (*names, "target_tests")]
    return math.fsum(math.log1p(max(size, 0.0)) for size in sizes)
