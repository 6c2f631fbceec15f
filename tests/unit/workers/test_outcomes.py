"""From an outcome to the line that is written: every field is what happened."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from app.records import SCHEMA_VERSION, Attempt, Completion, Kind, Record, Sample, Source, Usage
from app.settings import generation_from_content
from workers.caller import Outcome
from workers.faults import FaultKind, make_fault
from workers.outcomes import make_pen, make_record

SAMPLE = Sample(
    id="s1-abc",
    messages=[{"role": "user", "content": "Tell é\u2028"}],
    tools=[{"type": "function", "function": {"name": "f"}}],
    source=Source(row=7, id="s1", name="part.jsonl"),
    reference={"role": "assistant", "content": "the source's own"},
    round=2,
    settings="f" * 16,
)
COMPLETION = Completion(
    content="Done.",
    reasoning="Hm.",
    reasoning_field="reasoning_content",
    tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    finish_reason="tool_calls",
    stop_reason=151643,
    prompt_token_ids=[1, 2],
    output_ids=[3, 4, 5],
    ids="server",
    ids_end="eos",
    ids_check="ok",
    raw="Hm.</think>Done.<call>",
    template="0123456789abcdef",
    notes=["odd"],
    usage=Usage(prompt_tokens=2, completion_tokens=3, reasoning_tokens=1, cached_tokens=0),
    model="served-as",
    response_id="chatcmpl-1",
)
OUTCOME = Outcome(
    completion=COMPLETION,
    fault=None,
    endpoint="http://server",
    protocol="openai",
    attempts=2,
    faults=[Attempt("timeout", "server-123456", 50.0, "no answer")],
    started_at=10.0,
    finished_at=99.5,
    latency_s=1.25,
    request_id="s1-abc-r2-a2",
    model="served-as",
    seed=42,
    backend="vllm 0.33.0",
)
GENERATION = generation_from_content(
    {"model": "m", "temperature": 0.5, "seed": 9, "system": "Be brief.", "extra_body": {"priority": 1}}
)


def _make(outcome: Outcome = OUTCOME, **content: Any) -> Record:
    generation = generation_from_content({**GENERATION.content(), **content})
    return make_record("Org/Set", SAMPLE, outcome, generation, worker="w@h/1")


def _answered(**changes: Any) -> Outcome:
    return dataclasses.replace(OUTCOME, completion=msgspec.structs.replace(COMPLETION, **changes))


def test_an_accepted_record_has_every_field() -> None:
    """The answer, where it came from and how it was made stand in the record as they were, and nothing is left out."""
    expected = {
        "id": "s1-abc",
        "dataset": "Org/Set",
        "verdict": "accepted",
        "reason": None,
        "error": None,
        "source": {"row": 7, "id": "s1", "name": "part.jsonl"},
        "messages": SAMPLE.messages,
        "tools": SAMPLE.tools,
        "reference": SAMPLE.reference,
        "reasoning": "Hm.",
        "reasoning_field": "reasoning_content",
        "content": "Done.",
        "tool_calls": COMPLETION.tool_calls,
        "finish_reason": "tool_calls",
        "stop_reason": 151643,
        "unparsed_calls": False,
        "prompt_token_ids": [1, 2],
        "output_ids": [3, 4, 5],
        "ids": "server",
        "ids_end": "eos",
        "ids_check": "ok",
        "raw": "Hm.</think>Done.<call>",
        "template": "0123456789abcdef",
        "notes": ["odd"],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "reasoning_tokens": 1, "cached_tokens": 0},
        "model": "served-as",
        "endpoint": "http://server",
        "backend": "vllm 0.33.0",
        "protocol": "openai",
        "sampling": {"max_tokens": 8192, "temperature": 0.5, "priority": 1},
        "seed": 42,
        "settings": "f" * 16,
        "round": 2,
        "attempts": 2,
        "faults": [{"fault": "timeout", "endpoint": "server-123456", "at": 50.0, "message": "no answer"}],
        "started_at": 10.0,
        "finished_at": 99.5,
        "latency_s": 1.25,
        "worker": "w@h/1",
        "request_id": "s1-abc-r2-a2",
        "schema": SCHEMA_VERSION,
    }
    assert msgspec.to_builtins(_make()) == expected


def test_an_accepted_pen_says_what_the_index_needs() -> None:
    """The line for the file is the record in strict JSON with one newline, beside its kind, id, round and tokens."""
    record = _make()
    pen = make_pen(record)
    assert (pen.kind, pen.id, pen.reason, pen.round, pen.tokens) == (Kind.ACCEPTED, "s1-abc", "", 2, 3)
    assert pen.line.endswith(b"\n")
    assert pen.line.count(b"\n") == 1
    assert msgspec.json.decode(pen.line, type=Record) == record


def test_a_rejected_record_keeps_the_whole_text() -> None:
    """An answer that breaks a rule is kept whole, with the reason and no error."""
    record = _make(min_completion_tokens=50)
    accepted = msgspec.to_builtins(_make())
    assert (record.verdict, record.reason, record.error) == (Kind.REJECTED, "too_short", None)
    assert msgspec.to_builtins(record) == {**accepted, "verdict": "rejected", "reason": "too_short"}
    pen = make_pen(record)
    assert (pen.kind, pen.reason, pen.tokens) == (Kind.REJECTED, "too_short", 3)


def test_the_datasets_own_rules_judge() -> None:
    """Rules are those of the dataset: a cut answer is accepted where truncated ones are kept."""
    cut = _answered(finish_reason="length")
    assert (_make(cut).verdict, _make(cut).reason) == (Kind.REJECTED, "truncated")
    assert _make(cut, keep_truncated=True).verdict is Kind.ACCEPTED


def test_a_failed_record_says_why_and_guesses_nothing() -> None:
    """A sample that was given up has the fault's class and words, its prompt and its calls; what is unknown is null."""
    fault = make_fault(FaultKind.CONTEXT_OVERFLOW, "too long by 5")
    record = _make(dataclasses.replace(OUTCOME, completion=None, fault=fault, latency_s=None, model="m"))
    accepted = msgspec.to_builtins(_make())
    unknown = dict.fromkeys(
        (
            "reasoning",
            "reasoning_field",
            "content",
            "tool_calls",
            "finish_reason",
            "stop_reason",
            "prompt_token_ids",
            "output_ids",
            "ids",
            "ids_end",
            "ids_check",
            "raw",
            "template",
            "latency_s",
        )
    )
    expected = {
        **accepted,
        **unknown,
        "verdict": "failed",
        "reason": "context_overflow",
        "error": "too long by 5",
        "model": "m",
        "notes": [],
        "usage": {"prompt_tokens": None, "completion_tokens": None, "reasoning_tokens": None, "cached_tokens": None},
    }
    assert msgspec.to_builtins(record) == expected
    pen = make_pen(record)
    assert (pen.kind, pen.reason, pen.round, pen.tokens) == (Kind.FAILED, "context_overflow", 2, 0)


def test_unknown_usage_counts_as_no_tokens() -> None:
    """Where the server reported no usage the record says null and the index counts nothing."""
    record = _make(_answered(usage=Usage()))
    assert record.usage.completion_tokens is None
    assert make_pen(record).tokens == 0
