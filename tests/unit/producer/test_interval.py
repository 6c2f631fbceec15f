"""The interval of a mean is Student's."""

from __future__ import annotations

import pytest

from producer.interval import Range, mean_range


def test_the_mean_lies_in_students_interval() -> None:
    """32 values with mean 100 and deviation 10 lie at 100 +- 2.0395 x 10 / sqrt(32)."""
    values = [90.0, 110.0] * 16
    low, high = mean_range(values).low, mean_range(values).high
    half = 2.0395 * (10 * (32 / 31) ** 0.5) / 32**0.5
    assert [low, high] == pytest.approx([100 - half, 100 + half], rel=1e-4)
    few = mean_range([0.0, 10.0] * 4)  # 7 degrees of freedom: 2.3646
    assert few.high == pytest.approx(5 + 2.3646 * (5 * (8 / 7) ** 0.5) / 8**0.5, rel=1e-3)
    assert mean_range([0.0] * 7 + [1000.0]).low == 0.0


def test_a_range_of_many() -> None:
    """So many times as much has both ends as much larger."""
    assert Range(1.0, 2.5).times(4) == Range(4.0, 10.0)
