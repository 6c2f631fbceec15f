"""Counts in logarithmic buckets: small enough for a Redis hash, fine enough for a mean and a percentile."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

PER_DECADE = 10
"""Buckets between a value and its tenfold: neighbours differ by 26 %."""
LOWEST = -2 * PER_DECADE
"""The bucket of everything up to 0.01."""
HIGHEST = 6 * PER_DECADE
"""The bucket that also holds everything above a million."""

_Key = TypeVar("_Key")


def bucket_of(value: float) -> int:
    """Return the number of the bucket that holds `value`: bucket n reaches from above 10^((n-1)/10) to 10^(n/10)."""
    if value <= 0.01:
        return LOWEST
    # Rounded, so that a bound itself lies in the bucket below it, whatever the logarithm's last digit is.
    return min(HIGHEST, math.ceil(round(PER_DECADE * math.log10(value), 9)))


@functools.cache
def upper_bound(bucket: int) -> float:
    """Return the largest value that the bucket is meant for."""
    return float(f"{10.0 ** (bucket / PER_DECADE):.6g}")


@functools.cache
def middle(bucket: int) -> float:
    """Return the geometric middle of a bucket."""
    return float(10.0 ** ((bucket - 0.5) / PER_DECADE))


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Values by bucket, and their exact sum."""

    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    total: float = 0.0
    """The sum of all values."""

    @functools.cached_property
    def count(self) -> int:
        """How many values there are."""
        return sum(self.counts.values())

    @property
    def mean(self) -> float | None:
        """The exact mean; None while there is no value."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return the value that this share of all values does not exceed, interpolated within its bucket.

        Values that all lie in one bucket are taken to be alike, and within its bounds. In the bucket of the mean the
        upper half of all values is not told as less than the mean, which is exact.
        """
        filled = [bucket for bucket, n in self.counts.items() if n > 0]
        if len(filled) == 1 and self.total > 0:
            low, high = _bounds(filled[0])
            return max(low, min(self.total / self.count, math.inf if filled[0] == HIGHEST else high))
        wanted, seen = share * self.count, 0
        for bucket, n in sorted(self.counts.items()):
            if n > 0 and seen + n >= wanted:
                low, high = _bounds(bucket)
                value = low + (high - low) * (wanted - seen) / n
                mean = self.total / self.count
                return max(value, mean) if share >= 0.5 and bucket_of(mean) == bucket else value
            seen += n
        return None

    def buckets(self) -> list[tuple[float, int]]:
        """Return (upper bound, values in that bucket), empty buckets left out."""
        return [(upper_bound(bucket), n) for bucket, n in sorted(self.counts.items()) if n > 0]

    def since(self, before: Histogram) -> Histogram:
        """Return what came in since `before`; all of this one where it is no later state of it."""
        counts = {bucket: n - before.counts.get(bucket, 0) for bucket, n in self.counts.items()}
        if before.counts.keys() - self.counts.keys() or min(counts.values(), default=0) < 0:
            return self
        kept = {bucket: n for bucket, n in counts.items() if n}
        return Histogram(kept, max(0.0, self.total - before.total))


def from_buckets(buckets: Iterable[tuple[float, int]], total: float = 0.0) -> Histogram:
    """Return the histogram that `Histogram.buckets` described."""
    return Histogram({_bucket_up_to(bound): n for bound, n in buckets}, total)


def _bucket_up_to(bound: float) -> int:
    """Return the bucket with that upper bound; written with six digits, it may be a hair above the exact one."""
    return round(PER_DECADE * math.log10(bound))


def _bounds(bucket: int) -> tuple[float, float]:
    return 0.0 if bucket == LOWEST else upper_bound(bucket - 1), upper_bound(bucket)


class Collector:
    """Counts values one by one, in memory that does not grow with them."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self.total = 0.0
        """The sum of the values so far."""

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bucket_of(value)] += 1
        self.total += value

    def take(self, histogram: Histogram) -> None:
        """Count all values of another histogram."""
        self._counts.update(histogram.counts)
        self.total += histogram.total

    def histogram(self) -> Histogram:
        """Return what has been counted so far."""
        return Histogram(dict(self._counts), self.total)


def collect(values: Iterable[float]) -> Histogram:
    """Return the histogram of the values."""
    found = Collector()
    for value in values:
        found.add(value)
    return found.histogram()


def add_up(counts: Iterable[Mapping[_Key, int]]) -> dict[_Key, int]:
    """Return the sums of counts by what each is of."""
    sums: dict[_Key, int] = {}
    for one in counts:
        for key, n in one.items():
            sums[key] = sums.get(key, 0) + n
    return sums


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Return the histogram of all their values."""
    found = Collector()
    for one in histograms:
        found.take(one)
    return found.histogram()
