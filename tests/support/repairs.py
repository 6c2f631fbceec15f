"""A dataset to be repaired, in a folder and in Redis: real records, tickets as Celery writes them, and what is left."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from app import manifest
from app.broker import BrokerUrl
from app.feeder import Feeder
from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.queue import Queue, task_id
from app.records import Kind, KnownSample, Record, Sample, Source, Usage, encode_line, sample_id
from app.settings import GenerationSettings
from producer.repair import Tools, repair

DATASET = "d"


def sample(number: int, *, round_: int = 0) -> Sample:
    """Return a sample as enqueue makes it."""
    messages = [{"role": "user", "content": f"Prompt {number}."}]
    return Sample(id=sample_id(messages), messages=messages, source=Source(row=number), round=round_)


def ids(*numbers: int) -> list[str]:
    """Return those samples' ids."""
    return [sample(number).id for number in numbers]


def record_line(number: int, kind: Kind = Kind.ACCEPTED, *, round_: int = 0, **changes: Any) -> bytes:
    """Return the line of a sample's record as a worker writes it."""
    asked = sample(number)
    record = Record(
        id=asked.id,
        dataset=DATASET,
        verdict=kind,
        reason=None if kind is Kind.ACCEPTED else "timeout",
        source=asked.source,
        messages=asked.messages,
        content=f'Answer {number}, {{"id": "no record"}}.',
        tool_calls=[{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        usage=Usage(completion_tokens=number),
        sampling={},
        settings="0" * 16,
        round=round_,
    )
    return encode_line(msgspec.structs.replace(record, **changes))


def known_line(number: int) -> bytes:
    """Return the sample's line of samples.jsonl."""
    return encode_line(KnownSample(id=sample(number).id, row=number))


def begin(ledger: Ledger) -> None:
    """Write the manifest of the dataset."""
    manifest.fix_settings(ledger, DATASET, GenerationSettings(), {}, new=False)


def know(ledger: Ledger, *numbers: int) -> None:
    """Write samples down as enqueue does."""
    ledger.commit([Pen(Kind.PENDING, sample(number).id, known_line(number)) for number in numbers])


def record(ledger: Ledger, *numbers: int, kind: Kind = Kind.ACCEPTED, round_: int = 0) -> None:
    """Write records down as a worker does."""
    reason = "" if kind is Kind.ACCEPTED else "timeout"
    ledger.commit(
        [
            Pen(kind, sample(number).id, record_line(number, kind, round_=round_), reason, round_, number)
            for number in numbers
        ]
    )


def put(queue: Queue, *numbers: int, tickets: bool = True, again: Kind | None = None, round_: int = 0) -> None:
    """Put samples into Redis as enqueue does."""
    samples = [sample(number, round_=round_) for number in numbers]
    queue.register(DATASET, "f", {})
    queue.put(DATASET, samples, {one.id: again for one in samples} if again else None)
    if tickets:
        publish(queue, DATASET, [one.id for one in samples])


def publish(queue: Queue, dataset: str, ids_: Sequence[str]) -> None:
    """Put tickets on the queue, in Celery's form as far as promptmill reads it."""
    for id_ in ids_:
        queue.client.lpush(queue.keys.queue(dataset), json.dumps({"headers": {"id": task_id(dataset, id_)}}))


def tickets(queue: Queue) -> list[str]:
    """Return the ids that have a ticket on the queue, sorted."""
    messages = queue.client.lrange(queue.keys.queue(DATASET), 0, -1)
    return sorted(json.loads(message)["headers"]["id"].partition(":")[2] for message in messages)


def mend(queue: Queue, ledger: Ledger, *, dataset: str = DATASET, dry_run: bool = False) -> list[str]:
    """Repair the dataset and return what was said."""

    def put_tickets(name: str, wanted: Sequence[str]) -> None:
        publish(queue, name, wanted)

    url = BrokerUrl(client="", celery="", shown="here")
    feeder = Feeder(queue, put_tickets, url=url, dataset=dataset, max_pending=1000)
    tools = Tools(queue, feeder, put_tickets, look_again_s=0.0)
    return repair(ledger, dataset, tools, dry_run=dry_run)


def append(ledger: Ledger, kind: Kind, data: bytes) -> None:
    """Write bytes behind the product's back."""
    with ledger.folder.lines(kind).open("ab") as file:
        file.write(data)


def quarantined(folder: DatasetFolder) -> list[tuple[str, int, bytes, str]]:
    """Return file, offset, bytes and reason of everything that was moved out."""
    if not folder.quarantine.exists():
        return []
    found = []
    for line in folder.quarantine.read_bytes().splitlines():
        entry = json.loads(line)
        data = bytes(entry["length"]) if entry["base64"] is None else base64.b64decode(entry["base64"])
        assert len(data) == entry["length"]
        found.append((entry["file"], entry["offset"], data, entry["reason"]))
    return found
