"""A worker's duties beside the work: heartbeat, the sweep for lost tickets, the progress files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import redis.exceptions
from celery import Celery

from app import celery as mill_celery
from app.errors import DiskFullError
from app.places import Keys, queue_name
from app.queue import Queue
from app.records import Kind, Sample
from tests.conftest import Broker, RedisFactory
from tests.support.processes import wait_until
from workers import keeper as module
from workers.keeper import Duties, Keeper

DATASET = "d"


class Worker:
    """A keeper with duties that are noted down."""

    def __init__(self, books: Queue, owner: str = "me", *, lease_s: float = 5.0, progress_s: float = 60.0) -> None:
        self.published: list[tuple[str, list[str]]] = []
        self.written: list[float] = []
        self.beats = 0
        self.told = 0
        self.trouble: Exception | None = None
        """Raised by the progress duty."""
        self.publish: Callable[[str, Sequence[str]], None] = lambda _dataset, _ids: None
        duties = Duties(self._heartbeat, self._publish, self._write, self._tell_faults)
        self.keeper = Keeper(books, owner, duties, lease_s=lease_s, progress_s=progress_s)

    def _heartbeat(self) -> Mapping[str, Any]:
        self.beats += 1
        return {"node": "n", "beats": self.beats}

    def _publish(self, dataset: str, ids: Sequence[str]) -> None:
        self.published.append((dataset, list(ids)))
        self.publish(dataset, ids)

    def _tell_faults(self) -> None:
        self.told += 1

    def _write(self) -> None:
        self.written.append(time.monotonic())
        if self.trouble is not None:
            raise self.trouble


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let keepers beat twenty times a second and take their second look soon."""
    monkeypatch.setattr(module, "_BEAT_S", 0.05)
    monkeypatch.setattr(module, "_SECOND_LOOK_S", 0.3)


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    """Start workers that are stopped after the test."""
    made: list[Worker] = []

    def start(books: Queue, *arguments: Any, **options: Any) -> Worker:
        worker = Worker(books, *arguments, **options)
        worker.keeper.start()
        made.append(worker)
        return worker

    yield start
    for worker in made:
        worker.keeper.stop()


@pytest.fixture
def celery(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Return the product's Celery app on the test's Redis."""
    monkeypatch.setenv("MILL_REDIS_URL", broker.url)
    monkeypatch.setenv("MILL_KEY_PREFIX", broker.key_prefix)
    made = mill_celery.make_app()
    yield made
    made.pool.force_close_all()
    made.close()


Start = Callable[..., Worker]


def _put(books: Queue, *ids: str) -> None:
    books.put(DATASET, [Sample(id=id_, messages=[{"role": "user", "content": id_}]) for id_ in ids])


# Heartbeat


def test_a_worker_is_known_before_it_takes_work(books: Queue, started: Start) -> None:
    """When `start` returns the heartbeat is there, with what it says, and the queues to read are known."""
    books.register("stopped", "f" * 16, {})
    books.pause("stopped", "by hand")
    worker = started(books)
    (beat,) = books.workers()
    assert (beat["owner"], beat["node"]) == ("me", "n")
    assert worker.keeper.queues == ({queue_name(DATASET)}, {queue_name("stopped")})


@pytest.mark.parametrize(("lease_s", "ttl_s"), [(5, 3.0), (12, 4.0), (90, 10.0)])
def test_a_dead_workers_heartbeat_is_gone_before_its_tickets_come_back(
    books: Queue, started: Start, lease_s: float, ttl_s: float
) -> None:
    """A heartbeat lasts for less than the time after which deliveries are taken back, whatever the lease."""
    started(books, lease_s=lease_s)
    left_ms = books.client.pttl(books.keys.worker("me"))
    assert (ttl_s - 1) * 1000 < left_ms <= ttl_s * 1000
    assert ttl_s < lease_s * mill_celery.LEASE_SHARE


def test_the_heart_goes_on_beating(books: Queue, started: Start) -> None:
    """Heartbeats and the queues to read are renewed until the worker ends, and then it is gone at once."""
    worker = started(books)
    before = worker.beats
    books.register("new", "f" * 16, {})
    wait_until(lambda: worker.beats >= before + 3)
    assert queue_name("new") in worker.keeper.queues[0]
    assert worker.told >= 3, "failed calls are told with every beat"
    told = worker.told
    worker.keeper.stop()
    assert worker.told > told, "and the last ones at the end"
    assert books.workers() == []
    assert books.living(["me"]) == set()


def test_the_first_worker_begins_the_session(books: Queue, started: Start) -> None:
    """Rates start anew when the first worker comes up, and not with the second one."""
    _put(books, "a")
    enqueued = books.tally.look(DATASET).run
    first_worker = started(books, "first").keeper
    second_worker = started(books, "second").keeper
    assert books.tally.look(DATASET).run == enqueued
    first_worker.begin()
    first = books.tally.look(DATASET).run
    assert first.began > enqueued.began  # type: ignore[union-attr]
    second_worker.begin()
    assert books.tally.look(DATASET).run == first


# The sweep


def test_a_lost_ticket_is_queued_again(books: Queue, started: Start, celery: Celery) -> None:
    """A payload without a ticket at two looks gets a new one, once, while those that have one are left alone."""
    _put(books, "a", "b", "kept")
    mill_celery.publish(celery, DATASET, ["kept"])
    worker = started(books, lease_s=5)
    worker.publish = lambda dataset, ids: mill_celery.publish(celery, dataset, ids)
    wait_until(lambda: worker.published)
    assert worker.published == [(DATASET, ["a", "b"])]
    assert books.client.llen(books.keys.queue(DATASET)) == 3
    wait_until(lambda: books.take_turn("sweep", "test", for_s=5), what="the next sweep's turn")
    assert len(worker.published) == 1


def test_one_look_proves_nothing(books: Queue, started: Start, celery: Celery) -> None:
    """A ticket that was merely on its way between the two looks is not doubled."""
    _put(books, "a", "b")
    worker = started(books, lease_s=60)
    wait_until(lambda: books.client.exists(books.keys.turn("sweep")), what="the first look")
    time.sleep(0.1)
    mill_celery.publish(celery, DATASET, ["a"])
    wait_until(lambda: worker.published)
    assert worker.published == [(DATASET, ["b"])]


def test_the_heart_beats_between_the_looks(books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the wait for the second look is, no heartbeat is left out."""
    monkeypatch.setattr(module, "_SECOND_LOOK_S", 60.0)
    _put(books, "a")
    worker = Worker(books)
    worker.keeper.start()
    wait_until(lambda: books.client.exists(books.keys.turn("sweep")), what="the first look")
    before = worker.beats
    wait_until(lambda: worker.beats > before + 2, what="heartbeats while the sweep waits")
    assert worker.published == []
    worker.keeper.stop()


def test_one_worker_sweeps_for_all(books: Queue, started: Start) -> None:
    """Of two workers one sweeps, and the next turn comes after a sixth of the lease."""
    _put(books, "a")
    workers = [started(books, owner, lease_s=600) for owner in ("a", "b")]
    wait_until(lambda: any(worker.published for worker in workers))
    before = [worker.beats for worker in workers]
    wait_until(lambda: all(worker.beats > count + 5 for worker, count in zip(workers, before, strict=True)))
    assert sum(len(worker.published) for worker in workers) == 1
    left_ms = books.client.pttl(books.keys.turn("sweep"))
    assert 60_000 < left_ms <= 100_000


def test_a_sweep_ends_with_the_worker(books: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends between the two looks publishes nothing and does not keep the end waiting."""
    monkeypatch.setattr(module, "_SECOND_LOOK_S", 60.0)
    _put(books, "a")
    worker = Worker(books)
    worker.keeper.start()
    wait_until(lambda: books.client.exists(books.keys.turn("sweep")))
    started_at = time.monotonic()
    worker.keeper.stop()
    assert time.monotonic() - started_at < 5
    assert not worker.published


# Progress


def test_one_worker_writes_progress_for_all(books: Queue, started: Start) -> None:
    """Progress is written about once per MILL_PROGRESS_S by all workers together, and old tallies are dropped."""
    old = int(time.time()) - 10_000
    books.client.hset(books.keys.rates(DATASET), f"{old}:{Kind.ACCEPTED}", 3)
    began = time.monotonic()
    workers = [started(books, owner, progress_s=0.4) for owner in ("a", "b")]
    wait_until(lambda: sum(len(worker.written) for worker in workers) >= 3)
    turns = sum(len(worker.written) for worker in workers)
    assert turns <= (time.monotonic() - began) / 0.4 + 1
    wait_until(lambda: not books.tally.look(DATASET).seconds)


def test_progress_that_cannot_be_written_stops_nothing(
    books: Queue, started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs the progress files alone, is told once, and heartbeats go on."""
    worker = started(books, progress_s=0.05)
    worker.trouble = DiskFullError("No space for progress.")
    wait_until(lambda: len(worker.written) >= 4)
    before = worker.beats
    wait_until(lambda: worker.beats > before)
    assert caplog.text.count("progress could not be written: No space for progress.") == 1


def test_a_bug_in_a_duty_stops_no_other(books: Queue, started: Start, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error is logged with its traceback, and the worker stays known."""
    worker = started(books, progress_s=0.05)
    worker.trouble = ZeroDivisionError("oops")
    wait_until(lambda: len(worker.written) >= 3)
    before = worker.beats
    wait_until(lambda: worker.beats > before)
    assert "a periodic duty failed" in caplog.text
    assert "ZeroDivisionError: oops" in caplog.text


# Redis


def test_redis_away_is_told_once_and_its_return_too(
    new_redis: RedisFactory, started: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """While Redis is away the keeper goes on trying, says so once, and says when it is back."""
    server = new_redis()
    books = Queue(server.client(), Keys("t:"))
    worker = started(books)
    server.kill()
    wait_until(lambda: "Redis is away" in caplog.text)
    before = worker.beats
    wait_until(lambda: worker.beats >= before + 3)
    server.start()
    wait_until(lambda: "Redis is back" in caplog.text)
    wait_until(lambda: books.living(["me"]))
    assert caplog.text.count("Redis is away") == 1
    assert caplog.text.count("Redis is back") == 1


def test_a_worker_can_end_while_redis_is_away(new_redis: RedisFactory) -> None:
    """Without Redis `stop` returns all the same; the heartbeat runs out by itself."""
    server = new_redis()
    worker = Worker(Queue(server.client(), Keys("t:")))
    worker.keeper.start()
    server.kill()
    worker.keeper.stop()
    assert not any(thread.name == "mill-keeper" for thread in threading.enumerate())


def test_a_worker_does_not_start_without_redis(new_redis: RedisFactory) -> None:
    """Whoever starts without Redis hears of it."""
    server = new_redis()
    books = Queue(server.client(), Keys("t:"))
    server.kill()
    with pytest.raises(redis.exceptions.ConnectionError):
        Worker(books).keeper.start()
