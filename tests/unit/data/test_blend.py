"""Proportions and random access of the blend."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megacomposer.data.blend import MAX_PERIOD, Blend, Schedule, integer_shares
from megacomposer.data.packing import PackedDataset

SHARES = [
    [1],
    [1, 1],
    [7, 2, 1],
    [1, 999],
    [1, 1, 1, 1, 1],
    # on these two, always taking the largest deficit is off by more than one sample
    [5, 5, 3, 100, 100, 100, 3, 1, 5, 1],
    [2, 10, 5, 5, 100, 10, 3, 1, 100, 10, 1, 1],
]


@pytest.mark.parametrize("shares", SHARES)
def test_every_prefix_has_its_proportions_to_less_than_one_sample(shares):
    schedule = Schedule(shares)
    total, counts = sum(shares), [0] * len(shares)
    for n in range(2 * total):
        source, index = schedule.locate(n)
        assert index == counts[source]
        counts[source] += 1
        for share, count in zip(shares, counts, strict=True):
            assert abs(share * (n + 1) - count * total) < total


def test_every_prefix_has_its_proportions_for_random_shares():
    generator = random.Random(0)
    for _ in range(60):
        shares = [generator.choice([1, 2, 3, 10, 50]) for _ in range(generator.randint(2, 12))]
        schedule, total, counts = Schedule(shares), sum(shares), [0] * len(shares)
        for n in range(total):
            counts[schedule.locate(n)[0]] += 1
            assert all(
                abs(share * (n + 1) - count * total) < total
                for share, count in zip(shares, counts, strict=True)
            )


def test_far_samples_are_the_same_in_any_order_of_access():
    shares = [70, 29, 11]
    forwards = Schedule(shares)
    expected = [forwards.locate(n) for n in range(500)]
    far = Schedule(shares)
    assert [far.locate(n) for n in (499, 3, 250, 0)] == [expected[n] for n in (499, 3, 250, 0)]
    source, index = far.locate(10**12 + 5)
    rounds, place = divmod(10**12 + 5, 110)
    assert (source, index) == (expected[place][0], rounds * shares[source] + expected[place][1])


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1, 2], [1, 2]),
        ([5.0], [1]),
        ([0.25, 0.5], [1, 2]),
        ([1e-3, 0.999], [1, 999]),
    ],
)
def test_weights_read_as_decimals_give_exact_shares(weights, shares):
    assert integer_shares(weights) == shares


def test_weights_without_a_short_period_are_rounded_to_millionths():
    weights = [1 / 3, 1 / 7, 0.123456789]
    shares = integer_shares(weights)
    assert sum(shares) <= MAX_PERIOD
    for share, weight in zip(shares, weights, strict=True):
        assert share / sum(shares) == pytest.approx(weight / sum(weights), abs=1e-6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "at least one"),
        ([1, 0], "> 0"),
        ([1, -1], "> 0"),
        ([float("nan")], "> 0"),
        ([float("inf"), 1], "> 0"),
        ([1.0, 1e-7], "less than a millionth"),
    ],
)
def test_weights_that_make_no_blend_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        integer_shares(weights)


def test_each_sample_of_each_dataset_comes_once_and_in_order(corpus):
    first = PackedDataset(corpus([10, 20, 30], "a"), 6, seed=0)
    second = PackedDataset(corpus([15, 25], "b", first_id=1000), 6, seed=0)
    blend = Blend([first, second], [3, 1])
    assert blend.weights == [0.75, 0.25]
    located = [blend.locate(n) for n in range(400)]
    assert Counter(source for source, _ in located) == {0: 300, 1: 100}
    for source, dataset in enumerate((first, second)):
        numbers = [number for k, number in located if k == source]
        assert numbers == list(range(len(numbers)))
        place = located.index((source, 7))
        assert blend.sample(place).token_ids.tolist() == dataset.sample(7).token_ids.tolist()
    with pytest.raises(ValueError, match="sample -1"):
        blend.locate(-1)


def test_datasets_that_do_not_fit_together_are_refused(corpus):
    dataset = corpus([10, 20, 30])
    packed = PackedDataset(dataset, 6, seed=0)
    with pytest.raises(ValueError, match="1 datasets with 2 weights"):
        Blend([packed], [1, 1])
    with pytest.raises(ValueError, match=r"seq_length \[6, 7\]"):
        Blend([packed, PackedDataset(dataset, 7, seed=0)], [1, 1])
