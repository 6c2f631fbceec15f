"""The charts' columns: rates from cumulative points, levels, gaps, several datasets on one grid."""

from __future__ import annotations

import itertools

import pytest

from app.dashboard.series import MOST_CLASSES, Span, build, grid
from app.history import Point


def test_the_grid_ends_now_and_has_even_steps() -> None:
    """A span has its length whatever the points are; the whole run begins at the first point."""
    quarter = grid(Span.QUARTER, now=10_000.0, first=9_990.0)
    assert (quarter[0], quarter[-1], len(quarter)) == (9_100.0, 10_000.0, 181)
    assert grid(Span.SIX_HOURS, now=50_000.0, first=None)[0] == 50_000.0 - 21_600.0
    run = grid(Span.RUN, now=205_200.0, first=0.0)
    assert (run[0], run[-1], len(run)) == (0.0, 205_200.0, 181)
    short = grid(Span.RUN, now=100.0, first=98.0)
    assert short[0] == 40.0
    assert all(later > before for before, later in itertools.pairwise(short))


def test_a_rate_is_the_growth_of_a_count() -> None:
    """Ten samples and 1,000 tokens between two points ten seconds apart are 1/s and 100/s at every moment between."""
    points = [
        Point(at=float(at), accepted=at, tokens=100 * at, queued=50 - at, in_flight=4, bound=8) for at in (0, 10, 20)
    ]
    series = build(Span.QUARTER, [0.0, 5.0, 10.0, 15.0, 20.0], {"a": points}, None)
    assert series.samples_per_s == [None, 1.0, 1.0, 1.0, 1.0]
    assert series.tokens_per_s == [None, 100.0, 100.0, 100.0, 100.0]
    assert series.queued == [50, 50, 40, 40, 30]
    assert series.in_flight == [4] * 5
    assert series.bound == [8] * 5


def test_nothing_is_claimed_across_a_gap_or_outside_the_points() -> None:
    """While no worker wrote points nobody knows what happened: the line is broken, not drawn straight."""
    points = [Point(at=100.0, accepted=0, queued=9), Point(at=110.0, accepted=10, queued=8)]
    points += [Point(at=300.0, accepted=50, queued=5), Point(at=310.0, accepted=60, queued=4)]
    moments = [90.0, 100.0, 110.0, 200.0, 300.0, 310.0, 400.0]
    series = build(Span.QUARTER, moments, {"a": points}, None)
    assert series.samples_per_s == [None, None, 1.0, None, None, 1.0, None]


def test_datasets_are_summed_on_one_grid() -> None:
    """Points of two datasets at different times add up; the bound, which they share, does not."""
    a = [Point(at=float(at), accepted=at, in_flight=3, bound=8) for at in range(0, 41, 10)]
    b = [Point(at=float(at), accepted=2 * at, in_flight=5, bound=8) for at in range(5, 46, 10)]
    series = build(Span.QUARTER, [10.0, 20.0, 30.0, 40.0], {"a": a, "b": b, "idle": []}, None)
    assert series.samples_per_s[1:] == [3.0, 3.0, 3.0]
    assert series.in_flight == [8] * 4
    assert series.bound == [8] * 4


def test_a_count_that_shrank_is_no_negative_rate() -> None:
    """Files that were repaired may hold less than before; a rate is never below zero."""
    points = [Point(at=0.0, accepted=10), Point(at=10.0, accepted=4), Point(at=20.0, accepted=14)]
    assert build(Span.QUARTER, [0.0, 10.0, 20.0], {"a": points}, None).samples_per_s == [None, 0.0, 1.0]


def test_failures_are_shown_by_class_and_rare_ones_together() -> None:
    """The classes with the most failures have lines of their own; the rest is one line, and nothing is lost."""
    names = {f"kind{n}": n for n in range(1, MOST_CLASSES + 4)}
    points = [Point(at=0.0), Point(at=10.0, failed_by=names)]
    failures = build(Span.QUARTER, [0.0, 10.0], {"a": points}, None).failures
    assert len(failures) == MOST_CLASSES
    assert next(iter(failures)) == f"kind{MOST_CLASSES + 3}"
    assert sum(column[-1] or 0 for column in failures.values()) == sum(names.values())
    assert failures["other"][0] == 0


def test_a_run_that_begins_within_a_step_is_in_it() -> None:
    """What a run finishes in its first seconds counts, although nothing is known of the time before."""
    points = [Point(at=12.0, accepted=0), Point(at=18.0, accepted=6), Point(at=30.0, accepted=6)]
    assert build(Span.QUARTER, [0.0, 10.0, 20.0, 30.0], {"a": points}, None).samples_per_s == [None, None, 0.6, 0.0]


def test_the_newest_moment_is_not_empty_between_two_points() -> None:
    """Right after a point the line goes on as before, for one more interval and no longer."""
    points = [Point(at=0.0, accepted=0), Point(at=10.0, accepted=20)]
    rates = build(Span.QUARTER, [0.0, 5.0, 10.0, 15.0, 20.0, 25.0], {"a": points}, None).samples_per_s
    assert rates == [None, 2.0, 2.0, 2.0, 2.0, None]


@pytest.mark.parametrize("points", [{}, {"a": []}])
def test_without_points_there_are_empty_columns(points: dict[str, list[Point]]) -> None:
    """A run that has not begun has charts of the right length with nothing in them."""
    series = build(Span.QUARTER, [0.0, 1.0, 2.0], points, None)
    assert series.samples_per_s == series.in_flight == series.bound == series.queued == [None] * 3
    assert series.latency_p95_s == [None] * 3
    assert series.failures == {}
