"""Corpora for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megacomposer.data.indexed import IndexedDataset, IndexedWriter

Corpus = Callable[..., IndexedDataset]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Writes documents of given lengths, every token of the corpus another id, and opens them."""

    def make(lengths: Sequence[int], name: str = "corpus", first_id: int = 1) -> IndexedDataset:
        prefix = tmp_path / name
        with IndexedWriter(prefix, np.int32) as writer:
            for length in lengths:
                writer.add_document(np.arange(first_id, first_id + length))
                first_id += length
        return IndexedDataset(prefix)

    return make


def random_lengths(seed: int, documents: int, longest: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, documents).tolist()
