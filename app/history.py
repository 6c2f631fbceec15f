"""The stored points of a dataset's charts: one line of `progress.jsonl` each, found again by their time."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from app import jsonl
from app.histogram import add_up
from app.places import DatasetFolder
from app.snapshot import Part, Snapshot

_USUAL_BYTES = 512
"""What a line hardly exceeds: a stretch of fewer bytes than the points asked for take is read whole."""
_CHUNK = 4096
_NEAR = 4
"""A pause of more than so many usual distances between points is a gap: no worker ran."""
_SHORTEST_GAP_S = 30.0

_Item = TypeVar("_Item")


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=2):
    """A dataset at one moment, in cumulative counts; what was not known is null."""

    at: float
    """Unix seconds by Redis' clock, whichever machine wrote it; never less than in the line before."""
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    left: int = 0
    """Samples without a final record."""
    tokens: int = 0
    """Completion tokens of all accepted samples."""
    queued: int | None = None
    in_flight: int | None = None
    bound: int | None = None
    """Requests that all model servers together may be sent at once."""
    failed_by: dict[str, int] = {}
    """Kind of fault -> samples on disk as failed for it."""
    faults: dict[str, int] = {}
    """Kind of fault -> failed calls, asked again or not; since Redis knows the dataset."""
    latency_p95_s: float | None = None
    """Of the calls answered since a point shortly before."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two points, per second; all null across a gap."""

    at: float
    """Unix seconds of the later point."""
    since: float
    """Unix seconds of the earlier point."""
    samples_per_s: float | None = None
    """Accepted samples."""
    tokens_per_s: float | None = None
    rejected_per_s: float | None = None
    failed_per_s: float | None = None
    faults_per_s: float | None = None
    """Failed calls."""


_decode = msgspec.json.Decoder(Point).decode


def make_point(snapshot: Snapshot, part: Part, *, at: float, latency_p95_s: float | None = None) -> Point:
    """Return what a chart needs of a dataset's part of a snapshot that was taken `at` Unix seconds."""
    counts = part.counts
    bounds = [endpoint.bound for endpoint in snapshot.endpoints if endpoint.bound is not None]
    return Point(
        at=round(at, 3),
        accepted=counts.accepted,
        rejected=counts.rejected,
        failed=counts.failed,
        left=counts.left,
        tokens=part.tokens.total,
        queued=counts.queued,
        in_flight=counts.in_flight,
        bound=sum(bounds) if bounds else None,
        failed_by=part.reasons.get("failed", {}),
        faults=part.call_faults,
        latency_p95_s=latency_p95_s,
    )


def encode(point: Point) -> bytes:
    r"""Return the line of a point, `\n` included."""
    return msgspec.json.encode(point) + b"\n"


def last_at(tail: bytes) -> float:
    """Return when the last whole point in the end of a file was taken; 0 where there is none."""
    return next((point.at for line in reversed(tail.split(b"\n")) if (point := _point(line)) is not None), 0.0)


# Reading


def read_points(
    folder: DatasetFolder, *, since: float | None = None, until: float | None = None, most: int = 400
) -> list[Point]:
    """Return at most `most` points with since <= at <= until, oldest first; the first and the last are among them.

    More than that are thinned out evenly. The file is searched, not read: torn lines, and lines of another form, are
    passed over. Where there is no file there is no point.
    Raises StoreError when the file cannot be read.
    """
    path = folder.progress_log
    with jsonl.translated(path), contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb", buffering=0))
        except FileNotFoundError:
            return []
        log = _Log(file.fileno())
        begin = 0 if since is None else log.find(since)
        end = log.size if until is None else log.find(until, after=True)
        points = log.read(begin, end) if end - begin <= most * _USUAL_BYTES else log.pick(begin, end, most)
    low, high = since or 0.0, float("inf") if until is None else until
    return thin([point for point in points if low <= point.at <= high], most)


class _Log:
    """An open file of points, ordered by time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def find(self, at: float, *, after: bool = False) -> int:
        """Return where the first line begins that is not before `at` (with `after`: the first one after it)."""
        low, high = 0, self.size
        while high - low > _CHUNK:
            middle = (low + high) // 2
            found = self._next(middle, high)
            if found is None or _beyond(found[2], at, after=after):
                high = middle
            else:
                low = found[1]
        for begin, _end, point in self._lines(low, self.size):
            if _beyond(point, at, after=after):
                return begin
        return self.size

    def read(self, begin: int, end: int) -> list[Point]:
        """Return every point of a stretch that begins with a line."""
        data = os.pread(self._descriptor, max(0, end - begin), begin)
        return [point for line in data.split(b"\n") if (point := _point(line)) is not None]

    def pick(self, begin: int, end: int, most: int) -> list[Point]:
        """Return about `most` points, evenly distributed over a stretch, its first and last among them."""
        points, place = list[Point](), begin
        for number in range(most - 1):
            found = self._next(max(place, begin + (end - begin) * number // max(1, most - 1)), end)
            if found is None:
                break
            place = found[1]
            points.append(found[2])
        last = self._last(place, end)
        return points if last is None else [*points, last]

    def _last(self, begin: int, end: int) -> Point | None:
        width = _CHUNK
        while True:
            found = self.read(self._line_begin(max(begin, end - width), end), end)
            if found or end - width <= begin:
                return found[-1] if found else None
            width *= 4

    def _next(self, place: int, end: int) -> tuple[int, int, Point] | None:
        """Return the first point whose line begins at `place` or behind it, before `end`, with its line's place."""
        return next(self._lines(self._line_begin(place, end), end), None)

    def _line_begin(self, place: int, end: int) -> int:
        """Return where the first line begins at `place` or behind it."""
        if place == 0:
            return 0
        place -= 1
        while place < end:
            chunk = os.pread(self._descriptor, _CHUNK, place)
            newline = chunk.find(b"\n")
            if newline >= 0:
                return place + newline + 1
            if not chunk:
                break
            place += len(chunk)
        return end

    def _lines(self, begin: int, end: int) -> Iterator[tuple[int, int, Point]]:
        """Yield the points whose lines begin in a stretch that begins with a line, as (begin, end, point)."""
        rest, place, width = b"", begin, _CHUNK
        while place < end:
            chunk = os.pread(self._descriptor, width, place + len(rest))
            if not chunk:
                return
            width = min(1 << 20, 4 * width)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                after = place + len(line) + 1
                if place < end and (point := _point(line)) is not None:
                    yield place, after, point
                place = after


def _beyond(point: Point, at: float, *, after: bool) -> bool:
    return point.at > at if after else point.at >= at


def _point(line: bytes) -> Point | None:
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def thin(points: Sequence[_Item], most: int) -> list[_Item]:
    """Return at most `most` of the points or moments (two at least), evenly chosen, the first and last among them."""
    if len(points) <= max(2, most):
        return list(points)
    last, steps = len(points) - 1, max(2, most) - 1
    return [points[last * step // steps] for step in range(steps + 1)]


# Charts


def rates_between(points: Sequence[Point]) -> list[Pace]:
    """Return what happened between each two neighbours.

    Where points are missing nobody wrote them down, and all is null. Counts that went down (samples that are asked
    again, a file that was cut) are no negative rate; failed calls that went down were counted anew from 0.
    """
    gap = gap_s(points)
    return [_pace(before, now, gap) for before, now in itertools.pairwise(points)]


def gap_s(points: Sequence[Point]) -> float:
    """Return the seconds between two points from which they are no neighbours."""
    distances = [now.at - before.at for before, now in itertools.pairwise(points)]
    return max(_SHORTEST_GAP_S, _NEAR * statistics.median(distances)) if distances else _SHORTEST_GAP_S


def _pace(before: Point, now: Point, gap: float) -> Pace:
    span = now.at - before.at
    if not 0 < span <= gap:
        return Pace(at=now.at, since=before.at)
    old, new = sum(before.faults.values()), sum(now.faults.values())
    return Pace(
        at=now.at,
        since=before.at,
        samples_per_s=max(0, now.accepted - before.accepted) / span,
        tokens_per_s=max(0, now.tokens - before.tokens) / span,
        rejected_per_s=max(0, now.rejected - before.rejected) / span,
        failed_per_s=max(0, now.failed - before.failed) / span,
        faults_per_s=(new - old if new >= old else new) / span,
    )


_SUMMED = ("accepted", "rejected", "failed", "left", "tokens")


def combine_points(series: Iterable[Sequence[Point]], *, most: int = 400) -> list[Point]:
    """Return the points of all datasets together, at the moments at which one of them has a point.

    Between two of its points a dataset's counts are interpolated; before its first and after its last they are held,
    and it has nothing queued or in flight there. The latency is that of the slowest dataset.
    """
    known = [_Series(points) for points in series if points]
    moments = sorted({point.at for one in known for point in one.points})
    if len(known) == 1:
        return thin(known[0].points, most)
    return [_sum(at, known) for at in thin(moments, most)]


class _Series:
    """One dataset's points, at any moment."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        self._times = [point.at for point in points]
        self._gap = gap_s(points)

    def counts(self, at: float) -> list[float]:
        """Return the summed fields at that moment."""
        after = bisect.bisect_left(self._times, at)
        if after == 0 or after == len(self.points):
            point = self.points[min(after, len(self.points) - 1)]
            return [getattr(point, field) for field in _SUMMED]
        before, now = self.points[after - 1], self.points[after]
        share = (at - before.at) / (now.at - before.at) if now.at > before.at else 1.0
        return [getattr(before, field) + (getattr(now, field) - getattr(before, field)) * share for field in _SUMMED]

    def latest(self, at: float) -> Point:
        """Return the last point not after that moment; before all of them, the first."""
        return self.points[max(0, bisect.bisect_right(self._times, at) - 1)]

    def live(self, at: float) -> Point | None:
        """Return the same, unless it is from before a gap."""
        point = self.latest(at)
        return point if 0 <= at - point.at < self._gap else None


def _sum(at: float, known: Sequence[_Series]) -> Point:
    sums = [round(sum(values)) for values in zip(*(one.counts(at) for one in known), strict=True)]
    lively = [point for one in known if (point := one.live(at)) is not None]
    latest = [one.latest(at) for one in known]
    return Point(
        at=at,
        **dict(zip(_SUMMED, sums, strict=True)),
        queued=_add(point.queued for point in lively),
        in_flight=_add(point.in_flight for point in lively),
        bound=max((point.bound for point in lively if point.bound is not None), default=None),
        failed_by=add_up(point.failed_by for point in latest),
        faults=add_up(point.faults for point in latest),
        latency_p95_s=max((point.latency_p95_s for point in lively if point.latency_p95_s is not None), default=None),
    )


def _add(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
