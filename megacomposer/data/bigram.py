"""The byte-bigram baseline that a small model has to beat."""

from __future__ import annotations

import numpy as np

from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.tokenizer import ByteTokenizer

_SYMBOLS = 257  # 256 bytes and the end of document
_CHUNK_TOKENS = 1 << 24


def byte_bigram_counts(dataset: IndexedDataset) -> np.ndarray:
    """int64 [257, 257]: how often symbol `column` follows symbol `row` inside a document.

    Symbols are the 256 bytes and, last, the end-of-document id. The first byte of a document
    follows nothing and is not counted; pairs never cross documents. Raises ValueError for data that
    is not plain bytes (other ids, such as those of fill-in-the-middle or of another tokenizer).
    """
    assert ByteTokenizer.eod_id == _SYMBOLS - 1
    tokens = dataset.all_tokens()
    ends = np.cumsum(dataset.document_lengths)
    counts = np.zeros(_SYMBOLS * _SYMBOLS, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        block = tokens[start : start + _CHUNK_TOKENS + 1].astype(np.int64)
        if block.min() < 0 or block.max() >= _SYMBOLS:
            raise ValueError(
                f"{dataset.prefix} has the id {block.max()}; the byte-bigram baseline is for data "
                "prepared with the tokenizer 'byte' and without fill-in-the-middle"
            )
        inside = np.ones(max(len(block) - 1, 0), dtype=bool)
        low, high = np.searchsorted(ends, [start + 1, start + len(block)])
        inside[ends[low:high] - start - 1] = False
        pairs = block[:-1] * _SYMBOLS + block[1:]
        counts += np.bincount(pairs[inside], minlength=counts.size)
    return counts.reshape(_SYMBOLS, _SYMBOLS)


def byte_bigram_cross_entropy(dataset: IndexedDataset) -> float:
    """Cross-entropy of the best byte bigram, in nats per predicted byte.

    It is the conditional entropy H(next | previous) of the data itself: the bigram model is fitted
    to the same bytes that it is scored on, so no bigram model does better on them. Counted is each
    non-first symbol of each document, the end-of-document id at its end included: exactly the
    labels that packing gives a model to predict. Raises ValueError for data that is not plain
    bytes, and when no document has two symbols.
    """
    counts = byte_bigram_counts(dataset)
    pairs = int(counts.sum())
    if not pairs:
        raise ValueError(f"{dataset.prefix} has no document of two symbols")
    row_totals = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
    seen = counts > 0
    nats = -np.log(counts[seen] / row_totals[seen])
    return float((counts[seen] * nats).sum() / pairs)
