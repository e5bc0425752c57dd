"""Corpora and tokenizers for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megacomposer.data.indexed import IndexedDataset, IndexedWriter


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Writes documents of given lengths, every token of the corpus another id, and opens them."""

    def make(lengths: Sequence[int], name: str = "corpus", first_id: int = 1) -> IndexedDataset:
        prefix = tmp_path / name
        with IndexedWriter(prefix, np.int32) as writer:
            for length in lengths:
                writer.add_document(np.arange(first_id, first_id + length))
                first_id += length
        return IndexedDataset(prefix)

    return make


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Callable[..., str]:
    """Trains a small byte-level BPE with the given special tokens and plain added tokens."""

    def make(special: Sequence[str] = ("<|endoftext|>",), added: Sequence[str] = ()) -> str:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=list(special),
        )
        tokenizer.train_from_iterator(["def return import self " * 20], trainer)
        tokenizer.add_tokens(list(added))
        path = tmp_path / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    return make
