"""A picture: a snapshot with what a screen shows beside it, made of Redis or of the files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from app import history
from app.errors import StoreError
from app.failures import FailureBook
from app.history import Pace, Point
from app.places import dataset_folder
from app.records import Kind
from app.snapshot import Snapshot
from producer.monitor.files import fill_in

ALL = ""
"""The key of all datasets together."""
STEP_S = 15.0
STEPS = 60
_SHOWN_EXAMPLES = 4
_EXAMPLE_CHARS = 200


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A class of failures, by its newest sample."""

    reason: str
    error: str
    """The newest one's words."""
    last_at: float | None = None
    """Unix seconds."""


class Picture(Snapshot, frozen=True, kw_only=True):
    """A snapshot, and what a screen shows beside it."""

    step_s: float = STEP_S
    paces: dict[str, list[float | None]] = msgspec.field(default_factory=dict)
    """Dataset -> accepted samples per second in steps of `step_s` up to now; null where nobody wrote them down. The
    empty name holds those of all datasets together."""
    examples: dict[str, list[Example]] = msgspec.field(default_factory=dict)
    """Dataset -> its classes of failures, the most recent first."""
    told_at: float | None = None
    """Without Redis: when a worker last wrote what only it knew (rates, servers, workers); null while Redis answers."""


class PictureTaker:
    """Takes pictures; it remembers how far it has read the files of failures."""

    def __init__(self, take: Callable[[], Snapshot], prepared: Path) -> None:
        self._take = take
        self._prepared = prepared
        self._books: dict[str, FailureBook] = {}

    def __call__(self) -> Picture:
        """Take one; where Redis cannot be reached the files fill in.

        Raises UsageError for a dataset that does not exist.
        """
        snapshot, told_at = self._take(), None
        if not snapshot.broker.reachable:
            snapshot, told_at = fill_in(snapshot, self._prepared)
        known = {field: getattr(snapshot, field) for field in Snapshot.__struct_fields__}
        return Picture(
            **known,
            paces=self._paces(snapshot),
            examples={name: found for name in snapshot.datasets if (found := self._examples(name, snapshot))},
            told_at=told_at,
        )

    def _paces(self, snapshot: Snapshot) -> dict[str, list[float | None]]:
        since = snapshot.at - STEPS * STEP_S
        points = {name: self._points(name, since=since) for name in snapshot.datasets}
        if len(points) > 1:
            points[ALL] = history.combine_points(points.values())
        return {name: by_steps(history.rates_between(one), until=snapshot.at) for name, one in points.items() if one}

    def _points(self, dataset: str, *, since: float) -> list[Point]:
        try:
            return history.read_points(dataset_folder(self._prepared, dataset), since=since)
        except StoreError:
            return []  # whoever counts the records tells of it

    def _examples(self, dataset: str, snapshot: Snapshot) -> list[Example]:
        counted = snapshot.datasets[dataset].reasons.get(Kind.FAILED, {})
        if not counted:
            return []
        book = self._books.setdefault(dataset, FailureBook(dataset_folder(self._prepared, dataset)))
        try:
            groups = book.look()
        except StoreError:
            return []
        found = [group for group in groups if group.kind is Kind.FAILED and group.reason in counted]
        return [
            Example(reason=group.reason, error=group.error[:_EXAMPLE_CHARS], last_at=group.last_at)
            for group in found[:_SHOWN_EXAMPLES]
        ]


def by_steps(paces: Sequence[Pace], *, until: float, steps: int = STEPS, step_s: float = STEP_S) -> list[float | None]:
    """Return the mean samples per second of each step up to `until`, oldest first.

    Steps begin at whole multiples of their length, so that a later look shifts them and changes none but the last.
    """
    last = math.floor(until / step_s)
    sums: dict[int, tuple[float, float]] = {}
    for pace in paces:
        if pace.samples_per_s is None:
            continue
        for number in range(math.floor(pace.since / step_s), math.floor(pace.at / step_s) + 1):
            overlap = min(pace.at, (number + 1) * step_s) - max(pace.since, number * step_s)
            samples, seconds = sums.get(number, (0.0, 0.0))
            sums[number] = (samples + pace.samples_per_s * overlap, seconds + overlap)
    return [_mean(sums, number, step_s) for number in range(last - steps + 1, last + 1)]


def _mean(sums: Mapping[int, tuple[float, float]], number: int, step_s: float) -> float | None:
    samples, seconds = sums.get(number, (0.0, 0.0))
    return round(samples / seconds, 3) if seconds >= step_s / 5 else None
