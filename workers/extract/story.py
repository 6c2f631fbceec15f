"""The story of an extract ticket: read the record, wait for the model, write the file, record it; only then the ack."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from app.errors import MillError, StoreError
from app.extraction import (
    Extracted,
    Plan,
    Reason,
    Refusal,
    Sequence,
    check_sequence,
    decode_source,
    exact_sequence,
    plan_from_content,
)
from app.ledger import Ledger, Pen
from app.queue import Queue
from app.records import Kind, Sample, Ticket, Usage, encode_line
from app.settings import StoreSettings
from workers.extract.engine import Engine
from workers.extract.files import Written, tensors_of, write_states
from workers.extract.model import OutOfMemoryError
from workers.extract.tokens import Retokenizer
from workers.intake import HandedBack, Intake, tell
from workers.recorder import Entry, Recorder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A sample whose states are to be made."""

    dataset: str
    sample: Sample
    plan: Plan
    ledger: Ledger
    began: float
    poison: int = 0
    """Deaths for which it is given up unread."""


class ExtractStory:
    """Everything that a slot thread does with an extract ticket."""

    def __init__(
        self,
        *,
        books: Queue,
        owner: str,
        store: StoreSettings,
        recorder: Recorder,
        engine: Engine,
        stopping: Callable[[], bool],
    ) -> None:
        self._books = books
        self._owner = owner
        self._recorder = recorder
        self._engine = engine
        self._stopping = stopping
        self._intake = Intake(books=books, owner=owner, store=store, recorder=recorder, stopping=stopping)
        self._plans: dict[tuple[str, str], Plan] = {}
        self._retokenizer = Retokenizer()

    @property
    def intake(self) -> Intake:
        """What its slots are working on."""
        return self._intake

    def extract(self, ticket: Ticket) -> None:
        """Turn a ticket into a durable file and its record, or find that there is nothing to do (Intake.work_on)."""
        self._intake.work_on(ticket, self._work_on)

    def _work_on(self, ticket: Ticket) -> str | None:
        job = self._intake.prepare(ticket, self._look_up)
        return None if job is None else self._do(job)

    # Before

    def _look_up(self, ticket: Ticket) -> _Job | None:
        """Return what is to be made; None if somebody has made it or is making it."""
        dataset, id_ = ticket.dataset, ticket.sample_id
        taken = self._intake.take(ticket)
        if taken.sample is None:
            return None
        ledger = self._intake.open(dataset)
        if taken.state != "new" or taken.deaths:
            tell(ledger.catch_up())  # its last owner died, perhaps between the fsync and the index
        entry = ledger.look_up([id_]).get(id_)
        if entry is not None and entry.settles(taken.sample.round):
            self._books.forget(dataset, {id_: taken.sample.round})
            return None
        plan = self._plan_of(dataset, taken.sample)
        poison = taken.deaths if taken.state == "poison" else 0
        return _Job(dataset, taken.sample, plan, ledger, time.time(), poison)

    def _plan_of(self, dataset: str, sample: Sample) -> Plan:
        """Return the plan that the sample was enqueued with.

        Raises MillError where it is not known.
        """
        key = (dataset, sample.settings)
        if key not in self._plans:
            content = self._intake.settings_of(dataset, sample.settings)
            if content is None:
                raise MillError(f"the plan {sample.settings} of {dataset} is not known; run producer extract again.")
            self._plans[key] = plan_from_content(content)
        return self._plans[key]

    # The work

    def _do(self, job: _Job) -> str | None:
        """Make the file and record it, or record why not; return that reason."""
        if job.poison:
            again = f"producer retry {shlex.quote(job.dataset)} --fault poison tries it again"
            return self._give_up(job, Refusal(Reason.POISON, f"{job.poison} workers died over this sample; {again}"))
        sequence = self._read(job)
        if isinstance(sequence, Refusal):
            return self._give_up(job, sequence)
        try:
            with self._engine.states(job.plan, sequence.ids) as states:
                if not bool(states.tensor.isfinite().all()):
                    words = "the model's states hold NaN or infinity; try --dtype fp32"
                    return self._give_up(job, Refusal(Reason.NOT_FINITE, words), sequence)
                record = self._write(job, sequence, states.tensor, states.seconds)
        except OutOfMemoryError as error:
            words = f"{error}; a larger GPU, MILL_DEVICE=auto, or a lower --max-length helps"
            return self._give_up(job, Refusal(Reason.OUT_OF_MEMORY, words), sequence)
        self._record(job, record)
        return None

    def _read(self, job: _Job) -> Sequence | Refusal:
        source, id_ = self._intake.open(job.plan.source), job.sample.id
        entry = source.look_up([id_]).get(id_)
        if entry is None or entry.kind is not Kind.ACCEPTED:
            return Refusal(Reason.SOURCE_GONE, f"the dataset {job.plan.source} has no accepted record of it any more")
        record = decode_source(source.read(entry, id_))
        sequence = exact_sequence(record)
        if isinstance(sequence, Refusal) and sequence.reason is Reason.NO_EXACT_IDS and job.plan.retokenize:
            sequence = self._retokenizer.sequence(record, job.plan)
        if isinstance(sequence, Refusal):
            return sequence
        return check_sequence(sequence, job.plan) or sequence

    def _write(self, job: _Job, sequence: Sequence, tensor: object, seconds: float) -> Extracted:
        plan, sample = job.plan, job.sample
        name = plan.file_of(sample.id, sample.source.row or 1)
        path = plan.folder(job.ledger.folder.path) / name
        tensors = tensors_of(plan.layout, sample.id, sequence, tensor)
        written = self._until_written(job.dataset, path, lambda: write_states(path, plan.layout, tensors))
        return self._line(
            job,
            Kind.ACCEPTED,
            file=name,
            bytes=written.bytes,
            sha256=written.sha256,
            latency_s=round(seconds, 6),
            **_counts(sequence),
        )

    def _until_written(self, dataset: str, path: Path, write: Callable[[], Written]) -> Written:
        """Write until it works: a full disk holds the states, it does not lose them.

        Raises HandedBack when the worker is told to end meanwhile.
        """
        step = f"file {path}"
        while True:
            try:
                written = write()
            except StoreError as error:
                self._recorder.stall(dataset, step, error)
                if self._stopping():
                    self._recorder.stall(dataset, step, None)
                    raise HandedBack from error
                self._intake.wait()
            else:
                self._recorder.stall(dataset, step, None)
                return written

    def _give_up(self, job: _Job, why: Refusal, sequence: Sequence | None = None) -> str:
        counts = _counts(sequence) if sequence else {}
        self._record(job, self._line(job, Kind.FAILED, reason=why.reason.value, error=why.detail, **counts))
        failure = f"{why.reason}: {why.detail}"
        logger.warning("dataset %s: sample %s failed: %s", job.dataset, job.sample.id, failure)
        return failure

    def _line(self, job: _Job, verdict: Kind, **fields: object) -> Extracted:
        plan = job.plan
        return Extracted(
            id=job.sample.id,
            dataset=job.dataset,
            verdict=verdict,
            source=job.sample.source,
            layers=plan.layers,
            hidden_size=plan.hidden_size,
            dtype=plan.dtype,
            layout=plan.layout,
            model=plan.model,
            settings=job.sample.settings,
            round=job.sample.round,
            started_at=job.began,
            finished_at=time.time(),
            worker=self._owner,
            **fields,  # type: ignore[arg-type] # the rest of the record's fields
        )

    def _record(self, job: _Job, record: Extracted) -> None:
        """Hand the line over and wait until it is durable."""
        reason, tokens = record.reason or "", record.usage.completion_tokens or 0
        pen = Pen(record.verdict, record.id, encode_line(record), reason=reason, round=record.round, tokens=tokens)
        recorded: concurrent.futures.Future[bool] = concurrent.futures.Future()
        prompt_tokens = record.usage.prompt_tokens or 0
        self._recorder.put(Entry(job.dataset, job.ledger, pen, recorded, record.latency_s, prompt_tokens))
        recorded.result()


def _counts(sequence: Sequence) -> dict[str, object]:
    usage = Usage(prompt_tokens=len(sequence.prompt), completion_tokens=len(sequence.output))
    return {"tokens": len(sequence), "retokenized": sequence.retokenized, "usage": usage}
