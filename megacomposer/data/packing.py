"""Packed sequences: documents laid end to end and cut into windows, with their boundaries kept."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import numpy as np

from megacomposer.data.dedup import splitmix64
from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.manifest import data_fingerprint

_CACHED_EPOCHS = 2  # a global batch may straddle two
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FEISTEL_TURNS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One window of L tokens."""

    token_ids: np.ndarray
    """int64 [L]."""
    labels: np.ndarray
    """int64 [L]: the next token of the same document; 0 where `loss_mask` is False."""
    loss_mask: np.ndarray
    """bool [L]: False for the last token of a document and for padding."""
    position_ids: np.ndarray
    """int64 [L]: restarts at each piece of a document."""
    boundaries: np.ndarray
    """int32 [pieces + 1]: where the pieces start, from 0 to L."""


def document_order(documents: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64 [documents]: the permutation of an epoch.

    A stable sort by a 64-bit hash of (seed, epoch, document). Nothing of it depends on the version
    of a random generator, so a run resumes in the same order with another numpy.
    """
    # Python integers until here: numpy warns when a single uint64 wraps
    start, step = ((word * _GOLDEN) & _MASK for word in (1, epoch + 1))
    key = splitmix64(np.array([(seed + start) & _MASK], dtype=np.uint64))
    key = splitmix64(key + np.array([step], dtype=np.uint64))
    numbers = np.arange(1, documents + 1, dtype=np.uint64)
    return np.argsort(splitmix64(key + numbers * np.uint64(_GOLDEN)), kind="stable")


def window_at(place: int, windows: int, *, seed: int, epoch: int) -> int:
    """The window that sample `place` of an epoch reads: a permutation of range(windows).

    Without it, consecutive samples are runs of one document, and a global batch sees a handful of
    files. A Feistel network over the next even power of two, walked until it lands in range (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains"): no index, whatever the corpus size.
    """
    half = max((windows - 1).bit_length() + 1, 2) // 2
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(_FEISTEL_TURNS):
            word = ((seed & _MASK) + right * _GOLDEN + (epoch * _FEISTEL_TURNS + turn + 1)) & _MASK
            left, right = right, left ^ (_scalar_hash(_scalar_hash(word) ^ seed & _MASK) & low)
        place = left << half | right
        if place < windows:
            return place


def _scalar_hash(word: int) -> int:
    return int(splitmix64(np.array([word], dtype=np.uint64))[0])


class DocumentStream:
    """The documents of a dataset end to end in a given order, without empty ones."""

    def __init__(self, dataset: IndexedDataset, order: np.ndarray) -> None:
        lengths = dataset.document_lengths[order]
        self._dataset = dataset
        self._order = order[lengths > 0]
        self._starts = np.zeros(len(self._order) + 1, dtype=np.int64)
        np.cumsum(lengths[lengths > 0], out=self._starts[1:])
        self.total_tokens = int(self._starts[-1])

    def window(self, start: int, seq_length: int) -> Sample:
        """Stream tokens `[start, start + seq_length)`; past the end padded with a masked piece.

        The last label is the token after the window when it belongs to the same document.
        """
        stop = min(start + seq_length, self.total_tokens)
        held = max(stop - start, 0)
        tokens = np.zeros(seq_length + 1, dtype=np.int64)
        edges = [0]
        if held:
            first = int(np.searchsorted(self._starts, start, side="right")) - 1
            last = int(np.searchsorted(self._starts, stop, side="right")) - 1
            # one more token for the last label; at the end of the stream there is none
            limit = min(stop + 1, self.total_tokens)
            for k in range(first, min(last + 1, len(self._order))):
                begin = max(start, int(self._starts[k]))
                end = min(limit, int(self._starts[k + 1]))
                tokens[begin - start : end - start] = self._dataset.tokens(
                    int(self._order[k]), begin - int(self._starts[k]), end - begin
                )
            edges += (self._starts[first + 1 : last + 1] - start).tolist()
        # a token predicts the next one unless the next one starts a document or is padding
        mask = np.arange(seq_length) < held
        mask[[edge - 1 for edge in edges[1:]]] = False
        boundaries = sorted({*edges, held, seq_length})
        pieces = np.diff(boundaries)
        return Sample(
            token_ids=np.where(np.arange(seq_length) < held, tokens[:-1], 0),
            labels=np.where(mask, tokens[1:], 0),
            loss_mask=mask,
            position_ids=np.arange(seq_length) - np.repeat(boundaries[:-1], pieces),
            boundaries=np.array(boundaries, dtype=np.int32),
        )


class PackedDataset:
    """Endless packed samples of one `.bin/.idx` pair, by number.

    In each epoch the documents, in an order of their own, are laid end to end and cut into windows
    of `seq_length` tokens, which are read in an order of their own too. Each window sees one token
    more, for its last label, so within an epoch every non-first token of a document is predicted
    exactly once, except in the tail of fewer than `seq_length` tokens that is dropped (another one
    in each epoch). Labels never cross documents. The index of an epoch takes 16 bytes per document;
    those of the last two epochs are kept.

    Raises ValueError when the corpus has fewer tokens than one window.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int) -> None:
        if indexed.total_tokens < seq_length:
            raise ValueError(
                f"{indexed.prefix} has {indexed.total_tokens} tokens, fewer than one sequence of "
                f"{seq_length}; prepare more data or lower seq_length"
            )
        self.indexed = indexed
        self.seq_length = seq_length
        self.seed = seed
        self.samples_per_epoch = indexed.total_tokens // seq_length
        self._epochs: collections.OrderedDict[int, DocumentStream] = collections.OrderedDict()
        self._lock = threading.Lock()  # loaders in threads may share a dataset

    def sample(self, index: int) -> Sample:
        """Sample number `index` >= 0; its epoch is `index // samples_per_epoch`."""
        if index < 0:
            raise ValueError(f"sample {index} of {self.indexed.prefix}; numbers start at 0")
        epoch, place = divmod(index, self.samples_per_epoch)
        window = window_at(place, self.samples_per_epoch, seed=self.seed, epoch=epoch)
        return self._stream(epoch).window(window * self.seq_length, self.seq_length)

    def fingerprint(self) -> dict[str, Any]:
        """What fixes the samples: checksum of the data, `seq_length`, `seed`."""
        return {
            "data": data_fingerprint(self.indexed.prefix),
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

    def _stream(self, epoch: int) -> DocumentStream:
        with self._lock:
            if epoch in self._epochs:
                self._epochs.move_to_end(epoch)
            else:
                order = document_order(len(self.indexed), seed=self.seed, epoch=epoch)
                self._epochs[epoch] = DocumentStream(self.indexed, order)
                while len(self._epochs) > _CACHED_EPOCHS:
                    self._epochs.popitem(last=False)
            return self._epochs[epoch]
