"""Stored points: found by their time in a long file, whatever else stands in it, and turned into honest rates."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.history import Pace, Point, combine_points, encode, rates_between, read_points, thin
from app.places import DatasetFolder

START = 1_700_000_000.0
WEEK = 7 * 24 * 360
"""Points of a week, one every ten seconds."""


def point(number: int, **fields: object) -> Point:
    """Return the point at ten times `number` seconds, with 30 samples and 3,000 tokens more than the one before."""
    values = {
        "accepted": 30 * number,
        "tokens": 3000 * number,
        "left": 10**6 - 30 * number,
        "in_flight": 8,
        "queued": 9,
    }
    return Point(at=START + 10 * number, **{**values, **fields})  # type: ignore[arg-type]


def write(path: Path, points: list[Point]) -> DatasetFolder:
    """Write a progress.jsonl."""
    folder = DatasetFolder(path)
    folder.progress_log.write_bytes(b"".join(map(encode, points)))
    return folder


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> DatasetFolder:
    """Return a folder with the points of a week, as a worker writes them."""
    rich = {"failed_by": {"timeout": 3}, "faults": {"connection_lost": 5}, "bound": 128, "latency_p95_s": 40.125}
    return write(tmp_path_factory.mktemp("week"), [point(number, **rich) for number in range(WEEK)])


def test_no_file_has_no_points(tmp_path: Path) -> None:
    """A dataset that nobody has worked on has an empty chart."""
    assert read_points(DatasetFolder(tmp_path)) == []
    assert read_points(write(tmp_path, [])) == []


def test_a_line_is_small(week: DatasetFolder) -> None:
    """A week at ten seconds is less than 20 MB: 300 bytes a line."""
    assert week.progress_log.stat().st_size / WEEK < 300


@pytest.mark.parametrize("most", [2, 90, 400])
def test_a_week_is_thinned_evenly(week: DatasetFolder, most: int) -> None:
    """At most so many points, the first and the last among them, and no hole between them."""
    points = read_points(week, most=most)
    assert len(points) <= most
    assert (points[0].accepted, points[-1].accepted) == (0, 30 * (WEEK - 1))
    distances = [later.at - earlier.at for earlier, later in itertools.pairwise(points)]
    assert min(distances) > 0
    assert max(distances) <= 1.5 * 10 * WEEK / (most - 1)


@given(st.integers(0, WEEK - 1), st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_a_stretch_is_found_by_its_time(week: DatasetFolder, first: int, length: int) -> None:
    """Exactly the points from `since` to `until` are read, wherever in the file they stand."""
    last = min(WEEK - 1, first + length)
    points = read_points(week, since=START + 10 * first - 0.5, until=START + 10 * last + 0.5)
    assert [one.accepted for one in points] == [30 * number for number in range(first, last + 1)]


def test_nothing_lies_outside_the_file(week: DatasetFolder) -> None:
    """A time before the first or after the last point has none."""
    assert read_points(week, until=START - 1) == []
    assert read_points(week, since=START + 10 * WEEK) == []


def test_a_week_is_read_quickly(week: DatasetFolder) -> None:
    """The last six hours, the last quarter of an hour and all of a week take under 20 ms of CPU each."""
    for since in (START + 10 * WEEK - 900, START + 10 * WEEK - 21600, None):
        costs = []
        for _turn in range(3):
            started = time.process_time()
            read_points(week, since=since)
            costs.append(time.process_time() - started)
        assert min(costs) < 0.02


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """Halves of lines, lines of an older form, other people's text and a tail without newline lose no point."""
    folder = DatasetFolder(tmp_path)
    junk = [
        b'{"schema": 1, "at": 17, "counts": {"accepted": 9}}\n',
        b'{"at": 12\n',
        b"\xff\xfe\n",
        b"\n",
        b"x" * 9000 + b"\n",
    ]
    with folder.progress_log.open("wb") as file:
        for number in range(2000):
            file.write(encode(point(number)) + junk[number % len(junk)])
        file.write(encode(point(2000))[:-20])
    points = read_points(folder, since=START + 5000, until=START + 5090)
    assert [one.accepted for one in points] == [30 * number for number in range(500, 510)]
    assert read_points(folder)[-1].accepted == 30 * 1999
    assert len(read_points(folder, since=START + 1000, until=START + 9990, most=5000)) == 900


def test_rates_are_those_between_two_points() -> None:
    """Samples and tokens per second, also between points that were thinned out."""
    (pace, *_rest) = rates_between([point(number) for number in range(0, 90, 9)])
    assert (pace.since, pace.at, pace.samples_per_s, pace.tokens_per_s) == (START, START + 90, 3.0, 300.0)
    assert rates_between([point(1)]) == []


def test_a_gap_is_a_gap() -> None:
    """While no worker ran nobody wrote points: there is no rate, not a small one."""
    points = [*(point(number) for number in range(10)), *(point(number, accepted=300) for number in range(500, 510))]
    gap = rates_between(points)[9]
    assert gap == Pace(at=START + 5000, since=START + 90)
    assert rates_between(points)[10].samples_per_s == 0.0


def test_counts_that_go_down_are_no_negative_rate() -> None:
    """A retry takes failures back, an edited file takes records away, an emptied Redis counts faults anew."""
    before = point(1, failed=9, faults={"timeout": 9, "connect": 1})
    after = point(2, accepted=10, failed=2, faults={"timeout": 5})
    (pace,) = rates_between([before, after])
    assert (pace.samples_per_s, pace.failed_per_s, pace.faults_per_s) == (0.0, 0.0, 0.5)


def test_datasets_are_added_up_at_every_moment() -> None:
    """Counts are interpolated between a dataset's points; what is in flight counts where it is known."""
    first = [point(number) for number in range(20)]
    second = [
        Point(at=START + 5 + 20 * number, accepted=100 * number, in_flight=2, latency_p95_s=9.0) for number in range(5)
    ]
    points = combine_points([first, second, []])
    at = {one.at: one for one in points}
    assert at[START + 40].accepted == 120 + 175
    assert (at[START + 40].in_flight, at[START + 40].latency_p95_s) == (10, 9.0)
    assert at[START + 190].accepted == 30 * 19 + 400, "a dataset that is done keeps its count"
    assert at[START + 190].in_flight == 8
    assert [one.accepted for one in points] == sorted(one.accepted for one in points)
    assert combine_points([first]) == first
    assert combine_points([]) == []


def test_many_moments_are_thinned() -> None:
    """The combination of long series has no more points than asked for."""
    series = [[point(number) for number in range(1000)], [point(number + 0) for number in range(1000)]]
    assert len(combine_points(series, most=100)) == 100
    assert len(thin(series[0], 7)) == 7
