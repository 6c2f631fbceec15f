"""Gathers what the page shows, out of Redis and the files alone: whatever Flower remembers plays no part."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from app import broker, settings
from app.broker import BrokerUrl
from app.dashboard import metrics, metrics_reading
from app.dashboard.controls import Controls, Order
from app.dashboard.looks import FRESH_S, Seen, SharedLook
from app.dashboard.series import SECONDS, Span, build, grid
from app.errors import MillError, StoreError, UsageError
from app.failures import KINDS, FailureBook, Group
from app.find import FoundSample, find_sample
from app.history import read_points
from app.index import Entry
from app.ledger import Ledger
from app.lock import LOOK_PATIENCE_S
from app.places import DatasetFolder, dataset_folder
from app.progress import find_datasets, take_snapshot
from app.queue import Queue
from app.records import Kind
from app.settings import BrokerSettings, QueueSettings, StoreSettings
from app.snapshot import Snapshot

logger = logging.getLogger(__name__)

PAGE_SCHEMA = 1
"""Version of the data endpoint's JSON; the page and Flower come from one installation, so no other is understood."""
SHOWN_CLASSES = 40
SHOWN_IDS = 3
SHOWN_ERROR_CHARS = 240
HISTORY_FRESH_S = 5.0
_MOST_POINTS = 600
_CONNECT_TIMEOUT_S = 2
_SOCKET_TIMEOUT_S = 5
_HANDS = 4
"""Threads for samples and controls, so that the page goes on while one of them waits."""

_Result = TypeVar("_Result")


class FailureClass(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that failed, or were rejected, for one reason."""

    dataset: str
    kind: Kind
    reason: str
    count: int
    """Samples that are on disk so now, as in the snapshot."""
    lines: int
    """Times that a sample was recorded so, earlier rounds included."""
    first_at: float | None
    last_at: float | None
    error: str
    ids: list[str]
    """Some of the samples that are so now, newest first."""


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows but the charts."""

    schema: int = PAGE_SCHEMA
    snapshot: Snapshot | None
    """The same as `producer status --json`."""
    failures: list[FailureClass] = []
    """Most samples first."""
    more_failures: int = 0
    """Classes beyond those shown."""
    reading: bool = False
    """Whether the files of failures are still being read for the first time."""
    bound: int | None = None
    """The bound in flight that somebody has set by hand; null: MILL_MAX_IN_FLIGHT of the workers."""
    trouble: str | None = None
    """Why there is no snapshot."""


class Watch:
    """Everything that the page's handlers ask; lives as long as Flower."""

    def __init__(self, queue: Queue, *, url: BrokerUrl, prepared: Path, max_pending: int) -> None:
        self._queue = queue
        self._url = url
        self._prepared = prepared
        self._max_pending = max_pending
        self._books: dict[Path, FailureBook] = {}
        self._eyes = concurrent.futures.ThreadPoolExecutor(1, "mill-eyes")
        self._hands = concurrent.futures.ThreadPoolExecutor(_HANDS, "mill-hands")
        self._data = SharedLook(self._read_data, self._eyes)
        self._metrics = SharedLook(self._read_metrics, self._eyes)
        self._latest: tuple[float, Snapshot] | None = None
        """The newest snapshot, and the monotonic seconds at which it was begun."""
        self._histories: dict[tuple[Span, str | None], SharedLook] = {}

    @classmethod
    def from_settings(cls) -> Self:
        """Build it from the machine's settings.

        Raises SettingError.
        """
        at, store = settings.load(BrokerSettings), settings.load(StoreSettings)
        url = broker.resolve(at, store)
        # A viewer waits for the answer, so a Redis that is gone or frozen is told of soon; the next look tries again.
        client = broker.connect(
            url,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            timeout_s=_SOCKET_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),
            most=2 * _HANDS,
        )
        queue = Queue(client, at.keys)
        max_pending = settings.load(QueueSettings).max_pending
        return cls(queue, url=url, prepared=store.prepared_dir, max_pending=max_pending)

    # Asked by handlers, in Flower's event loop

    async def data(self) -> Seen:
        """Return the page's numbers as JSON."""
        return await self._data.get()

    async def metrics(self) -> Seen:
        """Return the run's metrics as Prometheus reads them.

        Raises StoreError.
        """
        return await self._metrics.get()

    async def history(self, span: Span, dataset: str | None) -> Seen:
        """Return the charts' columns as JSON, of one dataset or of all.

        Raises UsageError for a dataset that has no folder.
        """
        if dataset is not None and not await self._in_a_thread(self._folder(dataset).path.is_dir):
            raise UsageError(f"There is no dataset {dataset!r} in {self._prepared}.")
        key = (span, dataset)
        if key not in self._histories:
            self._histories[key] = SharedLook(
                lambda: self._read_history(span, dataset), self._eyes, fresh_s=HISTORY_FRESH_S
            )
        return await self._histories[key].get()

    async def sample(self, dataset: str, sample_id: str) -> FoundSample:
        """Return all that is known of a sample.

        Raises UsageError for one that does not exist, StoreError.
        """
        folder = self._folder(dataset)
        return await self._in_a_thread(lambda: find_sample(self._queue, folder, sample_id))

    async def carry_out(self, order: Order, *, by: str, celery_app: Any) -> str:
        """Do what a person has pressed and return one sentence about it.

        Raises MillError.
        """
        controls = Controls(
            self._queue, celery_app, url=self._url, prepared=self._prepared, max_pending=self._max_pending
        )

        def act() -> str:
            with broker.translated(self._url):
                return controls.carry_out(order, by=by)

        return await self._in_a_thread(act)

    def close(self) -> None:
        """End the threads and the connections."""
        self._eyes.shutdown(wait=False, cancel_futures=True)
        self._hands.shutdown(wait=False, cancel_futures=True)
        self._queue.client.close()

    async def _in_a_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._hands, work)

    def _folder(self, dataset: str) -> DatasetFolder:
        return dataset_folder(self._prepared, dataset)

    # In the thread of looks

    def _read_data(self) -> bytes:
        try:
            return msgspec.json.encode(self._look())
        except MillError as error:
            return msgspec.json.encode(PageData(snapshot=None, trouble=str(error)))
        except Exception:
            # A page that people watch for days must say that something is wrong, and go on looking.
            logger.exception("the page's numbers could not be read")
            trouble = "The numbers could not be read; Flower's log says why."
            return msgspec.json.encode(PageData(snapshot=None, trouble=trouble))

    def _look(self) -> PageData:
        snapshot = self._snapshot()
        classes: list[FailureClass] = []
        reading = False
        for name, part in snapshot.datasets.items():
            if part.reasons.get(Kind.FAILED) or part.reasons.get(Kind.REJECTED):
                found, complete = self._failures(name, part.reasons)
                classes += found
                reading = reading or not complete
        classes.sort(key=lambda one: (one.kind is not Kind.FAILED, -one.count))
        return PageData(
            snapshot=_without_buckets(snapshot),
            failures=classes[:SHOWN_CLASSES],
            more_failures=max(0, len(classes) - SHOWN_CLASSES),
            reading=reading,
            bound=self._bound() if snapshot.broker.reachable else None,
        )

    def _snapshot(self, *, fresh_s: float = 0.0) -> Snapshot:
        """Return the latest snapshot if it is younger than that, else a new one."""
        now = time.monotonic()
        if self._latest is None or now - self._latest[0] >= fresh_s:
            self._latest = now, take_snapshot(self._queue, self._prepared, url=self._url)
        return self._latest[1]

    def _read_metrics(self) -> bytes:
        # Whoever has the page open has just looked; looking again would tell no more.
        snapshot = self._snapshot(fresh_s=FRESH_S)
        return metrics.exposition(metrics_reading.read(self._queue, self._prepared, snapshot))

    def _bound(self) -> int | None:
        try:
            return self._queue.bound()
        except redis.exceptions.RedisError:
            return None  # the next snapshot tells of it

    def _failures(self, dataset: str, reasons: dict[str, dict[str, int]]) -> tuple[list[FailureClass], bool]:
        """Return a dataset's classes, counted as the snapshot does, and whether its files were read to their end."""
        folder = self._folder(dataset)
        book = self._books.setdefault(folder.path, FailureBook(folder))
        try:
            groups = {(group.kind, group.reason): group for group in book.look()}
            newest = [id_ for group in groups.values() for id_ in group.ids]
            with Ledger(folder, patience_s=LOOK_PATIENCE_S) as ledger:
                known = ledger.look_up(newest)
        except StoreError:  # the snapshot's notes tell of it; its counts stand without examples
            groups, known = {}, {}
        found = [
            _class(dataset, groups.get((kind, reason)) or Group(kind, reason), count=count, known=known)
            for kind in KINDS
            for reason, count in reasons.get(kind, {}).items()
        ]
        return found, book.complete

    def _read_history(self, span: Span, dataset: str | None) -> bytes:
        now = self._queue.reckon_now()  # by the clock that stamps the points
        since = now - SECONDS[span] - 60 if span in SECONDS else None
        folders = {dataset: self._folder(dataset)} if dataset else self._folders()
        points = {name: read_points(folder, since=since, most=_MOST_POINTS) for name, folder in folders.items()}
        first = min((one[0].at for one in points.values() if one), default=None)
        return msgspec.json.encode(build(span, grid(span, now=now, first=first), points, dataset))

    def _folders(self) -> dict[str, DatasetFolder]:
        """Return the datasets that have files; those alone have stored points."""
        return find_datasets(self._prepared, [])[0]


def _class(dataset: str, group: Group, *, count: int, known: Mapping[str, Entry]) -> FailureClass:
    """Return one class as the page shows it, with ids of samples that have not been settled otherwise since."""
    newest = [id_ for id_ in reversed(group.ids) if id_ in known]
    still = [id_ for id_ in newest if (known[id_].kind, known[id_].reason) == (group.kind, group.reason)]
    return FailureClass(
        dataset=dataset,
        kind=group.kind,
        reason=group.reason,
        count=count,
        lines=group.lines,
        first_at=group.first_at,
        last_at=group.last_at,
        error=group.error[:SHOWN_ERROR_CHARS],
        ids=still[:SHOWN_IDS],
    )


def _without_buckets(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without its histograms, which the page does not draw."""
    replace = msgspec.structs.replace
    thin = {
        name: replace(part, latency=replace(part.latency, buckets=[]), tokens=replace(part.tokens, buckets=[]))
        for name, part in snapshot.datasets.items()
    }
    totals = snapshot.totals
    totals = replace(totals, latency=replace(totals.latency, buckets=[]), tokens=replace(totals.tokens, buckets=[]))
    return replace(snapshot, datasets=thin, totals=totals)
