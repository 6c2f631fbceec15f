"""Puts samples into Redis and their tickets on the queue, as far as there is room."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import kombu.exceptions
import redis.exceptions

from app import broker
from app.broker import BrokerUrl
from app.errors import BrokerError
from app.queue import Queue
from app.records import Kind, Sample
from app.room import Room

_ROOM_POLL_S = 0.25

Publish = Callable[[str, Sequence[str]], None]
"""Puts one ticket per sample id on a dataset's Celery queue."""


@dataclasses.dataclass(frozen=True)
class Fed:
    """What became of some samples."""

    queued: int = 0
    waiting: int = 0
    """Those that were queued or in flight already."""
    retried: int = 0
    """Of `queued`, those that are on disk as failed or rejected."""


class Feeder:
    """Feeds one dataset's queue; safe beside other feeders, and beside workers."""

    def __init__(
        self,
        books: Queue,
        publish: Publish,
        *,
        url: BrokerUrl,
        dataset: str,
        max_pending: int,
        replace_waiting: bool = False,
        stopping: Callable[[], bool] = lambda: False,
        on_wait: Callable[[str], None] = lambda _why: None,
    ) -> None:
        """`replace_waiting` gives samples that wait already the new settings; `stopping` is asked between chunks.

        `on_wait` hears why there is no room while there is none.
        """
        self._books = books
        self._publish = publish
        self._url = url
        self._dataset = dataset
        self._room = Room(books, max_pending=max_pending)
        self._replace_waiting = replace_waiting
        self._stopping = stopping
        self._on_wait = on_wait

    def feed(self, samples: Sequence[Sample], before: Mapping[str, Kind]) -> Iterator[Fed]:
        """Queue the samples chunk by chunk and yield what became of each chunk; ends early when told to stop.

        `before` names those that are on disk as failed or rejected. Raises BrokerError, or what a Redis client raises.
        """
        at = 0
        while at < len(samples):
            room = self._wait_for_room(samples[at:])
            if not room:
                return
            chunk = samples[at : at + room]
            at += len(chunk)
            again = {sample.id: before[sample.id] for sample in chunk if sample.id in before}
            fresh = self._books.put(self._dataset, chunk, again, replace=self._replace_waiting)
            with _publishing_errors(self._url):
                self._publish(self._dataset, fresh)
            yield Fed(len(fresh), len(chunk) - len(fresh), sum(id_ in before for id_ in fresh))

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
