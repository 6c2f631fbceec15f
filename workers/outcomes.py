"""From an outcome to the line that is written: the verdict and everything that proves how the answer was made."""

from __future__ import annotations

import shlex
import time

from app.ledger import Pen
from app.records import Kind, Record, Sample, Verdict, encode_line, sample_seed
from app.settings import GenerationSettings
from app.verdict import judge
from workers.caller import Outcome
from workers.faults import FaultKind, make_fault

_FROM_COMPLETION = (
    "reasoning",
    "reasoning_field",
    "content",
    "tool_calls",
    "finish_reason",
    "stop_reason",
    "unparsed_calls",
    "prompt_token_ids",
    "output_ids",
    "ids",
    "ids_end",
    "ids_check",
    "raw",
    "template",
    "notes",
    "usage",
)


def poison_outcome(dataset: str, sample: Sample, generation: GenerationSettings, *, deaths: int) -> Outcome:
    """Return the outcome of a sample that is not asked any more: so many workers and model servers died over it."""
    message = (
        f"{deaths} workers or model servers died while this sample was asked, the last of them with no other suspect "
        f"beside it; producer retry {shlex.quote(dataset)} --fault poison asks it again"
    )
    now = time.time()
    return Outcome(
        completion=None,
        fault=make_fault(FaultKind.POISON, message),
        endpoint=None,
        protocol=None,
        attempts=deaths,
        faults=[],
        started_at=now,
        finished_at=now,
        latency_s=None,
        request_id=None,
        model=generation.model,
        seed=None if generation.seed is None else sample_seed(generation.seed, sample.id),
    )


def make_record(
    dataset: str, sample: Sample, outcome: Outcome, generation: GenerationSettings, *, worker: str
) -> Record:
    """Return the line to write for an outcome: accepted, rejected or failed."""
    completion = outcome.completion
    if completion is None:
        fault = outcome.fault
        verdict = Verdict(Kind.FAILED, fault.kind.value if fault else "unknown")
    else:
        verdict = judge(completion, generation.rules())
    answered = {} if completion is None else {name: getattr(completion, name) for name in _FROM_COMPLETION}
    return Record(
        id=sample.id,
        dataset=dataset,
        verdict=verdict.kind,
        reason=verdict.reason,
        error=outcome.fault.message if outcome.fault and completion is None else None,
        source=sample.source,
        messages=sample.messages,
        tools=sample.tools,
        reference=sample.reference,
        model=outcome.model,
        endpoint=outcome.endpoint,
        backend=outcome.backend,
        protocol=outcome.protocol,
        sampling=generation.sampling(),
        seed=outcome.seed,
        settings=sample.settings,
        round=sample.round,
        attempts=outcome.attempts,
        faults=outcome.faults,
        started_at=outcome.started_at,
        finished_at=outcome.finished_at,
        latency_s=outcome.latency_s,
        worker=worker,
        request_id=outcome.request_id,
        **answered,
    )


def make_pen(record: Record) -> Pen:
    """Return the record as a line for the ledger."""
    return Pen(
        record.verdict,
        record.id,
        encode_line(record),
        reason=record.reason or "",
        round=record.round,
        tokens=record.usage.completion_tokens or 0,
    )
