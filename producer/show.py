"""The whole story of a sample, and a record by itself, as text for a person's eye."""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.find import FoundSample, FoundTurn
from app.index import Entry
from app.places import DatasetFolder
from app.records import Kind
from producer.texts import SHOWN_CHARS, counted, cut, harmless

_REASONING_CHARS = 600
"""Reasoning is folded to this many characters."""


def story(found: FoundSample, folder: DatasetFolder, entry: Entry | None, *, again: str, full: bool) -> Iterator[str]:
    """Yield all that is known of a sample; `again` is the command that queues it if it is missing."""
    yield harmless(f"{found.id} of {found.dataset}: {_state(found)}")
    if entry is not None:
        yield _place(folder.lines(entry.kind), entry)
    if entry is not None and entry.kind is Kind.REFUSED:
        yield from _refusal(found.rounds[-1])
        return
    source = {name: value for name, value in ((found.record or {}).get("source") or {}).items() if value is not None}
    if source:
        yield harmless("source: " + ", ".join(f"{name} {value}" for name, value in source.items()))
    yield "--- prompt"
    yield from prompt(found.messages, found.tools, full=full)
    for number, record in enumerate(found.rounds, start=1):
        counts = "" if number == len(found.rounds) else " (a later one counts)"
        yield f"--- round {record.get('round', 0)}{counts}: {_verdict(record)}"
        yield from answer(record, full=full)
    yield from _what_follows(found, again)


def prompt(
    messages: Sequence[Mapping[str, Any]] | None, tools: Sequence[Mapping[str, Any]] | None, *, full: bool
) -> Iterator[str]:
    """Yield the definitions of a prompt's tools, and then its messages."""
    chars = None if full else SHOWN_CHARS
    if messages is None:
        yield "(only Redis has it, and it could not be asked)"
    for tool in tools or ():
        yield cut(f"[tool definition] {_json(tool.get('function', tool))}", chars)
    for message in messages or ():
        yield from _message(message, chars)


def answer(record: Mapping[str, Any], *, full: bool) -> Iterator[str]:
    """Yield how a record was made, each call that failed on the way, and what was answered."""
    chars = None if full else SHOWN_CHARS
    yield harmless(_circumstances(record))
    yield from _turns(record)
    for fault in record.get("faults") or ():
        when, where = _moment(fault.get("at")), fault.get("endpoint")
        yield cut(f"  failed call: {fault.get('fault')} at {when} by {where}: {fault.get('message', '')}", chars)
    if record.get("error"):
        yield cut(f"[error] {record['error']}", chars)
    if reasoning := record.get("reasoning"):
        folded = "" if full or len(reasoning) <= _REASONING_CHARS else f" ({len(reasoning):,} characters, --full: all)"
        yield f"[reasoning{folded}] {cut(reasoning, None if full else _REASONING_CHARS)}"
    yield from _message({"role": "answer", **_said(record)}, chars)


def turn_story(found: FoundTurn, id_: str, *, full: bool) -> Iterator[str]:
    """Yield all that is known of one turn of a conversation."""
    yield harmless(f"{id_} of {found.record.get('dataset')}: {_verdict(found.record)}")
    yield _place(found.path, found.entry)
    yield "--- history"
    yield from prompt(found.record.get("messages"), found.record.get("tools"), full=full)
    yield "--- turn"
    yield from answer({**found.record, "turns": None}, full=full)


def _turns(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each turn of a conversation whose turns were all made anew."""
    for turn in record.get("turns") or ():
        usage, latency_s = turn.get("usage") or {}, turn.get("latency_s")
        parts = [
            f"after {counted(turn.get('messages', 0), 'message')}",
            counted(turn.get("attempts", 0), "call"),
            f"{latency_s:.1f} s" if latency_s is not None else None,
            f"{usage['completion_tokens']:,} tokens" if usage.get("completion_tokens") is not None else None,
            f"ended by {turn['finish_reason']}" if turn.get("finish_reason") else None,
        ]
        yield harmless(f"  turn {turn.get('id')}: {', '.join(part for part in parts if part)}")
    if record.get("ended"):
        yield harmless(f"  the conversation ended early: {record['ended']}")
    for note in record.get("notes") or ():
        yield harmless(f"  note: {note}")


def _said(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("content", "tool_calls")}


def _message(message: Mapping[str, Any], chars: int | None) -> Iterator[str]:
    role, content = message.get("role"), message.get("content")
    answers = f" {message['tool_call_id']}" if message.get("tool_call_id") else ""
    if content is not None:
        yield cut(f"[{role}{answers}] {content if isinstance(content, str) else _json(content)}", chars)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield cut(f"[{role} calls {call.get('id')}] {function.get('name')} {function.get('arguments')}", chars)


def _state(found: FoundSample) -> str:
    record = found.record or {}
    reason = f" ({record['reason']})" if record.get("reason") and found.state == record.get("verdict") else ""
    return f"{found.state.replace('_', ' ')}{reason}"


def _verdict(record: Mapping[str, Any]) -> str:
    reason = record.get("reason")
    return harmless(f"{record.get('verdict')}{f': {reason}' if reason else ''}")


def _place(path: Path, entry: Entry) -> str:
    whole = f"tail -c +{entry.offset + 1} {shlex.quote(str(path))} | head -n 1"
    return f"{path.name}, byte {entry.offset:,}, {entry.length:,} bytes: {whole}"


def _refusal(row: Mapping[str, Any]) -> Iterator[str]:
    name = f"{row['name']} " if row.get("name") else ""
    yield harmless(f"row {name}{row.get('row')} of {row.get('source')} was refused: {row.get('reason')}")
    for words in (row.get("detail"), row.get("start")):
        if words:
            yield cut(str(words))


def _circumstances(record: Mapping[str, Any]) -> str:
    usages = [turn.get("usage") or {} for turn in record.get("turns") or (record,)]
    counts = [count for usage in usages if (count := usage.get("completion_tokens")) is not None]
    tokens = sum(counts) if counts else None
    parts = [
        f"finished {_moment(record.get('finished_at'))}",
        counted(record.get("attempts", 0), "call"),
        f"{record['latency_s']:.1f} s" if record.get("latency_s") is not None else None,
        f"{tokens:,} tokens" if tokens is not None else None,
        f"ended by {record['finish_reason']}" if record.get("finish_reason") else None,
        f"{record['model']} at {record.get('endpoint')}" if record.get("model") else record.get("endpoint"),
        f"worker {record['worker']}" if record.get("worker") else None,
        f"request {record['request_id']}" if record.get("request_id") else None,
        f"settings {record.get('settings')}",
    ]
    return ", ".join(part for part in parts if part)


def _what_follows(found: FoundSample, again: str) -> Iterator[str]:
    flight = found.flight
    if flight is not None:
        dead = "" if flight.alive else ", which is dead: it comes back when the lease runs out"
        yield harmless(f"--- asked by {flight.owner} since {_moment(flight.since)}{dead}")
    elif found.waits:
        yield "--- in the queue, to be asked" + (" again" if found.rounds else "")
    elif found.waits is None:
        yield "--- Redis could not be asked whether it is queued"
    elif found.state == "missing":
        yield f"--- neither recorded nor in Redis: run {again}"
    elif found.state == "failed":
        yield f"--- given up; producer retry {shlex.quote(found.dataset)} asks it again"


def _moment(at: float | None) -> str:
    """Return Unix seconds as a moment in this machine's time zone."""
    if at is None:
        return "at an unknown time"
    return f"{dt.datetime.fromtimestamp(at, dt.UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
