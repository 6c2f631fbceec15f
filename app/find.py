"""Finds all that is known of one sample: its record, earlier rounds, and what waits of it in Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import redis.exceptions

from app import jsonl, manifest
from app.errors import UsageError
from app.index import Entry
from app.lane import decode_sample
from app.ledger import Ledger
from app.lock import LOOK_PATIENCE_S
from app.places import DatasetFolder, folder_name
from app.queue import Queue, read_flight
from app.records import ASKED_AGAIN, RECORDED, Kind, Message, Sample, split_turn


class Flight(msgspec.Struct, frozen=True):
    """Who is asking a sample."""

    owner: str
    since: float
    """Unix seconds."""
    alive: bool
    """Whether the worker has a heartbeat; without one the sample comes back when its lease runs out."""


class FoundSample(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that files and Redis know of one sample."""

    id: str
    dataset: str
    state: str
    """accepted, rejected, failed, refused, queued, in_flight, missing (neither recorded nor in Redis), or unknown
    (not recorded, and Redis cannot be reached)."""
    messages: list[Message] | None = None
    """The prompt; null while only Redis has it and cannot be reached, and for refused rows."""
    tools: list[dict[str, Any]] | None = None
    """The tools of the prompt."""
    rounds: list[dict[str, Any]] = []
    """The records, oldest round first; the last one is what counts. A refused row's line stands here too."""
    flight: Flight | None = None
    waits: bool | None = False
    """Whether it is in Redis, to be asked (again); null while Redis cannot be reached."""

    @property
    def record(self) -> dict[str, Any] | None:
        """The record that counts."""
        return self.rounds[-1] if self.rounds else None


def find_sample(queue: Queue | None, folder: DatasetFolder, sample_id: str) -> FoundSample:
    """Return all that is known of the sample; without a queue, or a Redis that answers, the files alone speak.

    Raises UsageError for an id that neither knows, StoreError for a folder that cannot be read.
    """
    dataset, entry = _read_entry(queue, folder, sample_id)
    waiting, flight, reachable = _look_into_redis(queue, dataset, sample_id)
    if entry is None and waiting is None:
        unsure = "" if reachable else " (Redis could not be asked)"
        raise UsageError(f"The dataset {dataset!r} knows no sample {sample_id!r}{unsure}; check the id.")
    rounds = _read_rounds(folder, sample_id, entry) if entry else []
    asked = waiting.messages if waiting else None
    last = rounds[-1] if rounds else {}
    return FoundSample(
        id=sample_id,
        dataset=dataset,
        state=_state(entry, waiting, flight, reachable=reachable),
        messages=last.get("messages") or asked,
        tools=last.get("tools") or (waiting.tools if waiting else None),
        rounds=rounds,
        flight=flight,
        waits=waiting is not None if reachable else None,
    )


class FoundTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of a conversation whose turns are all made anew."""

    path: Path
    """The file that holds it."""
    entry: Entry
    record: dict[str, Any]


def find_turn(folder: DatasetFolder, id_: str) -> FoundTurn:
    """Return a turn, by an id such as `ID#turn2`: its own line, or the conversation's for the last one.

    Raises UsageError where there is none, StoreError for a folder that cannot be read.
    """
    sample_id, _ = split_turn(id_)
    conversation = _find_line(folder, sample_id)
    record = conversation.record if conversation else {}
    named = [turn["id"] for turn in record.get("turns") or ()]
    if conversation is not None and named and named[-1] == id_:
        return conversation
    settings = [record["settings"]] if id_ in named else sorted(path.name for path in folder.all_turns.glob("*"))
    for fingerprint in settings:
        found = _find_line(folder.turns(fingerprint), id_)
        if found is not None:
            return found
    raise UsageError(f"{folder.path} knows no turn {id_!r}; producer show {sample_id} lists those that it has.")


def _find_line(folder: DatasetFolder, id_: str) -> FoundTurn | None:
    """Return the record of an id in one folder, if there is one."""
    if not folder.path.is_dir():
        return None
    with Ledger(folder, patience_s=LOOK_PATIENCE_S) as ledger:
        ledger.catch_up()
        entry = ledger.look_up([id_]).get(id_)
        if entry is None or entry.kind not in RECORDED:
            return None
        record = cast("dict[str, Any]", msgspec.json.decode(ledger.read(entry, id_)))
        return FoundTurn(path=folder.lines(entry.kind), entry=entry, record=record)


def _read_entry(queue: Queue | None, folder: DatasetFolder, sample_id: str) -> tuple[str, Entry | None]:
    """Return the dataset's name and what its index knows of the id."""
    with Ledger(folder, patience_s=LOOK_PATIENCE_S) as ledger:
        known = manifest.read(ledger)
        name = known.dataset if known else _name_in_redis(queue, folder)
        if name is None:
            raise UsageError(f"{folder.path} is no dataset; producer status lists those that exist.")
        if not folder.path.is_dir():
            return name, None
        ledger.catch_up()
        return name, ledger.look_up([sample_id]).get(sample_id)


def _name_in_redis(queue: Queue | None, folder: DatasetFolder) -> str | None:
    if queue is None:
        return None
    try:
        return next((name for name in queue.datasets() if folder_name(name) == folder.path.name), None)
    except redis.exceptions.RedisError:
        return None


def _look_into_redis(queue: Queue | None, dataset: str, sample_id: str) -> tuple[Sample | None, Flight | None, bool]:
    """Return the waiting payload, who is asking it, and whether Redis answered."""
    if queue is None:
        return None, None, False
    try:
        with queue.client.pipeline(transaction=False) as pipe:
            pipe.hget(queue.keys.prompts(dataset), sample_id)
            pipe.hget(queue.keys.flights(dataset), sample_id)
            payload, value = cast("list[bytes | None]", pipe.execute())
        if payload is None:
            return None, None, True
        flight = None
        if value:
            owner, since = read_flight(value)
            flight = Flight(owner, since, owner in queue.living([owner]))
        return decode_sample(payload), flight, True
    except redis.exceptions.RedisError:
        return None, None, False


def _state(entry: Entry | None, waiting: Sample | None, flight: Flight | None, *, reachable: bool) -> str:
    if waiting is not None:
        return "in_flight" if flight and flight.alive else "queued"
    if entry is None or entry.kind is Kind.PENDING:
        return "missing" if reachable else "unknown"
    return entry.kind.value


def _read_rounds(folder: DatasetFolder, sample_id: str, entry: Entry) -> list[dict[str, Any]]:
    if entry.kind is Kind.PENDING:
        return []
    with Ledger(folder, patience_s=LOOK_PATIENCE_S) as ledger:
        newest = cast("dict[str, Any]", msgspec.json.decode(ledger.read(entry, sample_id)))
    if entry.kind is Kind.REFUSED:
        return [newest]
    earlier = _earlier_rounds(folder, sample_id, entry) if entry.round else []
    return [*sorted(earlier, key=lambda record: int(record.get("round") or 0)), newest]


def _earlier_rounds(folder: DatasetFolder, sample_id: str, entry: Entry) -> Iterator[dict[str, Any]]:
    """Yield the records that later rounds replaced; the index knows the newest line of an id alone."""
    begin = b'{"id":' + msgspec.json.encode(sample_id) + b","
    for kind in ASKED_AGAIN:
        skip = entry.offset if kind is entry.kind else -1
        # Read, not mapped: a file that is cut meanwhile would end the process.
        for line in jsonl.read_lines(folder.lines(kind)):
            if line.whole and line.offset != skip and line.data.startswith(begin):
                # A damaged line is told of elsewhere.
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    yield msgspec.json.decode(line.data)
