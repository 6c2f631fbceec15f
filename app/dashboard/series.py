"""Turns stored points into the columns of the charts: one grid of moments for all datasets. Pure arithmetic."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from app.history import Point

STEPS = 180
"""Grid steps of a chart: about as many as a phone has pixels for."""
SHORTEST_STEP_S = 5.0
_GAP_STEPS = 3.0
_GAP_S = 45.0
"""Points further apart than this, and than three steps, have a gap between them: nobody knows what happened there."""
MOST_CLASSES = 6


class Span(enum.StrEnum):
    """How far a chart looks back."""

    QUARTER = "15m"
    SIX_HOURS = "6h"
    RUN = "run"


SECONDS = {Span.QUARTER: 900.0, Span.SIX_HOURS: 21600.0}

Column = list[float | None]
"""One value for each moment; None where nothing is known."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """What the charts draw."""

    span: str
    dataset: str | None
    t: list[float]
    """Unix seconds, evenly spaced."""
    samples_per_s: Column
    tokens_per_s: Column
    in_flight: Column
    bound: Column
    queued: Column
    latency_p95_s: Column
    """Of the slowest dataset."""
    failures: dict[str, Column]
    """Kind of fault -> samples that were given up for it since the beginning; rare ones together as `other`."""


def grid(span: Span, *, now: float, first: float | None) -> list[float]:
    """Return the moments of a chart; the whole run begins at `first`, the oldest point."""
    seconds = SECONDS.get(span) or max(60.0, now - (first if first is not None else now))
    step = max(SHORTEST_STEP_S, seconds / STEPS)
    count = int(seconds // step)
    return [now - step * back for back in range(count, -1, -1)]


def build(span: Span, moments: Sequence[float], points: Mapping[str, Sequence[Point]], dataset: str | None) -> Series:
    """Return the columns of all the datasets together; `points` are each one's, oldest first."""
    every = [Track(one, moments) for one in points.values() if one]
    classes = sorted({name for track in every for name in track.latest.failed_by})
    failures = {name: _sum(track.level(_failed_by(name)) for track in every) for name in classes}
    return Series(
        span=span.value,
        dataset=dataset,
        t=[round(moment, 1) for moment in moments],
        samples_per_s=_rounded(_sum(track.rate(lambda point: point.accepted) for track in every), moments),
        tokens_per_s=_rounded(_sum(track.rate(lambda point: point.tokens) for track in every), moments),
        in_flight=_sum((track.level(lambda point: point.in_flight) for track in every), moments),
        bound=_largest((track.level(lambda point: point.bound) for track in every), moments),
        queued=_sum((track.level(lambda point: point.queued) for track in every), moments),
        latency_p95_s=_largest((track.level(lambda point: point.latency_p95_s) for track in every), moments),
        failures=_gathered(failures),
    )


def _failed_by(name: str) -> Callable[[Point], float]:
    return lambda point: point.failed_by.get(name, 0)


class Track:
    """One dataset's points, read at the moments of a grid."""

    def __init__(self, points: Sequence[Point], moments: Sequence[float]) -> None:
        self._points = points
        self._at = [point.at for point in points]
        self._moments = moments
        self._step_s = moments[1] - moments[0] if len(moments) > 1 else SHORTEST_STEP_S
        self._gap_s = max(_GAP_S, _GAP_STEPS * self._step_s)

    @property
    def latest(self) -> Point:
        """The newest point."""
        return self._points[-1]

    def level(self, read: Callable[[Point], float | None]) -> Column:
        """Return the value of the last point before each moment; None where that one is too old."""
        column: Column = []
        for moment in self._moments:
            place = bisect.bisect_right(self._at, moment) - 1
            near = place >= 0 and moment - self._at[place] <= self._gap_s
            column.append(read(self._points[place]) if near else None)
        return column

    def rate(self, read: Callable[[Point], float]) -> Column:
        """Return what a cumulative count grew by per second since the moment before; None across a gap."""
        sums = [self._between(moment, read) for moment in self._moments]
        column: Column = [None]
        for (before, after), (start, end) in zip(pairwise(sums), pairwise(self._moments), strict=True):
            known = before is not None and after is not None
            column.append(max(0.0, after - before) / (end - start) if known else None)  # type: ignore[operator]
        return column[: len(self._moments)]

    def _between(self, moment: float, read: Callable[[Point], float]) -> float | None:
        """Return a cumulative count at a moment, on a straight line between the points around it."""
        right = bisect.bisect_left(self._at, moment)
        if right == len(self._at):  # after the newest point
            fresh = moment - self._at[-1] <= self._gap_s
            return None if not fresh else self._extended(moment, read)
        if self._at[right] == moment:
            return read(self._points[right])
        if right == 0:  # the step in which a run begins
            return read(self._points[0]) if self._at[0] - moment < self._step_s else None
        left, begin, end = right - 1, self._at[right - 1], self._at[right]
        if end - begin > self._gap_s:
            return None
        share = (moment - begin) / (end - begin)
        low, high = read(self._points[left]), read(self._points[right])
        return low + share * (high - low)

    def _extended(self, moment: float, read: Callable[[Point], float]) -> float | None:
        """Return the count after the newest point, as if all went on as between the last two for one more interval."""
        if len(self._at) < 2:
            return None
        begin, end = self._at[-2], self._at[-1]
        if end <= begin or end - begin > self._gap_s or moment - end > end - begin:
            return None
        low, high = read(self._points[-2]), read(self._points[-1])
        return high + (high - low) * (moment - end) / (end - begin)


def _sum(columns: Iterable[Column], moments: Sequence[float] = ()) -> Column:
    rows = list(zip(*columns, strict=True))
    if not rows:
        return [None] * len(moments)
    return [None if all(v is None for v in row) else sum(v or 0 for v in row) for row in rows]


def _largest(columns: Iterable[Column], moments: Sequence[float]) -> Column:
    rows = list(zip(*columns, strict=True))
    if not rows:
        return [None] * len(moments)
    return [max((v for v in row if v is not None), default=None) for row in rows]


def _rounded(column: Column, moments: Sequence[float]) -> Column:
    if not column:
        return [None] * len(moments)
    return [None if value is None else float(f"{value:.4g}") for value in column]


def _gathered(failures: dict[str, Column]) -> dict[str, Column]:
    """Return the classes with the most failures, and the rest together."""

    def most(name: str) -> float:
        return max((value for value in failures[name] if value is not None), default=0)

    names = [name for name in sorted(failures, key=most, reverse=True) if most(name) > 0]
    if len(names) <= MOST_CLASSES:
        return {name: failures[name] for name in names}
    kept, rest = names[: MOST_CLASSES - 1], names[MOST_CLASSES - 1 :]
    return {**{name: failures[name] for name in kept}, "other": _sum(failures[name] for name in rest)}
