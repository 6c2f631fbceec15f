"""What every story does with a ticket around its work: take it, open its folder, wait for the disk, give it back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import redis.exceptions

from app import logs, manifest
from app.errors import DiskFullError, MillError, StoreError
from app.jsonl import Mending
from app.lane import Taken
from app.ledger import Ledger
from app.lock import LOCK_PATIENCE_S
from app.places import existing_folder
from app.queue import Queue
from app.records import Ticket
from app.settings import StoreSettings
from workers.discretion import trace_for_logs
from workers.recorder import Recorder
from workers.turn_memory import TurnLedger

logger = logging.getLogger(__name__)

_Job = TypeVar("_Job")
_MAX_CRASHES = 3
_MAX_TRIES = 3
"""Tries to use a folder after which its ticket goes behind the others, whose slot it blocks."""
_PAUSED_S = 1.0
_LANE_WAIT_S = 1.0
"""Seconds, on average, for which a suspect waits while the lane has no room; then its ticket goes behind all others."""
_LOOK_ROUND_S = 0.05
_RETRY_S = 1.0
"""Seconds, on average, between two tries while Redis or the disk is away."""
_STEP = "open"


class SampleFailed(Exception):  # noqa: N818 - what Flower shows: the sample failed
    """A sample was given up; its failure record is durable. Raised so that Celery and Flower count a failure."""


class HandedBack(Exception):  # noqa: N818 - no error: the ticket goes back to the queue, behind all others
    """The worker ends before the sample was recorded, or the sample is not to be asked now."""


@dataclasses.dataclass
class _Door:
    """Through which one slot at a time opens a dataset's folder, while those of other datasets pass by."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    ledger: Ledger | None = None
    error: StoreError | None = None
    failed_at: float = 0.0
    """Monotonic seconds of the last try that failed, with that error."""


class Intake:
    """Takes tickets in for a worker's slots, and lets go of those that come to nothing."""

    def __init__(
        self, *, books: Queue, owner: str, store: StoreSettings, recorder: Recorder, stopping: Callable[[], bool]
    ) -> None:
        self._books = books
        self._owner = owner
        self._store = store
        self._recorder = recorder
        self._stopping = stopping
        self._doors: dict[tuple[str, str | None], _Door] = {}
        self._lock = threading.Lock()
        self._running = set[Ticket]()

    @property
    def busy(self) -> int:
        """Tickets that are being worked on."""
        return len(self._running)

    @property
    def datasets(self) -> set[str]:
        """The datasets of those tickets."""
        with self._lock:
            return {ticket.dataset for ticket in self._running}

    def work_on(self, ticket: Ticket, work: Callable[[Ticket], str | None]) -> None:
        """Let a slot do a ticket's work, which returns why the sample was given up, if it was.

        Nothing is done for a second copy of a ticket that this worker is working on.
        Raises SampleFailed when the sample was given up (and that is durable), HandedBack when the worker ends first
        or the sample has to wait.
        """
        if self._stopping():
            raise HandedBack
        with self._lock:
            if ticket in self._running:
                return
            self._running.add(ticket)
        try:
            with self._care(ticket):
                failure = work(ticket)
        finally:
            with self._lock:
                self._running.discard(ticket)
        if failure:
            raise SampleFailed(failure)

    def prepare(self, ticket: Ticket, look_up: Callable[[Ticket], _Job | None]) -> _Job | None:
        """Return what `look_up` finds is to be done, waiting while Redis or the disk is away; None: nothing.

        Raises HandedBack when the worker ends first, the sample has to wait, or its folder goes on taking no records
        while those of others may.
        """
        tries = 0
        while True:
            trouble: Exception | None = None
            # On a full disk it may go on: the call waits at the gate, which is shut.
            if self._recorder.shut or not self._recorder.holds(ticket.dataset, besides=_STEP):
                try:
                    job = look_up(ticket)
                except redis.exceptions.RedisError as error:
                    trouble = error
                except StoreError as error:
                    self.release(ticket)  # whoever ends while it waits for a disk has asked nothing
                    self._recorder.stall(ticket.dataset, _STEP, error)
                    trouble = error
                else:
                    if job is not None:
                        self._recorder.stall(ticket.dataset, _STEP, None)
                    return job
            if not self._recorder.shut and not isinstance(trouble, (redis.exceptions.RedisError, DiskFullError)):
                tries += 1
            if self._stopping() or tries >= _MAX_TRIES:
                raise HandedBack from trouble
            self.wait()

    def take(self, ticket: Ticket) -> Taken:
        """Take the sample; without one in the answer there is nothing to do. Its folder is open then.

        Raises HandedBack when the sample has to wait, StoreError when the folder takes no records.
        """
        taken = self._books.take(ticket.dataset, ticket.sample_id, self._owner)
        if taken.sample is not None and not self._is_open(ticket.dataset):
            # Opening can take long. Whoever dies meanwhile has asked nothing, and the sample is not to blame.
            self._books.release(ticket.dataset, ticket.sample_id, self._owner)
            self.open(ticket.dataset)
            taken = self._books.take(ticket.dataset, ticket.sample_id, self._owner)
        if taken.state == "paused":
            self.wait(_PAUSED_S)  # until this worker stops reading the dataset's queue
            raise HandedBack
        if taken.state == "aside":
            tell_of_suspect(ticket)
            raise HandedBack
        if taken.state == "full":
            self.wait(_LANE_WAIT_S)
            raise HandedBack
        return taken

    def release(self, ticket: Ticket) -> None:
        """Let go of a sample that nobody works on now: its ticket, or the sweep, brings it back."""
        with contextlib.suppress(redis.exceptions.RedisError):
            self._books.release(ticket.dataset, ticket.sample_id, self._owner)

    def wait(self, seconds: float | None = None) -> None:
        """Wait so many seconds on average, or until the next try; not beyond the worker's end."""
        # Spread, for tickets that go back at the same moment hinder each other.
        wait_s = (_RETRY_S if seconds is None else seconds) * (0.5 + random.random())  # noqa: S311 jitter
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0 and not self._stopping():
            time.sleep(min(left, _LOOK_ROUND_S))

    def open(self, dataset: str, *, turns: str | None = None) -> Ledger:
        """Return the dataset's ledger, caught up when it is opened.

        `turns`: the one of its conversations' turns instead that were asked with the settings of that fingerprint.
        Raises StoreError when the folder cannot be used; slots that wait for one that tries hear the same.
        """
        door = self._doors.setdefault((dataset, turns), _Door())
        if door.ledger is not None:
            return door.ledger
        came_at = time.monotonic()
        with door.lock:
            if door.ledger is not None:
                return door.ledger
            if door.error is not None and door.failed_at >= came_at:
                raise type(door.error)(str(door.error)) from door.error
            try:
                folder = existing_folder(self._store.prepared_dir, dataset)
                ledger = (
                    Ledger.open(folder, patience_s=LOCK_PATIENCE_S)
                    if turns is None
                    else TurnLedger.open(folder.turns(turns), patience_s=LOCK_PATIENCE_S)
                )
                tell(ledger.catch_up())
            except StoreError as error:
                door.error, door.failed_at = error, time.monotonic()
                raise
            door.ledger = ledger
            return ledger

    def settings_of(self, dataset: str, fingerprint: str) -> dict[str, Any] | None:
        """Return the content of the settings that samples were enqueued with, from Redis or else from the manifest.

        None where neither knows them. Raises StoreError when the manifest, or its folder, cannot be used.
        """
        content = self._books.settings(dataset, fingerprint)
        if content is None:
            known = manifest.read(self.open(dataset))
            entries = known.settings if known else []
            content = next((entry.content for entry in entries if entry.fingerprint == fingerprint), None)
        return content

    def _is_open(self, dataset: str) -> bool:
        door = self._doors.get((dataset, None))
        return door is not None and door.ledger is not None

    @contextlib.contextmanager
    def _care(self, ticket: Ticket) -> Iterator[None]:
        """Let go of the sample if the work on it ends in an error, and pause its dataset where others would end so.

        What is no bug is raised as HandedBack.
        """
        try:
            with self._released_on_error(ticket):
                yield
        except HandedBack:
            raise
        except MillError as error:
            if not self._stopping():
                self.pause(ticket.dataset, str(error))
            raise HandedBack from error
        except concurrent.futures.CancelledError as error:
            if self._stopping() or self._is_hopeless(ticket, error):
                raise HandedBack from error
            raise
        except Exception as error:
            if self._is_hopeless(ticket, error):
                raise HandedBack from error
            raise

    @contextlib.contextmanager
    def _released_on_error(self, ticket: Ticket) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release(ticket)
            raise

    def _is_hopeless(self, ticket: Ticket, error: Exception) -> bool:
        """Count an unexpected error of a sample; pause the dataset once it has happened too often to be chance."""
        with contextlib.suppress(redis.exceptions.RedisError):
            crashes = self._books.crash(ticket.dataset, ticket.sample_id)
            if crashes >= _MAX_CRASHES:
                # Not its words, which may quote a prompt or an answer.
                name = type(error).__name__
                why = f"sample {ticket.sample_id} ended in an unexpected error {crashes} times: {name}"
                self.pause(ticket.dataset, f"{why}; see the worker's log")
                logger.error("%s\n%s", why, trace_for_logs(error))
                return True
        return False

    def pause(self, dataset: str, why: str) -> None:
        """Stop all workers from taking the dataset's tickets, and say why."""
        with contextlib.suppress(redis.exceptions.RedisError):
            if self._books.pause_reason(dataset) == why:
                return
            self._books.pause(dataset, why)
        logger.error("dataset %s is paused: %s", dataset, why, extra=logs.fields("dataset_paused", dataset=dataset))


def tell_of_suspect(ticket: Ticket) -> None:
    """Log that a sample is asked apart from the others from now on."""
    logger.warning(
        "dataset %s: workers or model servers died more than once while sample %s was asked; it is asked after the "
        "others, apart from them",
        ticket.dataset,
        ticket.sample_id,
        extra=logs.fields("sample_suspected", dataset=ticket.dataset, sample=ticket.sample_id),
    )


def tell(mended: list[Mending]) -> None:
    """Log what was mended in a folder."""
    for mending in mended:
        logger.warning("%s", mending)
