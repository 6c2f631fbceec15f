"""The one straight story of a ticket: take the payload, ask, judge, record durably; only then may Celery ack."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Callable

import redis.exceptions

from app import logs, settings
from app.errors import MillError
from app.ledger import Ledger
from app.queue import Queue
from app.records import Kind, Record, Sample, Ticket
from app.settings import GenerationSettings, StoreSettings
from workers.caller import Caller, Held, ModelMissing, Outcome, Suspected
from workers.dialogue import Dialogue
from workers.discretion import words_for_logs
from workers.fault_tally import FaultTally
from workers.intake import HandedBack, Intake, tell, tell_of_suspect
from workers.loop import LoopThread
from workers.outcomes import make_pen, make_record, poison_outcome, prompt_tokens
from workers.recorder import Entry, Recorder
from workers.turn_memory import TurnMemory

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Job:
    """A sample that is being asked."""

    dataset: str
    sample: Sample
    ledger: Ledger
    generation: GenerationSettings
    recorded: concurrent.futures.Future[bool]
    dialogue: Dialogue | None = None
    """What asks it turn by turn, where all turns of a conversation are made anew."""
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
        self._caller = caller
        self._recorder = recorder
        self._faults = faults
        self._loop = loop
        self._intake = Intake(books=books, owner=owner, store=store, recorder=recorder, stopping=stopping)
        self._asking = set[asyncio.Task[None]]()
        self._generation: dict[tuple[str, str], GenerationSettings] = {}

    @property
    def intake(self) -> Intake:
        """What its slots are working on."""
        return self._intake

    def generate(self, ticket: Ticket) -> None:
        """Turn a ticket into a durable record, or find that there is nothing to do (see Intake.work_on)."""
        self._intake.work_on(ticket, self._work_on)

    def hand_back(self) -> int:
        """Cancel every running request, so that its slot hands the ticket back; return how many there were."""
        count = len(self._asking)
        self._loop.soon(self._cancel_asking)
        return count

    def _cancel_asking(self) -> None:
        for task in list(self._asking):
            task.cancel()

    def _work_on(self, ticket: Ticket) -> str | None:
        recorded: concurrent.futures.Future[bool] = concurrent.futures.Future()
        job = self._intake.prepare(ticket, functools.partial(self._look_up, recorded=recorded))
        if job is None:
            return None
        if job.poison:
            self._record(
                job, self._line(job, poison_outcome(job.dataset, job.sample, job.generation, deaths=job.poison))
            )
        else:
            self._loop.soon(self._start_asking, job)
        return job.failure if self._result(ticket, recorded) else None

    def _result(self, ticket: Ticket, recorded: concurrent.futures.Future[bool]) -> bool:
        """Wait until the record is durable; return whether it is new.

        Raises HandedBack when the sample has to wait, MillError when its dataset has to.
        """
        try:
            return recorded.result()
        except Held as error:
            self._intake.release(ticket)
            self._intake.wait()
            raise HandedBack from error
        except Suspected as error:
            tell_of_suspect(ticket)
            raise HandedBack from error
        except ModelMissing as error:
            raise MillError(str(error)) from error

    def _look_up(self, ticket: Ticket, recorded: concurrent.futures.Future[bool]) -> _Job | None:
        """Return what is to be asked; None if somebody has finished the sample or is asking it."""
        dataset, id_ = ticket.dataset, ticket.sample_id
        taken = self._intake.take(ticket)
        if taken.sample is None:
            return None
        ledger = self._intake.open(dataset)
        orphaned = taken.state != "new" or taken.deaths > 0
        if orphaned:
            # Its last owner died, perhaps between the fsync and the index: look at the file itself.
            tell(ledger.catch_up())
        entry = ledger.look_up([id_]).get(id_)
        if entry is not None and entry.settles(taken.sample.round):
            self._books.forget(dataset, {id_: taken.sample.round})
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
            self._books.forget(dataset, {id_: taken.sample.round})
            return None
        job = _Job(dataset, taken.sample, ledger, generation, recorded)
        if taken.state == "poison":
            job.poison = taken.deaths
        elif generation.turns == "all":
            job.dialogue = self._dialogue(job, catch_up=orphaned)
        return job

    def _dialogue(self, job: _Job, *, catch_up: bool) -> Dialogue:
        """Return the conversation as far as it is durable. Raises StoreError."""
        sample = job.sample
        turns = self._intake.open(job.dataset, turns=sample.settings)
        if catch_up:
            tell(turns.catch_up())
        memory = TurnMemory(job.dataset, sample, turns, self._recorder)
        return Dialogue(job.dataset, sample, job.generation, memory, worker=self._owner)

    def _settings_of(self, dataset: str, sample: Sample) -> GenerationSettings | None:
        """Return the settings that the sample was enqueued with, if they are known."""
        key = (dataset, sample.settings)
        if key not in self._generation:
            content = self._intake.settings_of(dataset, sample.settings)
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
        ask = functools.partial(
            self._caller.ask,
            generation=job.generation,
            on_death=functools.partial(self._blame, job),
            on_fault=functools.partial(self._faults.note, job.dataset),
            is_held=functools.partial(self._recorder.holds, job.dataset),
        )
        with logs.about(dataset=job.dataset):
            record = await job.dialogue.run(ask) if job.dialogue else self._line(job, await ask(job.sample))
        self._record(job, record)

    async def _blame(self, job: _Job) -> bool:
        """Count a server's death against the sample; tell whether it is a suspect now."""
        try:
            return await asyncio.to_thread(self._books.blame, job.dataset, job.sample.id, self._owner)
        except redis.exceptions.RedisError:
            return False  # a death that nobody can count

    def _line(self, job: _Job, outcome: Outcome) -> Record:
        return make_record(job.dataset, job.sample, outcome, job.generation, worker=self._owner)

    def _record(self, job: _Job, record: Record) -> None:
        if record.verdict is Kind.FAILED:
            job.failure = f"{record.reason}: {record.error}"
            _tell_of_failure(job, record)
        pen = make_pen(record)
        self._recorder.put(Entry(job.dataset, job.ledger, pen, job.recorded, record.latency_s, prompt_tokens(record)))

    def _settle(self, job: _Job, task: asyncio.Task[None]) -> None:
        """Tell the slot that waits when no record will come."""
        self._asking.discard(task)
        if task.cancelled():
            job.recorded.cancel()
        elif error := task.exception():
            job.recorded.set_exception(error)


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
