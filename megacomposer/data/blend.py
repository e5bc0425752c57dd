"""Weighted blend of packed datasets: a fixed, fair and random-access order of sources."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megacomposer.data.packing import PackedDataset, Sample

MAX_PERIOD = 1_000_000
"""Weights are shares of at most this many parts; the order of sources repeats after so many."""

_CHUNK_SAMPLES = 4096


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Whole-number shares, without a common divisor, of sum at most MAX_PERIOD.

    Exact when the weights, read as decimals, allow it (0.7, 0.2, 0.1 -> 7, 2, 1); otherwise
    rounded to millionths by largest remainder. Raises ValueError for a weight that is not a
    positive number or that would round to nothing.
    """
    if not weights or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"weights are {list(weights)}; give at least one, each a number > 0")
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    shares = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) <= MAX_PERIOD:
        return shares
    total = sum(exact)
    ideal = [fraction * MAX_PERIOD / total for fraction in exact]
    shares = [int(value) for value in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda k: (shares[k] - ideal[k], k))
    for k in by_remainder[: MAX_PERIOD - sum(shares)]:
        shares[k] += 1
    if min(shares) == 0:
        raise ValueError(
            f"weight {weights[shares.index(0)]} is less than a millionth of the sum "
            f"{float(total)}; raise it or remove the source"
        )
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


class Schedule:
    """Which source the n-th sample comes from, and which of that source's samples it is.

    After n samples each source has had its share `w * n` to within less than one sample, for any
    number of sources. Picking the source with the largest deficit does not keep that bound for many
    sources of unlike weights (off by 1.34 was seen with 9), so this takes, of the sources whose
    next sample may start (`count < w * (n + 1)`), the one whose sample must be finished first, by
    `ceil((count + 1) / w)`; ties go to the first source. That is earliest deadline first over the
    windows of Pfair scheduling (Baruah et al. 1996); Tijdeman 1980 has the bound. Shares are whole
    numbers, so the order repeats with the period `sum(shares)`; it is built in chunks, as far as it
    is asked for.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = list(shares)
        self.period = sum(self.shares)
        self._counts = [0] * len(self.shares)
        self._built = 0
        self._source = np.empty(0, dtype=np.int32)
        self._index = np.empty(0, dtype=np.int64)
        self._lock = threading.Lock()

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, number of the sample within the source) of blend sample `sample` >= 0."""
        rounds, place = divmod(sample, self.period)
        with self._lock:
            if place >= self._built:
                self._extend(place + 1)
            source = int(self._source[place])
            return source, rounds * self.shares[source] + int(self._index[place])

    def _extend(self, needed: int) -> None:
        target = min(self.period, -(-needed // _CHUNK_SAMPLES) * _CHUNK_SAMPLES)
        if target > len(self._source):  # doubled, so that growing stays linear in all
            room = min(self.period, max(target, 2 * len(self._source)))
            self._source = np.concatenate([self._source, np.empty(room - len(self._source), "i4")])
            self._index = np.concatenate([self._index, np.empty(room - len(self._index), "i8")])
        shares, counts, period = self.shares, self._counts, self.period
        for place in range(self._built, target):
            best, earliest = -1, 0
            for k, (share, count) in enumerate(zip(shares, counts, strict=True)):
                if count * period < share * (place + 1):
                    deadline = -(-(count + 1) * period // share)
                    if best < 0 or deadline < earliest:
                        best, earliest = k, deadline
            self._source[place] = best
            self._index[place] = counts[best]
            counts[best] += 1
        self._built = target


class Blend:
    """Endless samples of several PackedDatasets in proportion to `weights`, by number.

    `weights` is afterwards what was really used: equal to what was given up to its sum, and rounded
    to millionths only where `integer_shares` says so. Raises ValueError for no dataset, weights
    that do not match, or datasets of different `seq_length`.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float]) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"{len(datasets)} datasets with {len(weights)} weights")
        self.datasets = list(datasets)
        self._schedule = Schedule(integer_shares(weights))
        lengths = sorted({dataset.seq_length for dataset in self.datasets})
        if len(lengths) > 1:
            raise ValueError(f"datasets of one blend have seq_length {lengths}; make them equal")
        self.seq_length = lengths[0]
        self.weights = [share / self._schedule.period for share in self._schedule.shares]

    def locate(self, index: int) -> tuple[int, int]:
        """(dataset, number of the sample in it) of blend sample `index` >= 0."""
        if index < 0:
            raise ValueError(f"sample {index} of a blend; numbers start at 0")
        return self._schedule.locate(index)

    def sample(self, index: int) -> Sample:
        """Blend sample `index` >= 0."""
        dataset, number = self.locate(index)
        return self.datasets[dataset].sample(number)

    def fingerprint(self) -> dict[str, Any]:
        """What fixes the samples and their order, as plain JSON values."""
        period = self._schedule.period
        sources = zip(self.datasets, self._schedule.shares, strict=True)
        return {
            "seq_length": self.seq_length,
            "sources": [
                {
                    "data": (own := dataset.fingerprint())["data"],
                    "seed": own["seed"],
                    "weight": f"{share}/{period}",
                }
                for dataset, share in sources
            ],
        }
