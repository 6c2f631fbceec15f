"""The one straight story of a ticket: take the payload, ask, judge, record durably; only then may Celery ack."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis.exceptions

from app import logs, manifest, settings
from app.errors import MillError, StoreError
from app.index import Entry as IndexEntry
from app.jsonl import Mending
from app.ledger import Ledger
from app.places import DatasetFolder, dataset_folder
from app.queue import Queue
from app.records import Kind, Record, Sample, Ticket
from app.settings import GenerationSettings, StoreSettings
from workers.caller import Caller, ModelMissing, Outcome, Suspected
from workers.discretion import words_for_logs
from workers.fault_tally import FaultTally
from workers.loop import LoopThread
from workers.outcomes import make_pen, make_record, poison_outcome
from workers.recorder import Entry, Recorder

logger = logging.getLogger(__name__)

_MAX_CRASHES = 3
_PAUSED_S = 1.0
_LANE_WAIT_S = 1.0
"""Seconds, on average, for which a suspect waits while the lane has no room; then its ticket goes behind all others."""
_LOOK_ROUND_S = 0.05
_RETRY_S = 1.0
"""Seconds between two tries while Redis or the disk is away."""


class SampleFailed(Exception):  # noqa: N818 - what Flower shows: the sample failed
    """A sample was given up; its failure record is durable. Raised so that Celery and Flower count a failure."""


class HandedBack(Exception):  # noqa: N818 - no error: the ticket goes back to the queue, behind all others
    """The worker ends before the sample was recorded, or the sample is not to be asked now."""


@dataclasses.dataclass
class _Job:
    """A sample that is being asked."""

    dataset: str
    sample: Sample
    ledger: Ledger
    generation: GenerationSettings
    recorded: concurrent.futures.Future[bool]
    poison: int = 0
    """Deaths for which it is given up unasked."""
    failure: str | None = None
    """Why it was given up, once it was."""


class Story:
    """Everything that a slot thread does with a ticket."""

    def __init__(
        self,
        *,
        books: Queue,
        owner: str,
        store: StoreSettings,
        caller: Caller,
        recorder: Recorder,
        faults: FaultTally,
        loop: LoopThread,
        stopping: Callable[[], bool],
    ) -> None:
        self._books = books
        self._owner = owner
        self._store = store
        self._caller = caller
        self._recorder = recorder
        self._faults = faults
        self._loop = loop
        self._stopping = stopping
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._running: dict[Ticket, concurrent.futures.Future[bool]] = {}
        self._asking = set[asyncio.Task[None]]()
        self._ledgers: dict[str, Ledger] = {}
        self._generation: dict[tuple[str, str], GenerationSettings] = {}

    @property
    def busy(self) -> int:
        """Tickets that are being worked on."""
        return len(self._running)

    def generate(self, ticket: Ticket) -> None:
        """Turn a ticket into a durable record, or find that there is nothing to do.

        Raises SampleFailed when the sample was given up (and that is durable), HandedBack when the worker ends first
        or the sample has to wait.
        """
        if self._stopping():
            raise HandedBack
        recorded: concurrent.futures.Future[bool] = concurrent.futures.Future()
        with self._lock:
            if ticket in self._running:
                return  # a second copy of a ticket that this worker is working on
            self._running[ticket] = recorded
        try:
            self._work_on(ticket, recorded)
        finally:
            with self._lock:
                del self._running[ticket]

    def hand_back(self) -> int:
        """Cancel every running request, so that its slot hands the ticket back; return how many there were."""
        count = len(self._asking)
        self._loop.soon(self._cancel_asking)
        return count

    def _cancel_asking(self) -> None:
        for task in list(self._asking):
            task.cancel()

    def _work_on(self, ticket: Ticket, recorded: concurrent.futures.Future[bool]) -> None:
        try:
            job = self._prepare(ticket, recorded)
            if job is None:
                return
            if job.poison:
                self._record(job, poison_outcome(job.dataset, job.sample, job.generation, deaths=job.poison))
            else:
                self._loop.soon(self._start_asking, job)
            new = recorded.result()
        except HandedBack:
            raise
        except BaseException as error:
            # Whatever it was, nobody asks the sample now: the ticket or the sweep brings it back.
            with contextlib.suppress(redis.exceptions.RedisError):
                self._books.release(ticket.dataset, ticket.sample_id, self._owner)
            if self._stopping() and isinstance(error, (concurrent.futures.CancelledError, MillError)):
                raise HandedBack from error
            if isinstance(error, Suspected):
                _tell_of_suspect(ticket)
                raise HandedBack from error
            if isinstance(error, (ModelMissing, MillError)):
                self._pause(ticket.dataset, str(error))
                raise HandedBack from error
            if isinstance(error, Exception) and self._is_hopeless(ticket, error):
                raise HandedBack from error
            raise
        if new and job.failure:
            raise SampleFailed(job.failure)

    def _is_hopeless(self, ticket: Ticket, error: Exception) -> bool:
        """Count an unexpected error of a sample; pause the dataset once it has happened too often to be chance."""
        with contextlib.suppress(redis.exceptions.RedisError):
            crashes = self._books.crash(ticket.dataset, ticket.sample_id)
            if crashes >= _MAX_CRASHES:
                why = f"sample {ticket.sample_id} ended in an unexpected error {crashes} times: {error!r}"
                self._pause(ticket.dataset, f"{why}; see the worker's log")
                logger.error("%s", why, exc_info=error)
                return True
        return False

    def _pause(self, dataset: str, why: str) -> None:
        with contextlib.suppress(redis.exceptions.RedisError):
            self._books.pause(dataset, why)
        logger.error("dataset %s is paused: %s", dataset, why, extra=logs.fields("dataset_paused", dataset=dataset))

    def _prepare(self, ticket: Ticket, recorded: concurrent.futures.Future[bool]) -> _Job | None:
        """Return what is to be asked, waiting while Redis or the disk is away; None if there is nothing to do.

        Raises HandedBack when the worker ends first or the sample has to wait.
        """
        while True:
            try:
                job = self._look_up(ticket, recorded)
            except redis.exceptions.RedisError as error:
                trouble: Exception = error
            except StoreError as error:
                self._recorder.stall("open", str(error))
                trouble = error
            else:
                self._recorder.stall("open", None)
                return job
            if self._stopping():
                raise HandedBack from trouble
            time.sleep(_RETRY_S)

    def _look_up(self, ticket: Ticket, recorded: concurrent.futures.Future[bool]) -> _Job | None:
        """Return what is to be asked; None if somebody has finished the sample or is asking it."""
        dataset, id_ = ticket.dataset, ticket.sample_id
        taken = self._books.take(dataset, id_, self._owner)
        if taken.state == "paused":
            time.sleep(_PAUSED_S)  # until this worker stops reading the dataset's queue
            raise HandedBack
        if taken.state == "aside":
            _tell_of_suspect(ticket)
            raise HandedBack
        if taken.state == "full":
            self._wait_for_the_lane()
            raise HandedBack
        if taken.sample is None:
            return None
        ledger = self._open(dataset)
        if taken.state != "new" or taken.deaths:
            # Its last owner died, perhaps between the fsync and the index: look at the file itself.
            _tell(ledger.catch_up())
        entry = ledger.look_up([id_]).get(id_)
        if entry is not None and _is_finished(entry, taken.sample):
            self._books.forget(dataset, [id_])
            return None
        generation = self._settings_of(dataset, taken.sample)
        if generation is None:
            logger.error(
                "dataset %s: the settings %s of sample %s are not known; run producer enqueue again",
                dataset,
                taken.sample.settings,
                id_,
                extra=logs.fields("settings_unknown", dataset=dataset, sample=id_),
            )
            self._books.forget(dataset, [id_])
            return None
        poison = taken.deaths if taken.state == "poison" else 0
        return _Job(dataset, taken.sample, ledger, generation, recorded, poison)

    def _wait_for_the_lane(self) -> None:
        # Spread, for tickets that go back at the same moment hinder each other.
        until = time.monotonic() + _LANE_WAIT_S * (0.5 + random.random())  # noqa: S311 jitter
        while time.monotonic() < until and not self._stopping():
            time.sleep(_LOOK_ROUND_S)

    def _open(self, dataset: str) -> Ledger:
        with self._opening:
            ledger = self._ledgers.get(dataset)
            if ledger is None:
                ledger = Ledger.open(existing_folder(self._store.prepared_dir, dataset), patience_s=LOCK_PATIENCE_S)
                _tell(ledger.catch_up())
                self._ledgers[dataset] = ledger
            return ledger

    def _settings_of(self, dataset: str, sample: Sample) -> GenerationSettings | None:
        """Return the settings that the sample was enqueued with, from Redis or else from the manifest."""
        key = (dataset, sample.settings)
        if key not in self._generation:
            content = self._books.settings(dataset, sample.settings)
            if content is None:
                known = manifest.read(self._open(dataset))
                entries = known.settings if known else []
                content = next((entry.content for entry in entries if entry.fingerprint == sample.settings), None)
            if content is None:
                return None
            self._generation[key] = settings.generation_from_content(content)
        return self._generation[key]

    # In the loop

    def _start_asking(self, job: _Job) -> None:
        task = self._loop.loop.create_task(self._ask(job))
        self._asking.add(task)
        task.add_done_callback(functools.partial(self._settle, job))

    async def _ask(self, job: _Job) -> None:
        with logs.about(dataset=job.dataset):
            outcome = await self._caller.ask(
                job.sample,
                job.generation,
                on_death=functools.partial(self._blame, job),
                on_fault=functools.partial(self._faults.note, job.dataset),
            )
        self._record(job, outcome)

    async def _blame(self, job: _Job) -> bool:
        """Count a server's death against the sample; tell whether it is a suspect now."""
        try:
            return await asyncio.to_thread(self._books.blame, job.dataset, job.sample.id, self._owner)
        except redis.exceptions.RedisError:
            return False  # a death that nobody can count

    def _record(self, job: _Job, outcome: Outcome) -> None:
        record = make_record(job.dataset, job.sample, outcome, job.generation, worker=self._owner)
        if record.verdict is Kind.FAILED:
            job.failure = f"{record.reason}: {record.error}"
            _tell_of_failure(job, record)
        pen, prompt_tokens = make_pen(record), record.usage.prompt_tokens or 0
        self._recorder.put(Entry(job.dataset, job.ledger, pen, job.recorded, record.latency_s, prompt_tokens))

    def _settle(self, job: _Job, task: asyncio.Task[None]) -> None:
        """Tell the slot that waits when no record will come."""
        self._asking.discard(task)
        if task.cancelled():
            job.recorded.cancel()
        elif error := task.exception():
            job.recorded.set_exception(error)


LOCK_PATIENCE_S = 10.0
"""Seconds after which a folder whose lock nobody lets go counts as one that takes no records."""


def existing_folder(prepared: Path, dataset: str) -> DatasetFolder:
    """Return the folder that enqueue made for the dataset; a worker never makes one.

    Raises StoreError when it is not there: records in another folder would look lost.
    """
    folder = dataset_folder(prepared, dataset)
    if not folder.manifest.exists():
        raise StoreError(
            f"{folder.path.absolute()} is not the folder of the dataset {dataset!r}: it has no manifest.json; set this "
            "worker's MILL_PREPARED_DIR to the folder that producer enqueue wrote to."
        )
    return folder


def _is_finished(entry: IndexEntry, sample: Sample) -> bool:
    """Tell whether the sample is recorded, in its round or for good."""
    if entry.kind is Kind.PENDING:
        return False
    return entry.kind is Kind.ACCEPTED or entry.round >= sample.round


def _tell_of_failure(job: _Job, record: Record) -> None:
    reason, said = record.reason or "", record.error or ""
    logger.warning(
        "dataset %s: sample %s failed: %s: %s",
        job.dataset,
        record.id,
        reason,
        words_for_logs(reason, said, job.sample.messages, job.sample.tools),
        extra=logs.fields(
            "sample_failed",
            dataset=job.dataset,
            sample=record.id,
            fault=reason,
            endpoint=record.endpoint,
            attempts=record.attempts,
        ),
    )


def _tell_of_suspect(ticket: Ticket) -> None:
    logger.warning(
        "dataset %s: workers or model servers died more than once while sample %s was asked; it is asked after the "
        "others, apart from them",
        ticket.dataset,
        ticket.sample_id,
        extra=logs.fields("sample_suspected", dataset=ticket.dataset, sample=ticket.sample_id),
    )


def _tell(mended: list[Mending]) -> None:
    for mending in mended:
        logger.warning("%s", mending)
