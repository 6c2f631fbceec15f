"""Group commit: many slots, one writer thread, one fsync; only then each task may return and Celery acks."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import redis.exceptions

from app.errors import StoreError
from app.ledger import Committed, Ledger, Pen
from app.queue import Queue
from app.records import Kind
from app.rejudge import Revision
from app.tally import Done

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Seconds between two tries while the disk refuses a write."""
_LARGEST_GROUP = 512


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
    known: list[str]
    """Ids that were recorded before, whose payloads are of no use."""


class Recorder:
    """Writes what has come in since the last write, for all datasets; there is no timer."""

    def __init__(self, books: Queue, *, on_stall: Callable[[str | None], None]) -> None:
        self._books = books
        self._on_stall = on_stall
        self._inbox: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._untold: list[_News] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mill-recorder", daemon=True)
        self._stalls: dict[str, str] = {}
        self._revisions: dict[str, Revision] = {}

    @property
    def stalled(self) -> str | None:
        """Why the disk takes no records, if so."""
        return next(iter(list(self._stalls.values())), None)

    def start(self) -> None:
        """Start the writer thread."""
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Hand a record over; its future is resolved when it is durable."""
        self._inbox.put(entry)

    def give_up(self) -> None:
        """Hold no records any longer for a disk that takes none: the worker ends, their tickets go back."""
        self._stopping.set()

    def stop(self) -> None:
        """Write what is left and end the thread."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join(30)

    def _run(self) -> None:
        while True:
            group, ended = self._next_group()
            by_file: dict[tuple[str, Kind], list[Entry]] = {}
            for entry in group:
                by_file.setdefault((entry.dataset, entry.pen.kind), []).append(entry)
            for (dataset, _kind), entries in by_file.items():
                self._record(dataset, entries)
            if self._untold:
                untold, self._untold = self._untold, []
                self._tell(untold)
            if ended:
                return

    def _next_group(self) -> tuple[list[Entry], bool]:
        """Wait for one entry and take whatever else is there."""
        group: list[Entry] = []
        try:
            entry = self._inbox.get(timeout=_RETRY_S if self._untold else None)
            while True:
                if entry is None:
                    return group, True
                group.append(entry)
                if len(group) >= _LARGEST_GROUP:
                    break
                entry = self._inbox.get_nowait()
        except queue.Empty:
            pass
        return group, False

    def _record(self, dataset: str, entries: list[Entry]) -> None:
        try:
            committed = self._commit(dataset, entries)
        except StoreError as error:
            logger.warning("dataset %s: %d finished records could not be written; asked again", dataset, len(entries))
            self._fail(entries, error)
            return
        except Exception as error:  # the waiting tasks hear of it; the writer goes on
            logger.exception("dataset %s: %d records could not be written", dataset, len(entries))
            self._fail(entries, error)
            return
        news = _News(dataset, [], [])
        for entry, pen, fresh in zip(entries, committed.pens, committed.new, strict=True):
            if fresh:
                news.done.append(Done(pen.id, pen.kind, pen.tokens, entry.prompt_tokens, entry.latency_s))
            else:
                news.known.append(pen.id)
        self._tell([news])
        for entry, fresh in zip(entries, committed.new, strict=True):
            entry.recorded.set_result(fresh)

    @staticmethod
    def _fail(entries: list[Entry], error: Exception) -> None:
        for entry in entries:
            entry.recorded.set_exception(error)

    def _commit(self, dataset: str, entries: list[Entry]) -> Committed:
        """Write until it works: a full disk holds the records, it does not lose them.

        Raises StoreError when the worker is told to end meanwhile.
        """
        pens, ledger = [entry.pen for entry in entries], entries[0].ledger
        revise = self._revisions.setdefault(dataset, Revision(ledger))
        while True:
            try:
                committed = ledger.commit(pens, revise=revise)
            except StoreError as error:
                self.stall("write", f"{error} {len(pens)} finished records of {dataset} wait in memory.")
                if self._stopping.wait(_RETRY_S):
                    raise
                continue
            for mending in committed.mended:
                logger.warning("%s", mending)
            self.stall("write", None)
            return committed

    def stall(self, step: str, why: str | None) -> None:
        """Start no new request while a step (opening, writing) says why the disk refuses; None: it works again."""
        before = self.stalled
        if why is None:
            self._stalls.pop(step, None)
        else:
            self._stalls[step] = why
        if (before is None) == (self.stalled is None):
            return
        if why:
            logger.error("%s No new request is sent.", why)
        else:
            logger.warning("The disk takes records again; the work goes on.")
        self._on_stall(self.stalled)

    def _tell(self, items: list[_News]) -> None:
        """Tell Redis; while it is away its books wait: the records are durable, a redelivered ticket finds them."""
        for place, news in enumerate(items):
            try:
                self._books.finish(news.dataset, news.done)
                self._books.forget(news.dataset, news.known)
            except redis.exceptions.RedisError:
                self._untold += items[place:]
                return
