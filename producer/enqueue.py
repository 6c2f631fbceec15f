"""Samples minus what is recorded or queued become tickets: safe to run any number of times, during a run too."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from app import broker, manifest, settings
from app.broker import BrokerUrl
from app.errors import MillError
from app.feeder import Feeder
from app.index import Entry
from app.ledger import Ledger, Pen
from app.queue import Queue
from app.records import POISON, REFUSED_FOR_GOOD, Kind, KnownSample, Sample, encode_line
from app.settings import GenerationSettings
from producer.reading import Opened
from producer.samples import Batch, Conflict, Pass


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
    left_aside: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Of the recorded ones, by reason, those that failed for good: they would fail in the same way again."""

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
    refused: bool = False
    """Of the failed ones, also those that the server refused for good."""

    @classmethod
    def told(cls, *, failed: bool | None, rejected: bool, new_settings: bool) -> Retry:
        """Return what the user's words mean; what was refused is asked if told so, or in another way."""
        return cls(failed is not False, rejected, refused=bool(failed) or (new_settings and failed is None))

    def wants(self, entry: Entry) -> bool:
        """Tell whether a recorded sample is asked again; one that kills servers only is when somebody retries it."""
        if entry.kind is Kind.FAILED:
            return self.failed and not self.leaves_aside(entry)
        return entry.kind is Kind.REJECTED and self.rejected

    def leaves_aside(self, entry: Entry) -> bool:
        """Tell whether a failed sample is passed over because of its reason, where others are asked again."""
        if entry.kind is not Kind.FAILED or not self.failed:
            return False
        return entry.reason == POISON or (entry.reason in REFUSED_FOR_GOOD and not self.refused)


@dataclasses.dataclass(frozen=True)
class Job:
    """An opened input, and what its samples are made with."""

    generation: GenerationSettings
    extra: dict[str, Any]
    """What of the reading changes a sample's content."""
    input: Opened


@dataclasses.dataclass(frozen=True)
class Portion:
    """A batch, and how far its pass had come with it."""

    batch: Batch
    read: int
    refused: int
    duplicates: int

    @classmethod
    def of(cls, rows: Pass, batch: Batch) -> Portion:
        """Return the newest batch of a pass."""
        return cls(batch, rows.read, rows.refused, rows.duplicates)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Samples that are to be queued."""

    samples: list[Sample]
    before: dict[str, Kind]
    """What those that are asked again are on disk."""


class Enqueuer:
    """Puts one dataset's samples on the queue."""

    def __init__(
        self,
        feeder: Feeder,
        *,
        url: BrokerUrl,
        ledger: Ledger,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stopping` is asked between batches."""
        self._feeder = feeder
        self._url = url
        self._ledger = ledger
        self._stopping = stopping
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
                    wanted = self.admit(Portion.of(rows, batch), retry)
                    self.queue(wanted.samples, wanted.before)
                    on_progress(self.counts)
                else:
                    complete = not self._stopping()
        except MillError as error:
            trouble = error
        return self.report(rows, complete=complete, trouble=trouble)

    def report(self, rows: Pass, *, complete: bool, trouble: MillError | None) -> Report:
        """Return how it ended."""
        return Report(self.counts, complete, rows.conflicts, rows.conflict_count, self.mended, trouble)

    def admit(self, portion: Portion, retry: Retry) -> Wanted:
        """Write down what a batch holds and return its samples that are to be queued. Raises StoreError."""
        samples, refused = portion.batch.samples, portion.batch.refused
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
        counts = self.counts
        counts.read, counts.refused, counts.duplicates = portion.read, portion.refused, portion.duplicates
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
                counts.recorded += 1
                counts.left_aside.update([entry.reason] if retry.leaves_aside(entry) else [])
        return Wanted(wanted, before)

    def queue(self, wanted: Sequence[Sample], before: Mapping[str, Kind]) -> None:
        """Queue samples as soon as there is room. Raises BrokerError, or what a Redis client raises."""
        for fed in self._feeder.feed(wanted, before):
            self.counts.queued += fed.queued
            self.counts.waiting += fed.waiting
            self.counts.retried += fed.retried


def begin(
    ledger: Ledger, books: Queue, dataset: str, job: Job, *, new_settings: bool, tell: Callable[[str], None]
) -> None:
    """Make a dataset ready to be enqueued; `tell` hears what the user should know of it.

    Raises StoreError, and ManifestMismatchError unless it may go on with `new_settings`.
    """
    ledger.check_writable(min_free_bytes=settings.MIN_FREE_DISK_BYTES)
    for mending in ledger.catch_up():
        tell(str(mending))
    entry = manifest.fix_settings(ledger, dataset, job.generation, job.extra, new=new_settings)
    if job.generation.turns == "all":
        Ledger.open(ledger.folder.turns(entry.fingerprint)).close()  # or the workers could keep no turn
    books.register(dataset, entry.fingerprint, entry.content)
    for remark in job.input.remarks():
        tell(remark)
    manifest.begin_source(ledger, dataset, job.input.description, job.input.adapter)


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
