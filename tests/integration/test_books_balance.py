"""Status, monitor, progress.json and verify tell the same numbers, which add up, in every situation."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app import broker as app_broker
from app.ledger import Ledger
from app.places import Keys, dataset_folder
from app.progress import take_snapshot, write_progress
from app.queue import Queue
from app.records import Kind
from app.snapshot import Snapshot
from producer import status
from producer.verify import verify
from tests.conftest import Broker
from tests.support.books import SHARED
from tests.support.folders import pen
from tests.support.jsonl_check import parse_strict
from tests.support.redis_server import absent_redis
from tests.support.repairs import DATASET, begin, ids, know, mend, put, record

Situation = Callable[[Queue, Ledger], None]


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return the test's work list."""
    client = app_broker.connect(app_broker.parse(broker.url))
    yield Queue(client, Keys(broker.key_prefix))
    client.connection_pool.disconnect()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return a dataset of ten samples and a refused row: two accepted, one rejected, two failed, five queued."""
    with Ledger.open(dataset_folder(tmp_path, DATASET)) as opened:
        begin(opened)
        opened.commit([pen("!row", Kind.REFUSED)])
        know(opened, *range(10))
        yield opened


def running(queue: Queue, ledger: Ledger) -> None:
    """Let a worker ask two of five samples."""
    put(queue, 5, 6, 7, 8, 9)
    record(ledger, 0, 1)
    record(ledger, 2, kind=Kind.REJECTED)
    record(ledger, 3, 4, kind=Kind.FAILED)
    queue.beat("alive", {}, ttl_s=60)
    for id_ in ids(5, 6):
        assert queue.take(DATASET, id_, "alive").sample


def paused(queue: Queue, ledger: Ledger) -> None:
    """Hold the dataset back."""
    running(queue, ledger)
    queue.pause(DATASET, "by hand")


def worker_killed(queue: Queue, ledger: Ledger) -> None:
    """Let the worker die while it asks."""
    running(queue, ledger)
    queue.part("alive")


def killed_before_redis_heard(queue: Queue, ledger: Ledger) -> None:
    """Let the worker die after a record and before its payload is dropped."""
    running(queue, ledger)
    record(ledger, 5)
    queue.part("alive")


def tickets_lost(queue: Queue, ledger: Ledger) -> None:
    """Lose every ticket."""
    running(queue, ledger)
    queue.client.delete(queue.keys.queue(DATASET))


def redis_wiped(queue: Queue, ledger: Ledger) -> None:
    """Empty Redis."""
    running(queue, ledger)
    queue.client.flushdb()


def some_payloads_lost(queue: Queue, ledger: Ledger) -> None:
    """Lose two payloads, one of a sample that is being asked."""
    running(queue, ledger)
    queue.client.hdel(queue.keys.prompts(DATASET), *ids(6, 9))


def retry_running(queue: Queue, ledger: Ledger) -> None:
    """Ask failed and rejected samples again, one of them right now."""
    running(queue, ledger)
    put(queue, 3, 4, again=Kind.FAILED, round_=1)
    put(queue, 2, again=Kind.REJECTED, round_=1)
    assert queue.take(DATASET, ids(3)[0], "alive").sample


def retry_ended(queue: Queue, ledger: Ledger) -> None:
    """Let one of the samples that are asked again be accepted."""
    retry_running(queue, ledger)
    record(ledger, 3, round_=1)
    queue.forget(DATASET, ids(3))


def retry_lost(queue: Queue, ledger: Ledger) -> None:
    """Lose the payloads of samples that were being asked again."""
    retry_running(queue, ledger)
    queue.client.hdel(queue.keys.prompts(DATASET), *ids(2, 4))


def redis_down(queue: Queue, ledger: Ledger) -> None:
    """Leave the files alone to speak."""
    running(queue, ledger)


SITUATIONS: dict[str, tuple[Situation, dict[str, int | None]]] = {
    "running": (running, {"left": 5, "queued": 3, "in_flight": 2, "missing": 0, "orphaned": 0}),
    "paused": (paused, {"left": 5, "queued": 3, "in_flight": 2, "missing": 0, "orphaned": 0}),
    "worker killed": (worker_killed, {"left": 5, "queued": 5, "in_flight": 0, "missing": 0, "orphaned": 2}),
    "killed late": (killed_before_redis_heard, {"accepted": 3, "left": 4, "queued": 4, "in_flight": 0, "missing": 0}),
    "tickets lost": (tickets_lost, {"left": 5, "queued": 3, "in_flight": 2, "missing": 0, "orphaned": 0}),
    "redis wiped": (redis_wiped, {"left": 5, "queued": 0, "in_flight": 0, "missing": 5, "orphaned": 0}),
    "payloads lost": (some_payloads_lost, {"left": 5, "missing": 2}),
    "retry running": (retry_running, {"failed": 0, "rejected": 0, "left": 8, "queued": 5, "in_flight": 3}),
    "retry ended": (retry_ended, {"accepted": 3, "failed": 0, "left": 7, "queued": 5, "in_flight": 2, "missing": 0}),
    "retry lost": (retry_lost, {"failed": 0, "rejected": 0, "left": 8, "missing": 2}),
    "redis down": (redis_down, {"left": 5, "queued": None, "in_flight": None, "missing": None, "orphaned": None}),
}


UNSEEN = {"killed late": {"orphaned"}}
"""What status cannot know without looking at each id: that a sample with a dead worker is recorded already."""


def assert_adds_up(counts: dict[str, Any]) -> None:
    """Assert the three equations of the books, as far as Redis could be asked."""
    assert counts["read"] == counts["refused"] + counts["samples"], counts
    assert counts["samples"] == counts["accepted"] + counts["rejected"] + counts["failed"] + counts["left"], counts
    if counts["queued"] is not None:
        assert counts["left"] == counts["queued"] + counts["in_flight"] + counts["missing"], counts
        assert counts["orphaned"] <= counts["queued"], counts


def views(queue: Queue, ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Return the counts of status, of progress.json and of verify."""
    snapshot = take_snapshot(queue, ledger.folder.path.parent)
    assert_monitor_says(snapshot)
    write_progress(ledger, snapshot, at=snapshot.at)
    told = parse_strict(status.status_json(snapshot))["datasets"][DATASET]["counts"]
    written = parse_strict(ledger.folder.progress.read_bytes())["datasets"][DATASET]["counts"]
    audit = verify(queue, ledger, DATASET, look_again_s=0.0).counts
    verified = {name: getattr(audit, name) for name in SHARED}
    return {"status": told, "progress.json": written, "verify": verified}


def assert_monitor_says(snapshot: Snapshot) -> None:
    """Assert that what a terminal shows holds the counts of the snapshot."""
    screen = io.StringIO()
    Console(file=screen, width=100).print(status.render(snapshot, width=100))
    counts = snapshot.datasets[DATASET].counts
    for word, n in (("accepted", counts.accepted), ("failed", counts.failed), ("missing", counts.missing)):
        assert f"{word} {'unknown' if n is None else n}" in screen.getvalue()


@pytest.mark.parametrize("name", SITUATIONS)
def test_every_view_tells_the_same_books(queue: Queue, ledger: Ledger, name: str) -> None:
    """Whatever happened, all views have the same counts in the same words, and they add up."""
    situation, expected = SITUATIONS[name]
    situation(queue, ledger)
    asked = Queue(absent_redis(), Keys("x:")) if situation is redis_down else queue
    told = views(asked, ledger)
    for counts in told.values():
        assert_adds_up(counts)
        assert counts.items() >= {"read": 11, "refused": 1, "samples": 10, **expected}.items()
        same = set(SHARED) - UNSEEN.get(name, set())
        assert {word: counts[word] for word in same} == {word: told["status"][word] for word in same}


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "redis down"])
def test_a_repair_in_every_situation_keeps_the_books(queue: Queue, ledger: Ledger, name: str) -> None:
    """A repair asks nothing that is recorded, loses nothing, and leaves nothing missing whose prompt is at hand."""
    situation, _expected = SITUATIONS[name]
    situation(queue, ledger)
    before = verify(queue, ledger, DATASET, look_again_s=0.0).counts
    mend(queue, ledger)
    after = verify(queue, ledger, DATASET, look_again_s=0.0).counts
    assert (after.samples, after.accepted, after.left) == (before.samples, before.accepted, before.left)
    assert after.without_ticket == 0
    assert after.missing == {"redis wiped": 5, "payloads lost": 2}.get(name, 0)
