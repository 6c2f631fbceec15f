"""verify accounts for every id, out of real files and a real Redis, and names each difference."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import broker as app_broker
from app import manifest
from app.ledger import Ledger, Pen
from app.places import Keys, dataset_folder
from app.queue import Queue, task_id
from app.records import Kind, Sample
from app.settings import GenerationSettings
from app.tally import Done
from producer.accounts import Counts, Report, as_json
from producer.verify import verify
from tests.conftest import Broker
from tests.support.jsonl_check import parse_strict
from tests.support.redis_server import absent_redis

ABSENT = Queue(absent_redis(), Keys("x:"))
"""The queue of a Redis that does not answer."""


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return the test's work list."""
    client = app_broker.connect(app_broker.parse(broker.url))
    yield Queue(client, Keys(broker.key_prefix))
    client.connection_pool.disconnect()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return an empty dataset folder `d` with a manifest."""
    with Ledger.open(dataset_folder(tmp_path, "d")) as opened:
        manifest.fix_settings(opened, "d", GenerationSettings(), {}, new=False)
        yield opened


def encode(**fields: object) -> bytes:
    """Return one line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def know(ledger: Ledger, *ids: str) -> None:
    """Write ids down as enqueue does."""
    ledger.commit([Pen(Kind.PENDING, id_, encode(id=id_)) for id_ in ids])


def put(queue: Queue, *ids: str, tickets: bool = True, again: Kind | None = None) -> None:
    """Put samples into Redis, with tickets as Celery writes them."""
    queue.register("d", "f", {})
    queue.put("d", [Sample(id=id_, messages=[]) for id_ in ids], dict.fromkeys(ids, again) if again else None)
    for id_ in ids if tickets else ():
        queue.client.lpush(queue.keys.queue("d"), json.dumps({"headers": {"id": task_id("d", id_)}}))


def record(ledger: Ledger, kind: Kind, *ids: str, reason: str = "") -> None:
    """Write records down."""
    ledger.commit([Pen(kind, i, encode(id=i, dataset="d", verdict=kind, reason=reason or None), reason) for i in ids])


def append(ledger: Ledger, kind: Kind, data: bytes) -> None:
    """Write bytes behind the product's back."""
    with ledger.folder.lines(kind).open("ab") as file:
        file.write(data)


def check(queue: Queue, ledger: Ledger) -> Report:
    """Verify, and check that the report's forms are sound."""
    report = verify(queue, ledger, "d", look_again_s=0.0)
    told = parse_strict(as_json({"d": report}))["d"]
    assert told["complete"] == report.complete
    assert_adds_up(report.counts)
    return report


def assert_adds_up(counts: Counts) -> None:
    """Assert that the counts are a balance, as far as Redis could be asked."""
    assert counts.read == counts.refused + counts.samples
    assert counts.samples == counts.accepted + counts.rejected + counts.failed + counts.left
    waiting = (counts.queued, counts.in_flight, counts.missing, counts.orphaned, counts.without_ticket)
    if None in waiting:
        assert set(waiting) == {None}
        return
    queued, in_flight, missing, orphaned, without_ticket = (n or 0 for n in waiting)
    assert counts.left == queued + in_flight + missing
    assert queued >= max(orphaned, without_ticket)


def test_a_finished_dataset_is_complete(queue: Queue, ledger: Ledger) -> None:
    """Accepted, rejected and refused rows need nothing more, with or without Redis."""
    know(ledger, "a", "b")
    ledger.commit([Pen(Kind.REFUSED, "r", encode(id="r", reason="empty"), "empty")])
    record(ledger, Kind.ACCEPTED, "a")
    record(ledger, Kind.REJECTED, "b", reason="too_short")
    report = check(queue, ledger)
    assert report.problems == []
    assert (report.counts.read, report.counts.samples, report.counts.accepted) == (3, 2, 1)
    assert "d: complete" in report.render()
    assert check(ABSENT, ledger).complete


def test_every_unfinished_sample_is_in_its_place(queue: Queue, ledger: Ledger) -> None:
    """Queued, in flight, orphaned, ticketless, missing and failed samples are told apart."""
    ids = ["queued", "flying", "orphan", "lost", "missing", "failed", "done"]
    know(ledger, *ids)
    record(ledger, Kind.ACCEPTED, "done")
    record(ledger, Kind.FAILED, "failed", reason="timeout")
    put(queue, "queued", "flying", "orphan")
    put(queue, "lost", tickets=False)
    queue.beat("w1", {}, ttl_s=60)
    queue.take("d", "flying", "w1")
    queue.take("d", "orphan", "dead")
    report = check(queue, ledger)
    counts = report.counts
    assert (counts.samples, counts.accepted, counts.failed, counts.missing) == (7, 1, 1, 1)
    assert (counts.left, counts.queued, counts.in_flight) == (5, 3, 1)
    assert (counts.orphaned, counts.without_ticket) == (1, 1)
    assert report.missing == ["missing"]
    assert "1 sample is neither done nor queued (missing); run producer enqueue again." in report.problems
    assert "1 sample is failed; ask again with producer retry d." in report.problems
    assert "3 samples are still queued or in flight, 1 of them with a worker that died." in report.problems


def test_a_failed_sample_asked_again_is_queued(queue: Queue, ledger: Ledger) -> None:
    """What is on disk as failed and waits again counts once, as queued."""
    know(ledger, "a")
    record(ledger, Kind.FAILED, "a", reason="timeout")
    put(queue, "a", again=Kind.FAILED)
    counts = check(queue, ledger).counts
    assert (counts.failed, counts.queued) == (0, 1)
    queue.finish("d", [Done("a", Kind.FAILED)])
    assert check(queue, ledger).counts.failed == 1


def test_without_redis_the_rest_is_unknown(ledger: Ledger) -> None:
    """Nobody guesses whether unrecorded samples wait somewhere."""
    know(ledger, "a", "b")
    record(ledger, Kind.ACCEPTED, "a")
    report = check(ABSENT, ledger)
    assert (report.counts.left, report.counts.missing, report.counts.queued) == (1, None, None)
    assert "without Redis nobody can tell" in report.problems[0]


def test_a_repeated_id_is_named(queue: Queue, ledger: Ledger) -> None:
    """Two accepted lines of one id are a problem, with the id."""
    know(ledger, "a", "b")
    record(ledger, Kind.ACCEPTED, "a", "b")
    append(ledger, Kind.ACCEPTED, encode(id="b"))
    report = check(queue, ledger)
    assert report.duplicates == ["b"]
    assert report.problems == ["1 id is on more than one line of raw_responses.jsonl: b."]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", "x": NaN}\n', "not strict JSON"),
        (b'{"id": "b", "x": "\xff"}\n', "not strict JSON"),
        (b"\n", "not strict JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"x": 1}\n', "it has no id"),
        (b'{"id": "b", "verdict": "failed"}\n', "its verdict is 'failed'"),
        (b'{"id": "b", "dataset": "e"}\n', "it belongs to the dataset 'e'"),
    ],
)
def test_a_bad_line_is_named_with_its_place(queue: Queue, ledger: Ledger, line: bytes, reason: str) -> None:
    """Whatever is no sound record is a problem, with file, offset and reason."""
    know(ledger, "a")
    record(ledger, Kind.ACCEPTED, "a")
    offset = ledger.folder.lines(Kind.ACCEPTED).stat().st_size
    append(ledger, Kind.ACCEPTED, line)
    report = check(queue, ledger)
    assert not report.complete
    bad = report.bad_lines[0]
    assert (bad.file, bad.offset, bad.length) == ("raw_responses.jsonl", offset, len(line) - 1)
    assert bad.reason.startswith(reason)
    assert f"byte {offset}" in report.render()


def test_a_torn_tail_is_mended_and_its_sample_missing(queue: Queue, ledger: Ledger) -> None:
    """A torn line is cut off, and its sample is not done."""
    know(ledger, "a", "b")
    record(ledger, Kind.ACCEPTED, "a")
    append(ledger, Kind.ACCEPTED, b'{"id": "b", "messages": [')
    report = check(queue, ledger)
    assert report.missing == ["b"]
    assert any("was torn" in note for note in report.notes)
    assert "1 torn line is kept in torn.jsonl." in report.notes


def test_a_torn_tail_that_cannot_be_mended_is_a_problem(queue: Queue, ledger: Ledger) -> None:
    """In a folder that cannot be locked the files are read as they are."""
    know(ledger, "a")
    record(ledger, Kind.ACCEPTED, "a")
    append(ledger, Kind.ACCEPTED, b'{"id": "b", "messages": [')
    ledger.folder.lock.unlink()
    ledger.folder.lock.mkdir()
    report = check(queue, ledger)
    assert report.counts.accepted == 1
    assert report.problems == ["The last line of raw_responses.jsonl is torn; the next worker or enqueue mends it."]
    assert ".lock" in report.notes[0]


def test_a_record_that_nobody_asked_for_is_foreign(queue: Queue, ledger: Ledger) -> None:
    """Ids in no samples.jsonl are named, recorded or queued."""
    know(ledger, "a")
    record(ledger, Kind.ACCEPTED, "a", "stranger")
    put(queue, "waif")
    report = check(queue, ledger)
    assert report.problems == ["2 recorded or queued ids are in no samples.jsonl: stranger, waif."]


def test_an_index_that_lies_is_found(queue: Queue, ledger: Ledger) -> None:
    """The index is compared with a fresh read of the files."""
    know(ledger, "a", "b")
    record(ledger, Kind.ACCEPTED, "a", "b")
    with sqlite3.connect(ledger.folder.index) as connection:
        connection.execute("UPDATE tallies SET n = 7 WHERE n = 2")
    connection.close()
    report = check(queue, ledger)
    assert len(report.problems) == 1
    assert "accepted: 7 in the index, 2 in the files" in report.problems[0]


def test_a_recorded_sample_that_still_waits_is_done(queue: Queue, ledger: Ledger) -> None:
    """A payload left behind by a killed worker is noted, and its sample is complete."""
    know(ledger, "a")
    put(queue, "a")
    record(ledger, Kind.ACCEPTED, "a")
    report = check(queue, ledger)
    assert (report.complete, report.counts.accepted, report.counts.queued) == (True, 1, 0)
    assert any("still in Redis" in note for note in report.notes)


def test_a_strange_manifest_is_a_problem(queue: Queue, ledger: Ledger) -> None:
    """A folder whose manifest names another dataset, or cannot be read, is not complete."""
    know(ledger, "a")
    record(ledger, Kind.ACCEPTED, "a")
    other = verify(queue, ledger, "e")
    assert other.counts.missing == 1
    assert any("belongs to the dataset 'd'" in problem for problem in other.problems)
    ledger.folder.manifest.write_text("{")
    assert "cannot be understood" in check(queue, ledger).problems[0]
