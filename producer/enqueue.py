"""Samples minus what is recorded or queued become tickets: safe to run any number of times, during a run too."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import kombu.exceptions
import msgspec
import redis.exceptions

from app import broker, manifest
from app.broker import BrokerUrl
from app.errors import BrokerError, MillError
from app.index import Entry
from app.ledger import Ledger, Pen
from app.queue import Queue
from app.records import Kind, KnownSample, RefusedRow, Sample, encode_line
from producer.room import Room
from producer.samples import Batch, Conflict, Pass

if TYPE_CHECKING:
    from celery import Celery

_CHUNK = 500
_ROOM_POLL_S = 0.25


@dataclasses.dataclass
class Counts:
    """What an enqueue has done so far."""

    read: int = 0
    """Rows of the input."""
    refused: int = 0
    """Rows that are no sample, duplicates included."""
    duplicates: int = 0
    recorded: int = 0
    """Samples that are on disk already and are not asked again."""
    waiting: int = 0
    """Samples that were queued or in flight already."""
    queued: int = 0
    """Samples that were queued now."""
    retried: int = 0
    """Of those, the ones that had failed or been rejected before."""

    @property
    def samples(self) -> int:
        """Samples in what was read."""
        return self.recorded + self.waiting + self.queued


@dataclasses.dataclass(frozen=True)
class Report:
    """How an enqueue ended."""

    counts: Counts
    complete: bool
    """Whether the input's end was reached."""
    conflicts: list[Conflict]
    conflict_count: int
    mended: list[str]
    trouble: MillError | None = None
    """What ended it early, if it was no signal."""


@dataclasses.dataclass(frozen=True)
class Retry:
    """Which recorded samples are asked again."""

    failed: bool = True
    rejected: bool = False

    def wants(self, entry: Entry) -> bool:
        """Tell whether a recorded sample is asked again."""
        return (entry.kind is Kind.FAILED and self.failed) or (entry.kind is Kind.REJECTED and self.rejected)


class Enqueuer:
    """Puts one dataset's samples on the queue."""

    def __init__(
        self,
        *,
        app: Celery,
        books: Queue,
        url: BrokerUrl,
        ledger: Ledger,
        dataset: str,
        max_pending: int,
        replace_waiting: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        on_wait: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """`replace_waiting` gives samples that wait already the new settings; `stopping` is asked between chunks.

        `on_wait` hears why there is no room while there is none.
        """
        self._app = app
        self._books = books
        self._url = url
        self._ledger = ledger
        self._dataset = dataset
        self._room = Room(books, max_pending=max_pending)
        self._replace_waiting = replace_waiting
        self._stopping = stopping
        self._on_wait = on_wait
        self.counts = Counts()
        self.mended: list[str] = []

    def run(
        self, rows: Pass, batches: Iterable[Batch], *, retry: Retry, on_progress: Callable[[Counts], None]
    ) -> Report:
        """Enqueue every sample of a pass over an input, out of its batches."""
        complete, trouble = False, None
        try:
            with broker.translated(self._url):
                for batch in batches:
                    if self._stopping():
                        break
                    self.counts.read, self.counts.refused = rows.read, rows.refused
                    self.counts.duplicates = rows.duplicates
                    self._take(batch.samples, batch.refused, retry)
                    on_progress(self.counts)
                else:
                    complete = not self._stopping()
        except MillError as error:
            trouble = error
        return Report(self.counts, complete, rows.conflicts, rows.conflict_count, self.mended, trouble)

    def again(self, samples: Iterable[Sample], *, on_progress: Callable[[Counts], None]) -> Counts:
        """Enqueue recorded samples once more, in a new round each."""
        items = iter(samples)
        while chunk := list(islice(items, _CHUNK)):
            if self._stopping():
                break
            self._take(chunk, [], Retry(failed=True, rejected=True))
            on_progress(self.counts)
        return self.counts

    def _take(self, samples: Sequence[Sample], refused: Sequence[RefusedRow], retry: Retry) -> None:
        ids = [sample.id for sample in samples]
        known = self._ledger.look_up([*ids, *(row.id for row in refused)])
        pens = [
            Pen(Kind.REFUSED, row.id, encode_line(row), reason=row.reason) for row in refused if row.id not in known
        ]
        # On disk before it reaches Redis: whatever vanishes there, it is known what was to be asked.
        pens += [
            Pen(Kind.PENDING, sample.id, encode_line(KnownSample(id=sample.id, row=sample.source.row)))
            for sample in samples
            if sample.id not in known
        ]
        if pens:
            self.mended += map(str, self._ledger.commit(pens).mended)
        wanted: list[Sample] = []
        before: dict[str, Kind] = {}
        for sample in samples:
            entry = known.get(sample.id)
            if entry is None or entry.kind is Kind.PENDING:
                wanted.append(sample)
            elif retry.wants(entry):
                before[sample.id] = entry.kind
                wanted.append(msgspec.structs.replace(sample, round=entry.round + 1))
            else:
                self.counts.recorded += 1
        self._queue(wanted, before)

    def _queue(self, wanted: Sequence[Sample], before: dict[str, Kind]) -> None:
        at = 0
        while at < len(wanted):
            room = self._wait_for_room(wanted[at:])
            if not room:
                return
            chunk = wanted[at : at + room]
            at += len(chunk)
            again = {sample.id: before[sample.id] for sample in chunk if sample.id in before}
            fresh = self._books.put(self._dataset, chunk, again, replace=self._replace_waiting)
            with _publishing_errors(self._url):
                self._publish(fresh)
            self.counts.queued += len(fresh)
            self.counts.waiting += len(chunk) - len(fresh)
            self.counts.retried += sum(id_ in before for id_ in fresh)

    def _publish(self, ids: Sequence[str]) -> None:
        from app.celery import publish  # noqa: PLC0415 loads Celery, which --help does not need

        publish(self._app, self._dataset, ids)

    def _wait_for_room(self, samples: Sequence[Sample]) -> int:
        """Return how many of the samples fit into Redis now, waiting while none does; 0 when told to stop."""
        while not self._stopping():
            count, why = self._room.fit(samples)
            if count:
                return count
            self._on_wait(why)
            time.sleep(_ROOM_POLL_S)
        return 0


@contextlib.contextmanager
def _publishing_errors(url: BrokerUrl) -> Iterator[None]:
    """Turn what kombu makes of Redis' errors into one-sentence errors."""
    try:
        yield
    except kombu.exceptions.KombuError as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, redis.exceptions.RedisError):
            raise broker.translate(cause, url) from error
        raise BrokerError(f"Redis at {url} did not take the tickets: {error}.") from error


def source_entry(source: str, adapter: str, report: Report) -> manifest.SourceEntry:
    """Return what the manifest keeps of a pass."""
    now = time.time()
    return manifest.SourceEntry(
        source=source,
        adapter=adapter,
        first_at=now,
        last_at=now,
        read=report.counts.read,
        refused=report.counts.refused,
        complete=report.complete,
    )


def failed_samples(ledger: Ledger, *, kind: Kind, reason: str | None) -> Iterable[Sample]:
    """Yield the failed or rejected samples, as they were asked, from their records."""
    for _id, entry in ledger.entries(kind):
        if reason is None or entry.reason == reason:
            yield _decode_asked(ledger.read(entry))


_decode_asked = msgspec.json.Decoder(Sample).decode  # a record has all the fields of its sample
