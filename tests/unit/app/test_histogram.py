"""Logarithmic buckets: every value has one, percentiles are near the truth, and two states can be subtracted."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.histogram import HIGHEST, LOWEST, Histogram, bucket_of, collect, from_buckets, merge, upper_bound


@given(st.floats(min_value=0.0100001, max_value=999_999))
def test_every_value_lies_in_its_bucket(value: float) -> None:
    """A bucket holds what is above the bound before it, up to its own."""
    bucket = bucket_of(value)
    assert upper_bound(bucket - 1) * 0.99999 < value <= upper_bound(bucket) * 1.00001


def test_bounds_lie_in_the_bucket_below() -> None:
    """A decade's bound belongs to the bucket that it ends; what is smaller or larger than all is not lost."""
    for power in range(-2, 7):
        assert upper_bound(bucket_of(10.0**power)) == 10.0**power
    assert (bucket_of(0.0), bucket_of(-1.0), bucket_of(1e-9)) == (LOWEST, LOWEST, LOWEST)
    assert bucket_of(1e9) == HIGHEST


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95, 0.99])
def test_percentiles_are_near_the_truth(share: float) -> None:
    """Interpolated within the bucket, a percentile of lognormal values is right within 3 %."""
    rng = random.Random(7)
    values = sorted(rng.lognormvariate(3.0, 1.0) for _ in range(20_000))
    found = collect(values).quantile(share)
    assert found is not None
    assert math.isclose(found, values[int(share * len(values))], rel_tol=0.03)


def test_the_mean_is_exact() -> None:
    """The sum is kept beside the buckets."""
    assert collect([1.0, 2.0, 6.0]).mean == 3.0
    assert collect([3983.0] * 9).quantile(0.95) == 3983.0, "equal values have no other percentile"
    assert (Histogram().mean, Histogram().quantile(0.95), Histogram().count) == (None, None, 0)


def test_what_came_in_since() -> None:
    """The difference of two states is what came in between; where Redis began anew it is all that there is."""
    before, later = collect([1.0, 5.0]), collect([1.0, 5.0, 5.0, 70.0])
    assert later.since(before) == collect([5.0, 70.0])
    assert later.since(later) == Histogram({}, 0.0)
    assert before.since(later) == before
    assert later.since(Histogram()) == later


def test_every_bucket_can_be_written_down() -> None:
    """Bounds are shown with six digits, some a hair above the exact one; each is still that of its own bucket."""
    full = Histogram({bucket: 3 + bucket - LOWEST for bucket in range(LOWEST, HIGHEST + 1)}, 9.0)
    assert from_buckets(full.buckets(), full.total) == full


def test_what_came_in_between_two_snapshots() -> None:
    """Neighbouring buckets stay apart, so that counts and sum of the difference belong together."""
    before = collect([25.0] * 2 + [28.0, 31.0])
    later = merge([before, collect([25.0, 31.0, 31.0])])
    shown = [from_buckets(one.buckets(), one.total) for one in (later, before)]
    assert shown[0].since(shown[1]).count == 3
    assert shown[0].since(shown[1]).mean == 29.0


def test_a_percentile_stays_in_its_bucket() -> None:
    """Where sum and counts disagree, values of one bucket are still told as no more than its bound, and no less."""
    bucket = bucket_of(31.0)
    assert Histogram({bucket: 1}, 93.2).quantile(0.95) == upper_bound(bucket)
    assert Histogram({bucket: 3}, 31.0).quantile(0.95) == upper_bound(bucket - 1)
    assert Histogram({HIGHEST: 1}, 5e7).quantile(0.95) == 5e7, "the last bucket has no end"


def test_it_can_be_written_down() -> None:
    """The bounds and counts that a snapshot shows say all that the histogram knows."""
    one = collect([0.001, 0.5, 0.5, 1800.0, 5e7])
    assert from_buckets(one.buckets(), one.total) == one
    assert merge([one, one]).count == 10


def test_a_high_quantile_beside_the_mean_is_not_below_it() -> None:
    """Lengths that nearly all lie in one bucket, near its upper bound: 95 % do not stay below their mean."""
    lengths = [2480.0] * 990 + [300.0] * 10
    found = collect(lengths)
    assert found.mean is not None
    assert found.quantile(0.95) == pytest.approx(max(found.mean, 2480.0), rel=0.01)
    assert found.quantile(0.005) == pytest.approx(300, rel=0.3)
