"""Queues several datasets side by side: each is read by a thread of its own, and they take turns by weight.

Whose turn it is: of the datasets that have a sample at hand, the one that has come the least far for its weight. One
that is slow to read lets the others pass and catches up; one that cannot be read or written drops out alone. Of the
room in Redis every dataset has a small part to itself, so that one whose workers are paused does not block the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import operator
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import cast

from app import broker
from app.broker import BrokerUrl
from app.errors import BrokerError, MillError, SourceError
from app.queue import Queue
from app.records import Kind, Sample
from producer.enqueue import Counts, Enqueuer, Portion, Report, Retry
from producer.reading import Opened
from producer.recipe import Planned
from producer.samples import Batch

_READ_AHEAD = 1
"""Batches that wait, read, beside the one that is being queued and the one that is being read."""
_LOOK_EVERY_S = 0.25
_PARTING_S = 1.0
"""How long the end waits for readers, which may hang in a network call."""
_SLICE = 100
"""Samples of one dataset that are queued in a row, at most."""
_SLICES_OF_ROOM = 8
_RESERVES_OF_ROOM = 4

OnWait = Callable[[int], None]
Open = Callable[[Planned, OnWait], Opened]
"""Opens a dataset's input; the second argument hears how many rows a shuffle has read, before it gives the first."""
Begin = Callable[[Planned, Opened], Enqueuer]
"""Makes a dataset's folder ready."""


class Stage(enum.StrEnum):
    """How far a dataset's pass is."""

    OPENING = "opening"
    READING = "reading"
    COMPLETE = "complete"
    FAILED = "failed"


class _StoppedError(Exception):
    """A reader was told to stop."""


@dataclasses.dataclass(frozen=True)
class _End:
    """Nothing more comes of a reader."""

    error: BaseException | None = None

    def check(self) -> None:
        """Raise what ended it early: a MillError, unless it is a fault of ours."""
        if isinstance(self.error, OSError):
            where = f"{self.error.filename}: " if self.error.filename else ""
            raise SourceError(f"{where}{self.error.strerror or self.error}.") from self.error
        if self.error is not None:
            raise self.error


class _Reader:
    """Reads one input in a thread of its own, a little ahead of who queues it."""

    def __init__(self, open_input: Callable[[OnWait], Opened], *, news: threading.Event) -> None:
        """`news` is set whenever something was read."""
        self._open = open_input
        self._news = news
        self._stop = threading.Event()
        self._items: queue.Queue[Opened | Portion | _End] = queue.Queue(_READ_AHEAD)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.shuffled = 0
        """Rows that a shuffle has read so far, before it gives the first."""

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def poll(self) -> Opened | Portion | _End | None:
        """Return what was read next; None if nothing waits."""
        try:
            return self._items.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Tell the reader to end soon."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            opened = self._open(self._hear)
            self._give(opened)
            # Closed here, for a generator's temporary databases belong to the thread that made them.
            with contextlib.closing(cast("Generator[Batch]", opened.batches)) as batches:
                for batch in batches:
                    self._give(Portion.of(opened.rows, batch))
            self._give(_End())
        except _StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 it is raised where the item is taken
            with contextlib.suppress(_StoppedError):
                self._give(_End(error))

    def _hear(self, rows: int) -> None:
        self.shuffled = rows
        self._check()

    def _check(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _give(self, item: Opened | Portion | _End) -> None:
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                self._items.put(item, timeout=_LOOK_EVERY_S)
                self._news.set()
                return


class Strand:
    """One dataset on its way into the queue."""

    def __init__(self, planned: Planned, reader: _Reader) -> None:
        self.planned = planned
        self.stage = Stage.OPENING
        self.trouble: MillError | None = None
        """Why it failed."""
        self.opened: Opened | None = None
        self.samples: list[Sample] = []
        """Those that wait for their turn."""
        self.before: dict[str, Kind] = {}
        self.taken = 0
        """Samples that were queued or found to be recorded."""
        self.enqueuer: Enqueuer | None = None
        self.reader = reader

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.stage in {Stage.COMPLETE, Stage.FAILED}

    @property
    def way(self) -> float:
        """How far it has come for its weight."""
        return self.taken / self.planned.weight

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self.enqueuer.counts if self.enqueuer is not None else Counts()

    def report(self) -> Report | None:
        """Return how it ended; None if it was never opened."""
        if self.enqueuer is None or self.opened is None:
            return None
        complete = self.stage is Stage.COMPLETE
        return self.enqueuer.report(self.opened.rows, complete=complete, trouble=self.trouble)

    def fail(self, error: MillError) -> None:
        """Take no further part."""
        self.stage, self.trouble, self.samples = Stage.FAILED, error, []
        self.reader.stop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """The room in Redis that the datasets share."""

    books: Queue
    max_pending: int

    def beside(self, others: Sequence[Strand]) -> int:
        """Return how many samples of a dataset may be queued now, so that a little is left for the others."""
        reserve = self._reserve(len(others) + 1)
        depth = self.books.depth()
        if depth + reserve * len(others) < self.max_pending:
            return self.max_pending - depth - reserve * len(others)
        kept = sum(max(0, reserve - self.books.depth(other.planned.name)) for other in others)
        return max(0, self.max_pending - depth - kept)

    def slice_of(self, datasets: int) -> int:
        """Return how many samples of a dataset are queued in a row."""
        return max(1, min(_SLICE, self.max_pending // (_SLICES_OF_ROOM * datasets)))

    def _reserve(self, datasets: int) -> int:
        if self.max_pending < 2 * datasets:
            return 0
        return max(1, self.max_pending // (_RESERVES_OF_ROOM * datasets))


class Run:
    """Queues the samples of several datasets until all inputs are at their end, or it is told to stop."""

    def __init__(
        self,
        plan: Sequence[Planned],
        *,
        url: BrokerUrl,
        room: Room,
        open_input: Open,
        begin: Begin,
        retry: Retry,
        stopping: Callable[[], bool],
        on_progress: Callable[[Run], None],
        on_failure: Callable[[str, MillError], None],
        on_wait: Callable[[str], None],
    ) -> None:
        """`stopping` is asked between steps.

        `on_failure` hears at once which dataset drops out and why, `on_wait` why nothing more is queued while there is
        no room.
        """
        self._news = threading.Event()
        self.strands = [
            Strand(one, _Reader(lambda on_wait, one=one: open_input(one, on_wait), news=self._news))  # type: ignore[misc]
            for one in plan
        ]
        self._url = url
        self._room = room
        self._begin = begin
        self._retry = retry
        self._stopping = stopping
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._on_wait = on_wait
        self.trouble: MillError | None = None
        """What ended all of it early, if it was no signal."""

    @property
    def total(self) -> Counts:
        """What was done so far over all datasets."""
        names = [field.name for field in dataclasses.fields(Counts)]
        parts = [Counts(), *(one.counts for one in self.strands)]
        return Counts(**{name: functools.reduce(operator.add, [getattr(one, name) for one in parts]) for name in names})

    def run(self) -> None:
        """Queue everything; what went wrong stands at the strands and in `trouble`."""
        for strand in self.strands:
            strand.reader.start()
        try:
            with broker.translated(self._url):
                while not self._stopping() and self._step():
                    self._on_progress(self)
        except BrokerError as error:
            self.trouble = error
        finally:
            _part([strand.reader for strand in self.strands])

    def _step(self) -> bool:
        """Take in what was read and queue the next samples, or wait a moment; tell whether there is more to do."""
        self._news.clear()
        for strand in self.strands:
            self._take_in(strand)
        going = [strand for strand in self.strands if not strand.is_over]
        turn = self._next(going)
        if turn is None:
            if going:
                self._news.wait(_LOOK_EVERY_S)
            return bool(going)
        strand, count = turn
        if strand.enqueuer is not None:
            part, strand.samples = strand.samples[:count], strand.samples[count:]
            strand.enqueuer.queue(part, strand.before)
            strand.taken += len(part)
        return True

    def _take_in(self, strand: Strand) -> None:
        if strand.samples or strand.is_over:
            return
        item = strand.reader.poll()
        try:
            if isinstance(item, _End):
                item.check()
                strand.stage = Stage.COMPLETE
            elif isinstance(item, Portion):
                self._admit(strand, item)
            elif item is not None:
                strand.opened = item
                strand.enqueuer = self._begin(strand.planned, item)
                strand.stage = Stage.READING
        except BrokerError:
            raise  # it ends them all
        except MillError as error:
            strand.fail(error)
            self._on_failure(strand.planned.name, error)

    def _admit(self, strand: Strand, portion: Portion) -> None:
        if strand.enqueuer is None:
            return
        recorded = strand.counts.recorded
        wanted = strand.enqueuer.admit(portion, self._retry)
        strand.samples, strand.before = wanted.samples, wanted.before
        strand.taken += strand.counts.recorded - recorded

    def _next(self, going: Sequence[Strand]) -> tuple[Strand, int] | None:
        """Return whose turn it is and for how many samples; None while nobody can go on."""
        ready = sorted((strand for strand in going if strand.samples), key=lambda strand: strand.way)
        paused: list[str] = []
        for strand in ready:
            room = self._room.beside([other for other in going if other is not strand])
            if room:
                return strand, min(room, self._room.slice_of(len(going)))
            if not self._room.books.pause_reason(strand.planned.name):
                break  # room comes as it is worked on
            paused.append(strand.planned.name)
        if ready:
            depth = self._room.books.depth()
            words = f"; paused: {', '.join(paused)}" if paused else ""
            self._on_wait(f"{depth:,} prompts wait in Redis (MILL_MAX_PENDING){words}")
        return None


def look_at(plan: Sequence[Planned], open_input: Open, *, on_opened: Callable[[int], None]) -> list[Opened | MillError]:
    """Open all inputs side by side, up to their first rows; return each, or what keeps it from being read.

    `on_opened` hears now and then how many are.
    """
    news = threading.Event()
    readers = [_Reader(lambda on_wait, one=one: open_input(one, on_wait), news=news) for one in plan]  # type: ignore[misc]
    found: dict[int, Opened | MillError] = {}
    try:
        for reader in readers:
            reader.start()
        while len(found) < len(readers):
            news.clear()
            for number, reader in enumerate(readers):
                item = reader.poll() if number not in found else None
                if item is not None:
                    found[number] = _first(item)
                    reader.stop()
            on_opened(len(found))
            if len(found) < len(readers):
                news.wait(_LOOK_EVERY_S)
    finally:
        _part(readers)
    return [found[number] for number in range(len(readers))]


def _part(readers: Sequence[_Reader]) -> None:
    """End all readers, but wait for none that hangs."""
    for reader in readers:
        reader.stop()
    until = time.monotonic() + _PARTING_S
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))


def _first(item: Opened | Portion | _End) -> Opened | MillError:
    """Return what a reader gave first."""
    if isinstance(item, Opened):
        return item
    try:
        if isinstance(item, _End):
            item.check()
    except MillError as error:
        return error
    raise TypeError(f"a reader began with {type(item).__name__}")
