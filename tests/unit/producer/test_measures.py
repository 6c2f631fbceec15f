"""Sizes and times are told as people say them."""

from __future__ import annotations

import pytest

from producer.measures import duration, size


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.21, "3.2 s"), (59, "59 s"), (119, "119 s"), (130, "2.2 min"), (7_300, "2.0 h"), (200_000, "2.3 days")],
)
def test_times_as_people_say_them(seconds: float, words: str) -> None:
    """A time has the largest unit of which there are two."""
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(999, "999 B"), (999_960, "1.0 MB"), (1_500, "1.5 kB"), (2e9, "2.0 GB"), (3.4e13, "34.0 TB")]
)
def test_sizes_as_people_say_them(count: float, words: str) -> None:
    """A size is in powers of 1,000."""
    assert size(count) == words
