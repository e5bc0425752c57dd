"""Packed windows against a naive implementation that lays out every token one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.packing import (
    DocumentStream,
    PackedDataset,
    document_order,
    window_at,
)

PINNED = (
    [0, 7, 8, 2, 5, 9, 4, 6, 3, 1],
    [6, 0, 4, 5, 2, 7, 9, 1, 8, 3],
    [9, 8, 7, 4, 2, 0, 3, 6, 5, 1],
)
PINNED_WINDOWS = [9, 5, 6, 2, 8, 0, 1, 4, 7, 3]


def naive_window(dataset, order, start, seq_length):
    """(tokens, labels, mask, positions, boundaries) by loops over single tokens."""
    stream = [
        (document, place, int(token))
        for document in order
        for place, token in enumerate(dataset.tokens(int(document)))
    ]
    window = stream[start : start + seq_length + 1]
    tokens, labels, mask, positions, boundaries = [], [], [], [], []
    for k in range(seq_length):
        if k >= len(window):
            if k == len(window):
                boundaries.append(k)
            tokens.append(0)
            labels.append(0)
            mask.append(False)
            positions.append(k - boundaries[-1])
            continue
        document, _, token = window[k]
        if k == 0 or window[k - 1][0] != document:
            boundaries.append(k)
        follows = k + 1 < len(window) and window[k + 1][0] == document
        tokens.append(token)
        labels.append(window[k + 1][2] if follows else 0)
        mask.append(follows)
        positions.append(k - boundaries[-1])
    return tokens, labels, mask, positions, [*boundaries, seq_length]


def as_lists(sample):
    return (
        sample.token_ids.tolist(),
        sample.labels.tolist(),
        sample.loss_mask.tolist(),
        sample.position_ids.tolist(),
        sample.boundaries.tolist(),
    )


@pytest.mark.parametrize("seed", range(25))
def test_windows_equal_the_naive_ones_and_labels_never_cross_documents(corpus, seed):
    generator = np.random.default_rng(seed)
    longest = int(generator.choice([1, 2, 5, 40]))
    lengths = generator.integers(1, longest + 1, int(generator.integers(1, 30))).tolist()
    dataset = corpus(lengths)
    seq_length = int(generator.integers(1, dataset.total_tokens + 1))
    packed = PackedDataset(dataset, seq_length, seed)
    for index in range(3 * packed.samples_per_epoch):
        epoch, place = divmod(index, packed.samples_per_epoch)
        window = window_at(place, packed.samples_per_epoch, seed=seed, epoch=epoch)
        order = document_order(len(dataset), seed=seed, epoch=epoch)
        expected = naive_window(dataset, order, window * seq_length, seq_length)
        assert as_lists(packed.sample(index)) == expected
    order = np.arange(len(dataset))
    stream = DocumentStream(dataset, order)
    for start in range(0, dataset.total_tokens + 2 * seq_length, seq_length):
        expected = naive_window(dataset, order, start, seq_length)
        assert as_lists(stream.window(start, seq_length)) == expected


@pytest.mark.parametrize(("lengths", "seq_length"), [([3, 5, 8], 4), ([1, 9, 7, 2, 1], 6)])
def test_every_non_first_token_is_predicted_once_an_epoch_but_for_the_dropped_tail(
    corpus, lengths, seq_length
):
    dataset = corpus(lengths)
    firsts = {int(dataset.tokens(k, 0, 1)[0]) for k in range(len(dataset))}
    packed = PackedDataset(dataset, seq_length, seed=0)
    for epoch in range(5):
        base = epoch * packed.samples_per_epoch
        samples = [packed.sample(base + k) for k in range(packed.samples_per_epoch)]
        predicted = Counter(int(label) for s in samples for label in s.labels[s.loss_mask])
        assert set(predicted.values()) == {1}
        assert not firsts & predicted.keys()
        order = document_order(len(dataset), seed=0, epoch=epoch)
        stream = [int(token) for k in order for token in dataset.tokens(int(k))]
        used = packed.samples_per_epoch * seq_length
        assert len(stream) - used < seq_length
        # the label of the last input is one token further
        assert predicted.keys() == set(stream[1 : used + 1]) - firsts


def test_epochs_have_different_orders_that_only_the_seed_changes(corpus):
    dataset = corpus([1] * 50)

    def ids(seed, epochs=(0, 1)):
        packed = PackedDataset(dataset, 10, seed)
        numbers = [e * packed.samples_per_epoch + k for e in epochs for k in range(5)]
        return [packed.sample(n).token_ids.tolist() for n in numbers]

    assert ids(0) == ids(0)
    assert ids(0) != ids(1)
    assert ids(0)[:5] != ids(0)[5:]
    for epoch in (ids(0)[:5], ids(0)[5:]):
        assert sorted(token for sample in epoch for token in sample) == list(range(1, 51))


def test_the_permutation_is_pinned_so_that_old_runs_resume():
    """Another order under the same seed would be a silent change of every run's data."""
    assert document_order(10, seed=0, epoch=0).tolist() == PINNED[0]
    assert document_order(10, seed=0, epoch=1).tolist() == PINNED[1]
    assert document_order(10, seed=1, epoch=0).tolist() == PINNED[2]
    assert document_order(0, seed=0, epoch=0).tolist() == []


def test_permutations_are_uniform_in_position():
    places = np.zeros((8, 8), dtype=int)
    for epoch in range(4000):
        places[np.arange(8), document_order(8, seed=7, epoch=epoch)] += 1
    # 500 expected in each cell; 6 standard deviations
    assert np.abs(places - 500).max() < 6 * (500 * 7 / 8) ** 0.5


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_the_order_of_windows_is_a_permutation_of_its_own_in_each_epoch(windows):
    orders = [
        tuple(window_at(place, windows, seed=seed, epoch=epoch) for place in range(windows))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    for order in orders:
        assert sorted(order) == list(range(windows))
    if windows >= 16:
        assert len(set(orders)) == 3


def test_neighbouring_samples_are_not_neighbouring_windows():
    """A batch would come from one document: seen as a held-out loss 0.5 nats above training's."""
    order = np.array([window_at(place, 5000, seed=3, epoch=0) for place in range(5000)])
    steps = np.abs(np.diff(order))
    assert 0.9 < steps.mean() / (5000 / 3) < 1.1  # the mean distance of two random places
    assert (steps == 1).sum() < 15


def test_the_order_of_windows_is_pinned_so_that_old_runs_resume():
    order = [window_at(place, 10, seed=0, epoch=0) for place in range(10)]
    assert order == PINNED_WINDOWS


def test_random_access_does_not_depend_on_the_order_of_access(corpus):
    packed = PackedDataset(corpus([7, 3, 12, 1, 4]), 5, seed=3)
    numbers = list(range(4 * packed.samples_per_epoch))
    forwards = {n: as_lists(packed.sample(n)) for n in numbers}
    for n in np.random.default_rng(0).permutation(numbers).tolist():
        assert as_lists(packed.sample(n)) == forwards[n]


def test_a_corpus_smaller_than_one_window_names_both_sizes(corpus):
    with pytest.raises(ValueError, match="has 6 tokens, fewer than one sequence of 7"):
        PackedDataset(corpus([2, 4]), 7, seed=0)
    assert PackedDataset(corpus([2, 4]), 6, seed=0).samples_per_epoch == 1
    with pytest.raises(ValueError, match="sample -1"):
        PackedDataset(corpus([2, 4]), 6, seed=0).sample(-1)


def test_empty_documents_of_a_foreign_file_take_no_part(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.int32)
    for ids in ([], [1, 2], [], [], [3, 4, 5], []):
        builder.add_document(torch.tensor(ids, dtype=torch.int32), [len(ids)])
    builder.finalize(str(tmp_path / "d.idx"))
    dataset = IndexedDataset(tmp_path / "d")
    sample = DocumentStream(dataset, np.arange(6)).window(0, 5)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [True, False, True, True, False]
    assert sample.boundaries.tolist() == [0, 2, 5]
