"""The byte-bigram baseline."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest

from megacomposer.data import bigram
from megacomposer.data.bigram import byte_bigram_counts, byte_bigram_cross_entropy
from megacomposer.data.indexed import IndexedDataset, IndexedWriter
from megacomposer.data.tokenizer import ByteTokenizer


def dataset(tmp_path, documents, eod=True):
    tokenizer = ByteTokenizer()
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        for text in documents:
            ids = tokenizer.encode(text)
            writer.add_document(np.append(ids, tokenizer.eod_id) if eod else ids)
    return IndexedDataset(tmp_path / "d")


def naive(documents) -> float:
    pairs = collections.Counter(
        pair for text in documents for pair in zip([*text], [*text[1:], 256], strict=True)
    )
    firsts = collections.Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    nats = sum(n * -math.log(n / firsts[pair[0]]) for pair, n in pairs.items())
    return nats / sum(pairs.values())


@pytest.mark.parametrize("chunk", [1, 2, 7, 100, 1 << 24])
def test_equal_to_a_count_by_hand_for_any_chunk_size(tmp_path, monkeypatch, chunk):
    generator = np.random.default_rng(0)
    documents = [
        generator.choice([97, 98, 99], length).astype(np.uint8).tobytes()
        for length in generator.integers(1, 30, 25)
    ]
    monkeypatch.setattr(bigram, "_CHUNK_TOKENS", chunk)
    data = dataset(tmp_path, documents)
    assert byte_bigram_cross_entropy(data) == pytest.approx(naive(documents), rel=1e-12)
    assert byte_bigram_counts(data).sum() == sum(map(len, documents))


def test_pairs_do_not_cross_documents_and_the_end_is_predicted(tmp_path):
    counts = byte_bigram_counts(dataset(tmp_path, [b"ab", b"ab"]))
    assert {(int(i), int(j)): int(counts[i, j]) for i, j in np.argwhere(counts)} == {
        (97, 98): 2,
        (98, 256): 2,
    }
    assert byte_bigram_cross_entropy(dataset(tmp_path, [b"ab", b"ab"])) == 0


def test_a_fair_coin_costs_ln_2(tmp_path):
    documents = [b"ab"] * 8 + [b"aa"] * 8  # after `a`: 8 b, 8 a and 8 ends
    value = byte_bigram_cross_entropy(dataset(tmp_path, documents, eod=False))
    assert value == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("token", [258, 300])
def test_other_data_than_plain_bytes_is_refused(tmp_path, token):
    with IndexedWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document(np.array([97, token, 98]))
    with pytest.raises(ValueError, match=rf"has the id {token}.*'byte'"):
        byte_bigram_cross_entropy(IndexedDataset(tmp_path / "d"))


def test_nothing_to_predict_is_an_error_not_a_nan(tmp_path):
    with pytest.raises(ValueError, match="two symbols"):
        byte_bigram_cross_entropy(dataset(tmp_path, [b"a", b"b"], eod=False))
