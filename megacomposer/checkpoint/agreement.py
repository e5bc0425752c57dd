"""Steps that every rank takes and that fail on every rank when they fail on one.

Without this, one rank with a full disk raises while the others wait in the next collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .manifest import CorruptCheckpointError

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """Saving or loading failed for a reason outside the program, such as a full disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that save or load together."""

    group: dist.ProcessGroup | None = None
    """None is the world, or this process alone when torch.distributed is not initialised."""

    @property
    def is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        return dist.get_rank(self.group) if self.is_distributed else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if self.is_distributed else 1

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, action: Callable[[], T]) -> list[T]:
        """Run `action` everywhere and return every rank's result on every rank. Collective.

        `action` must hold no collective. Where it raises OSError or ValueError on any rank, all
        ranks raise one error with the messages of all: CorruptCheckpointError if there is one among
        them, else ValueError if all are, else CheckpointError.
        """
        result: T | None = None
        failure: OSError | ValueError | None = None
        try:
            result = action()
        except (OSError, ValueError) as error:
            failure = error
        outcomes = self.gather((result, failure))
        failures = [(rank, outcome[1]) for rank, outcome in enumerate(outcomes) if outcome[1]]
        if failures:
            raise _merge(failures, self.size) from failure
        return [outcome[0] for outcome in outcomes]

    def first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 alone; its result, or its error, on every rank. Collective."""
        results = self.each(lambda: action() if self.rank == 0 else None)
        return cast(T, results[0])


def _merge(failures: list[tuple[int, Exception]], size: int) -> CheckpointError | ValueError:
    ranks_by_message: dict[str, list[int]] = {}
    for rank, error in failures:
        ranks_by_message.setdefault(str(error), []).append(rank)
    messages = [
        # The whole world agreeing, or a world of one, needs no rank numbers.
        message if len(ranks) == size else f"rank {', '.join(map(str, ranks))}: {message}"
        for message, ranks in ranks_by_message.items()
    ]
    text = "; ".join(messages)
    if any(isinstance(error, CorruptCheckpointError) for _, error in failures):
        return CorruptCheckpointError(text)
    if all(isinstance(error, ValueError) for _, error in failures):
        return ValueError(text)
    return CheckpointError(text)
