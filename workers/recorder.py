"""Group commit: many slots, one writer thread per folder, one fsync; only then tasks may return and Celery acks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple

import redis.exceptions

from app.errors import DiskFullError, StoreError
from app.ledger import Committed, Ledger, Pen
from app.queue import Queue
from app.records import Kind
from app.rejudge import Revision
from app.tally import Done

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Seconds between two tries while the disk refuses a write."""
_LARGEST_GROUP = 512
_FORGET_S = 30.0
"""Seconds after which a folder that took no records, and was not tried since, is no longer told of."""
_END_S = 30.0


class Entry(NamedTuple):
    """A record on its way to the disk."""

    dataset: str
    ledger: Ledger
    pen: Pen
    recorded: Future[bool]
    """Resolved with whether the line was new, once it is durable."""
    latency_s: float | None = None
    """Seconds of the answered call; None where none was answered."""
    prompt_tokens: int = 0


class _News(NamedTuple):
    """What Redis shall hear of records that are durable."""

    dataset: str
    done: list[Done]
    known: dict[str, int]
    """Ids that were recorded before, and the round up to which their payloads are of no use."""


class _Stall(NamedTuple):
    """Why a folder takes no records."""

    why: str
    shuts: bool
    """Whether the disk is full: then it is so for all datasets."""
    at: float
    """Monotonic seconds at which it was last found so."""


class Recorder:
    """Writes what has come in since the last write; there is no timer.

    Each folder has a thread of its own: one, also one of turns, that takes nothing holds back no other's records.
    """

    def __init__(self, books: Queue, *, on_stall: Callable[[str | None], None]) -> None:
        """`on_stall` hears when no dataset's records can be written for want of space, and with None that they can."""
        self._books = books
        self._on_stall = on_stall
        self._lock = threading.Lock()
        self._writers: dict[Ledger, _Writer] = {}
        self._stopping = threading.Event()
        self._stalls: dict[tuple[str, str], _Stall] = {}

    @property
    def stalled(self) -> str | None:
        """Why records of one dataset or of all cannot be written, if so."""
        return next((stall.why for stall in self._recent().values()), None)

    @property
    def shut(self) -> bool:
        """Whether no request of any dataset is to be sent."""
        return self._full is not None

    @property
    def _full(self) -> str | None:
        """Why the disk takes nothing of any dataset, if it is full; read without the lock too."""
        return next((stall.why for stall in list(self._stalls.values()) if stall.shuts), None)

    def holds(self, dataset: str, *, besides: str | None = None) -> bool:
        """Tell whether the dataset's folder takes no records; `besides` names a step that does not count."""
        return any(name == dataset and step != besides for name, step in self._recent())

    def waits(self, datasets: Collection[str]) -> bool:
        """Tell whether all the work, which is on those datasets, waits for a disk."""
        return self.shut or (self.stalled is not None and all(map(self.holds, datasets)))

    def put(self, entry: Entry) -> None:
        """Hand a record over; its future is resolved when it is durable."""
        with self._lock:
            writer = self._writers.get(entry.ledger)
            if writer is None:
                writer = _Writer(entry.dataset, entry.ledger, self._books, self, self._stopping)
                self._writers[entry.ledger] = writer
        writer.inbox.put(entry)

    def give_up(self) -> None:
        """Hold no records any longer for a disk that takes none: the worker ends, their tickets go back."""
        self._stopping.set()

    def stop(self) -> None:
        """Write what is left and end the threads."""
        self._stopping.set()
        with self._lock:
            writers = list(self._writers.values())
        for writer in writers:
            writer.inbox.put(None)
        until = time.monotonic() + _END_S
        for writer in writers:
            writer.thread.join(max(0.0, until - time.monotonic()))

    def stall(self, dataset: str, step: str, error: StoreError | None, *, more: str = "") -> None:
        """Start no new request of the dataset while a step says why its folder takes nothing; None: it works again.

        A full disk stops the requests of all datasets. `more` is told after the error.
        """
        with self._lock:
            held, was_shut = self.holds(dataset), self.shut
            if error is None:
                self._stalls.pop((dataset, step), None)
            else:
                is_full = isinstance(error, DiskFullError)
                self._stalls[dataset, step] = _Stall(f"{error}{more}", is_full, time.monotonic())
            if self.shut != was_shut:
                self._on_stall(self._full)
            self._tell_change(dataset, held=held, was_shut=was_shut)

    def _tell_change(self, dataset: str, *, held: bool, was_shut: bool) -> None:
        if self.shut and not was_shut:
            logger.error("%s No new request is sent.", self.stalled)
        elif was_shut and not self.shut:
            logger.warning("The disk takes records again; the work goes on.")
        elif not self.shut and self.holds(dataset) != held:
            if held:
                logger.warning("The folder of dataset %s takes records again; its work goes on.", dataset)
            else:
                why = next(stall.why for (name, _step), stall in self._stalls.items() if name == dataset)
                logger.error("%s No new request is sent for dataset %s.", why, dataset)

    def _recent(self) -> dict[tuple[str, str], _Stall]:
        """Return what was found lately; a folder without tickets is not tried again, and says nothing any more."""
        since = time.monotonic() - _FORGET_S
        return {key: stall for key, stall in list(self._stalls.items()) if stall.shuts or stall.at >= since}


class _Writer:
    """Writes one folder's lines: a dataset's records, of which Redis hears, or turns of its conversations."""

    def __init__(
        self, dataset: str, ledger: Ledger, books: Queue, recorder: Recorder, stopping: threading.Event
    ) -> None:
        self._dataset = dataset
        self._ledger = ledger
        self._of_turns = ledger.folder.holds_turns
        self._step = f"write {ledger.folder.path}"
        self._noun = "turn" if self._of_turns else "record"
        self._books = books
        self._recorder = recorder
        self._stopping = stopping
        self.inbox: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._untold: list[_News] = []
        self._revision = None if self._of_turns else Revision(ledger)
        self.thread = threading.Thread(target=self._run, name=f"mill-recorder-{self._noun}s-{dataset}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            group, ended = self._next_group()
            by_kind: dict[Kind, list[Entry]] = {}
            for entry in group:
                by_kind.setdefault(entry.pen.kind, []).append(entry)
            for entries in by_kind.values():
                self._record(entries)
            if self._untold:
                untold, self._untold = self._untold, []
                self._tell(untold)
            if ended:
                return

    def _next_group(self) -> tuple[list[Entry], bool]:
        """Wait for one entry and take whatever else is there."""
        group: list[Entry] = []
        try:
            entry = self.inbox.get(timeout=_RETRY_S if self._untold else None)
            while True:
                if entry is None:
                    return group, True
                group.append(entry)
                if len(group) >= _LARGEST_GROUP:
                    break
                entry = self.inbox.get_nowait()
        except queue.Empty:
            pass
        return group, False

    def _record(self, entries: list[Entry]) -> None:
        dataset = self._dataset
        try:
            committed = self._commit(entries)
        except StoreError as error:
            logger.warning(
                "dataset %s: %d finished %ss could not be written; asked again", dataset, len(entries), self._noun
            )
            self._fail(entries, error)
            return
        except Exception as error:  # the waiting tasks hear of it; the writer goes on
            logger.exception("dataset %s: %d %ss could not be written", dataset, len(entries), self._noun)
            self._fail(entries, error)
            return
        if not self._of_turns:
            self._tell([self._news(entries, committed)])
        for entry, fresh in zip(entries, committed.new, strict=True):
            entry.recorded.set_result(fresh)

    def _news(self, entries: list[Entry], committed: Committed) -> _News:
        news = _News(self._dataset, [], {})
        for entry, pen, fresh in zip(entries, committed.pens, committed.new, strict=True):
            if fresh:
                news.done.append(Done(pen.id, pen.kind, pen.tokens, entry.prompt_tokens, entry.latency_s, pen.round))
            else:
                news.known[pen.id] = pen.round
        return news

    @staticmethod
    def _fail(entries: list[Entry], error: Exception) -> None:
        for entry in entries:
            entry.recorded.set_exception(error)

    def _commit(self, entries: list[Entry]) -> Committed:
        """Write until it works: a full disk holds the records, it does not lose them.

        Raises StoreError when the worker is told to end meanwhile.
        """
        pens = [entry.pen for entry in entries]
        while True:
            try:
                committed = self._ledger.commit(pens, revise=self._revision)
            except StoreError as error:
                more = f" {len(pens)} finished {self._noun}s of {self._dataset} wait in memory."
                if len(pens) == 1:
                    more = f" 1 finished {self._noun} of {self._dataset} waits in memory."
                self._recorder.stall(self._dataset, self._step, error, more=more)
                if self._stopping.wait(_RETRY_S):
                    raise
                continue
            for mending in committed.mended:
                logger.warning("%s", mending)
            self._recorder.stall(self._dataset, self._step, None)
            return committed

    def _tell(self, items: list[_News]) -> None:
        """Tell Redis; while it is away its books wait: the records are durable, a redelivered ticket finds them."""
        for place, news in enumerate(items):
            try:
                self._books.finish(news.dataset, news.done)
                self._books.forget(news.dataset, news.known)
            except redis.exceptions.RedisError:
                self._untold += items[place:]
                return
