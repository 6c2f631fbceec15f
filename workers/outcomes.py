"""From an outcome to the line that is written: the verdict and everything that proves how the answer was made."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

import msgspec

from app.head import decode_head
from app.ledger import Pen
from app.records import Completion, Kind, Record, Sample, Turn, Verdict, encode_line, sample_seed
from app.settings import GenerationSettings
from app.verdict import Rules, earlier_tokens, judge
from workers.caller import KEPT_FAULTS, Outcome
from workers.conversation import Conversation
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
    dataset: str,
    sample: Sample,
    outcome: Outcome,
    generation: GenerationSettings,
    *,
    worker: str,
    rules: Rules | None = None,
) -> Record:
    """Return the line to write for an outcome: accepted, rejected or failed, by the settings' own rules or others."""
    completion = outcome.completion
    if completion is None:
        fault = outcome.fault
        verdict = Verdict(Kind.FAILED, fault.kind.value if fault else "unknown")
    else:
        verdict = judge(completion, rules or generation.rules())
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
        sampling=generation.sampling(sample.id),
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


def make_conversation_record(
    sample: Sample, turns: Sequence[Record], conversation: Conversation, rules: Rules, *, lost: Outcome | None = None
) -> Record:
    """Return the line of a conversation: its last turn, and what became of all.

    `turns` are its turns' records, at least one. `lost` is a turn that the conversation ended for, if one is.
    """
    last = turns[-1]
    faults = [fault for turn in turns for fault in turn.faults] + (lost.faults if lost else [])
    answered = Completion(**{name: getattr(last, name) for name in _FROM_COMPLETION})
    verdict = judge(answered, rules, earlier_tokens=earlier_tokens(turns[:-1]))
    return msgspec.structs.replace(
        last,
        id=sample.id,
        verdict=verdict.kind,
        reason=verdict.reason,
        reference=sample.reference,
        round=sample.round,
        notes=[*last.notes, *conversation.notes],
        attempts=sum(turn.attempts for turn in turns) + (lost.attempts if lost else 0),
        faults=faults[-KEPT_FAULTS:],
        started_at=turns[0].started_at,
        finished_at=lost.finished_at if lost else last.finished_at,
        latency_s=sum(turn.latency_s or 0.0 for turn in turns),
        turns=[_turn(turn) for turn in turns],
        ended=conversation.ended,
        source_messages=sample.messages,
    )


def _turn(record: Record) -> Turn:
    return Turn(
        id=record.id,
        messages=len(record.messages),
        finish_reason=record.finish_reason,
        usage=record.usage,
        latency_s=record.latency_s,
        attempts=record.attempts,
        request_id=record.request_id,
        endpoint=record.endpoint,
    )


def make_pen(record: Record) -> Pen:
    """Return the record as a line for the ledger."""
    line = encode_line(record)
    tokens = decode_head(line).tokens if record.turns else record.usage.completion_tokens or 0
    return Pen(record.verdict, record.id, line, reason=record.reason or "", round=record.round, tokens=tokens)


def prompt_tokens(record: Record) -> int:
    """Return how many prompt tokens the model server read, over all turns; 0 where unknown."""
    usages = [turn.usage for turn in record.turns] if record.turns else [record.usage]
    return sum(usage.prompt_tokens or 0 for usage in usages)
