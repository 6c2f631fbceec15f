"""A worker's periodic duties beside the work: heartbeat, progress files, the sweep for lost tickets."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kombu.exceptions
import redis.exceptions

from app.errors import MillError
from app.queue import Queue

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_SECOND_LOOK_S = 2.0
"""Seconds between the two looks that prove a ticket lost."""


@dataclasses.dataclass(frozen=True)
class Duties:
    """What the keeper calls, so that it needs to know no other room."""

    heartbeat: Callable[[], Mapping[str, Any]]
    publish: Callable[[str, Sequence[str]], None]
    write_progress: Callable[[], None]
    tell_faults: Callable[[], None]
    """Tells Redis of the failed calls since the last time."""
    explain: Callable[[redis.exceptions.RedisError], str] = str
    """Says in one sentence why Redis cannot be used."""


class Keeper:
    """Beats once a second, and takes its turns at the duties that one worker does for all.

    Each has a thread of its own: however long a duty takes, the worker does not look dead.
    """

    def __init__(
        self,
        books: Queue,
        owner: str,
        duties: Duties,
        *,
        lease_s: float,
        progress_s: float,
        extract: bool = False,
    ) -> None:
        """`extract`: read the queues of datasets of hidden states, and no others."""
        self._extract = extract
        self._books = books
        self._owner = owner
        self._duties = duties
        self._lease_s = lease_s
        self._progress_s = progress_s
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_beating, name="mill-heart", daemon=True),
            threading.Thread(target=self._do_duties, name="mill-duties", daemon=True),
        ]
        self._queues: tuple[set[str], set[str]] = (set(), set())
        self._is_first = False
        self._away = ""
        """Why Redis cannot be used, while it cannot."""
        self._unwritten = ""
        """Why progress could not be written the last time."""

    @property
    def queues(self) -> tuple[set[str], set[str]]:
        """The queues to read and those of paused datasets, as of the last beat."""
        return self._queues

    def start(self) -> None:
        """Beat once, so that the worker is known before it takes work, then go on in the threads."""
        self._is_first = not self._books.workers()
        self._beat()
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Start the rates anew if this is the first worker: from now on it takes work."""
        if self._is_first:
            self._books.begin_runs()

    def stop(self) -> None:
        """End the threads and the worker's presence."""
        self._ended.set()
        for thread in self._threads:
            thread.join(10)
        try:
            self._duties.tell_faults()
            self._books.part(self._owner)
        except redis.exceptions.RedisError:
            logger.debug("Redis is away; the heartbeat expires by itself")

    def _keep_beating(self) -> None:
        while not self._ended.wait(_BEAT_S):
            try:
                self._beat()
            except redis.exceptions.RedisError as error:
                why = self._duties.explain(error)
                if why != self._away:
                    logger.warning(
                        "Redis is away or full: %s Finished records are written, and the work goes on when it is back.",
                        why,
                    )
                self._away = why
                continue
            except Exception:
                # The heart must go on, or this worker would count as dead.
                logger.exception("a heartbeat failed")
                continue
            if self._away:
                logger.warning("Redis is back")
            self._away = ""

    def _do_duties(self) -> None:
        while not self._ended.wait(_BEAT_S):
            try:
                self._sweep()
                self._progress()
            except (redis.exceptions.RedisError, kombu.exceptions.KombuError):
                logger.debug("Redis is away or full; the duty's next turn does it", exc_info=True)
            except Exception:
                # A bug in one duty must not end the others.
                logger.exception("a periodic duty failed; the work goes on")

    def _beat(self) -> None:
        # Shorter than the visibility timeout: when a dead worker's ticket comes back, its heartbeat is gone.
        self._books.beat(self._owner, self._duties.heartbeat(), ttl_s=max(3.0, min(10.0, self._lease_s / 3)))
        self._queues = self._books.queues(extract=self._extract)
        self._duties.tell_faults()

    def _sweep(self) -> None:
        """Re-queue samples whose ticket was lost (kombu's window between popping and noting a message)."""
        if not self._books.take_turn("sweep", self._owner, for_s=self._lease_s / 6):
            return
        suspects = {dataset: self._books.without_ticket(dataset) for dataset in self._books.datasets()}
        if not any(suspects.values()) or self._ended.wait(_SECOND_LOOK_S):
            return
        for dataset, ids in suspects.items():
            lost = sorted(ids & self._books.without_ticket(dataset)) if ids else []
            if lost:
                logger.warning("dataset %s: lost tickets that are queued again: %d", dataset, len(lost))
                self._duties.publish(dataset, lost)

    def _progress(self) -> None:
        if not self._books.take_turn("progress", self._owner, for_s=self._progress_s):
            return
        started = time.monotonic()
        try:
            self._duties.write_progress()
            self._unwritten = ""
        except MillError as error:
            if str(error) != self._unwritten:  # a disk that stays full is told of once
                logger.warning("progress could not be written: %s", error)
            self._unwritten = str(error)
        for dataset in self._books.datasets():
            self._books.tally.trim(dataset)
        logger.debug("progress written in %.3f s", time.monotonic() - started)
