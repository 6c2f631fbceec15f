"""From an outcome to the line that is written: the verdict and everything that proves how the answer was made."""

from __future__ import annotations

from app.ledger import Pen
from app.records import Kind, Record, Sample, Verdict, encode_line
from app.settings import GenerationSettings
from workers.caller import Outcome
from workers.verdict import judge

_FROM_COMPLETION = (
    "reasoning",
    "reasoning_field",
    "content",
    "tool_calls",
    "finish_reason",
    "stop_reason",
    "prompt_token_ids",
    "output_ids",
    "usage",
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
        verdict = judge(
            completion,
            min_completion_tokens=generation.min_completion_tokens,
            keep_truncated=generation.keep_truncated,
        )
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
