"""The loader of a training run: micro-batches by step, the same for every layout, and resumable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from megacomposer.data.batch import Batch
from megacomposer.data.blend import Blend
from megacomposer.data.config import DataConfig
from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.manifest import check_tokenizer
from megacomposer.data.packing import DocumentStream, PackedDataset, Sample
from megacomposer.data.tokenizer import Tokenizer, load_tokenizer

_ABSENT = "(absent)"


def stack_samples(samples: Sequence[Sample]) -> Batch:
    """One micro-batch: the windows end to end in one row, boundaries shifted accordingly."""
    assert samples
    seq_length = len(samples[0].token_ids)
    boundaries = [np.zeros(1, dtype=np.int32)]
    for k, sample in enumerate(samples):
        boundaries.append(sample.boundaries[1:] + np.int32(k * seq_length))
    names = ("token_ids", "labels", "loss_mask", "position_ids")
    rows = {
        name: torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))
        for name in names
    }
    return Batch(**rows, cu_seqlens=torch.from_numpy(np.concatenate(boundaries)))


class Loader:
    """The micro-batches of one data-parallel rank, step by step.

    A step takes the next `global_batch_size` samples of the blend. Rank r of `dp_size` has the r-th
    contiguous part of them, cut into micro-batches of `micro_batch_size`: so which samples a step
    has, and their order, depends on neither. `consumed_samples` is the whole position.

    With `prefetch` a background thread builds the next step while the caller works on this one; the
    content is the same, and `close()` (or a `with` block) ends the thread. An error in it is raised
    by the `next_step` that would have returned the batch.

    Raises ValueError when the sizes do not divide.
    """

    def __init__(
        self,
        blend: Blend,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        prefetch: bool = False,
    ) -> None:
        _check_rank(dp_rank, dp_size)
        if micro_batch_size < 1 or global_batch_size < 1:
            raise ValueError(
                f"global_batch_size {global_batch_size} and micro_batch_size {micro_batch_size} "
                "must be at least 1"
            )
        if global_batch_size % (micro_batch_size * dp_size):
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
                f"{micro_batch_size} x dp_size {dp_size} = {micro_batch_size * dp_size}"
            )
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples is {consumed_samples}; it starts at 0")
        self.blend = blend
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.consumed_samples = consumed_samples
        self._fingerprint = blend.fingerprint()
        self._executor = ThreadPoolExecutor(1, "data-prefetch") if prefetch else None
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this rank in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def sample_numbers(self) -> range:
        """The blend samples that this rank's next step reads, in order."""
        share = self.global_batch_size // self.dp_size
        start = self.consumed_samples + self.dp_rank * share
        return range(start, start + share)

    def next_step(self) -> list[Batch]:
        """The micro-batches of this rank for the next optimizer step, tensors on the CPU."""
        numbers = self.sample_numbers()
        if self._executor is None:
            batches = self._build(numbers)
        else:
            if self._ahead is None or self._ahead[0] != numbers.start:
                self._cancel()
                self._ahead = (numbers.start, self._executor.submit(self._build, numbers))
            batches = self._ahead[1].result()
            following = range(
                numbers.start + self.global_batch_size, numbers.stop + self.global_batch_size
            )
            self._ahead = (following.start, self._executor.submit(self._build, following))
        self.consumed_samples += self.global_batch_size
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the position, and what must be the same for it to mean the same."""
        return {"consumed_samples": self.consumed_samples, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, at any `dp_size` and batch size.

        Raises ValueError that lists what differs when the data, its order or `seq_length` changed.
        """
        old, new = _flatten(state["fingerprint"]), _flatten(self._fingerprint)
        changes = [
            f"{key}: {old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}"
            for key in dict.fromkeys([*old, *new])
            if old.get(key, _ABSENT) != new.get(key, _ABSENT)
        ]
        if changes:
            raise ValueError(
                "the data is not that of the checkpoint, so its position means nothing: "
                + "; ".join(changes)
                + "; restore the data settings, or start from a checkpoint without data state"
            )
        self._cancel()
        self.consumed_samples = int(state["consumed_samples"])

    def close(self) -> None:
        """End the background thread; without `prefetch` nothing to do. May be called twice."""
        self._cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self, numbers: range) -> list[Batch]:
        size = self.micro_batch_size
        return [
            stack_samples([self.blend.sample(n) for n in numbers[at : at + size]])
            for at in range(0, len(numbers), size)
        ]

    def _cancel(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None


def open_dataset(prefix: str, tokenizer: Tokenizer) -> IndexedDataset:
    """The dataset `prefix`; ValueError when it is missing, damaged, or of another tokenizer."""
    check_tokenizer(prefix, tokenizer.fingerprint())
    return IndexedDataset(prefix)


def build_loader(
    config: DataConfig,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Loader:
    """The loader that `config` describes.

    `tokenizer` None loads `config.tokenizer`. Raises ValueError for data that is missing, damaged,
    or was made with another tokenizer; the held-out data too, so that it fails now and not at the
    first evaluation.
    """
    known = tokenizer if tokenizer is not None else load_tokenizer(config.tokenizer)
    datasets = [
        PackedDataset(open_dataset(source.prefix, known), config.seq_length, config.seed)
        for source in config.sources
    ]
    if config.heldout_prefix is not None:
        open_dataset(config.heldout_prefix, known)
    return Loader(
        Blend(datasets, [source.weight for source in config.sources]),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        consumed_samples=consumed_samples,
        prefetch=config.prefetch,
    )


def heldout_batches(
    dataset: IndexedDataset,
    *,
    seq_length: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    max_windows: int | None = None,
) -> Iterator[Batch]:
    """The held-out documents in file order, packed; equally many micro-batches on every rank.

    The last window is padded, and windows that only fill up a micro-batch or a rank are padding as
    a whole: `loss_mask` False and token 0. So over all ranks each non-first token of each document
    is predicted exactly once, and the mean loss is the sum over ranks divided by the summed mask.
    `max_windows` takes only so many windows from the start. Raises ValueError for an empty dataset.
    """
    _check_rank(dp_rank, dp_size)
    if not dataset.total_tokens:
        raise ValueError(f"held-out dataset {dataset.prefix} has no tokens")
    stream = DocumentStream(dataset, np.arange(len(dataset)))
    windows = -(-stream.total_tokens // seq_length)
    if max_windows is not None:
        windows = min(windows, max_windows)
    padding = stream.total_tokens  # a window from here on is padding as a whole
    per_rank = -(-windows // (micro_batch_size * dp_size))
    first = dp_rank * per_rank * micro_batch_size
    for at in range(first, first + per_rank * micro_batch_size, micro_batch_size):
        numbers = range(at, at + micro_batch_size)
        starts = [n * seq_length if n < windows else padding for n in numbers]
        yield stack_samples([stream.window(start, seq_length) for start in starts])


def _check_rank(dp_rank: int, dp_size: int) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank} is not in [0, dp_size {dp_size})")


def _flatten(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = [(f"{where}.{key}" if where else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{where}[{k}]", item) for k, item in enumerate(value)]
    else:
        return {where: value}
    return {key: leaf for path, item in items for key, leaf in _flatten(item, path).items()}
