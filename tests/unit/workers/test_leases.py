"""Deliveries stay alive while they run, over lost connections too; queues are followed as datasets come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import kombu
import kombu.transport.redis
import pytest
import redis.exceptions
from celery import Celery
from celery.worker import state
from kombu.asynchronous.timer import Timer

from app import celery as mill_celery
from app.clock import RedisClock
from app.places import queue_name
from app.queue import Queue
from tests.conftest import Broker
from tests.support.processes import wait_until
from workers.leases import (
    LeaseKeeper,
    QueueFollower,
    free_the_slot_of_a_lost_ack,
    keep_running_work_over_blips,
    keep_time_by_redis,
    reuse_redis_clients,
)

DATASET = "d"
_kombu: Any = kombu
_Timer: Any = Timer
"""Both are untyped."""
_VISIBILITY_S = 30 * mill_celery.LEASE_SHARE


@pytest.fixture
def celery(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Return the product's Celery app on the test's Redis."""
    monkeypatch.setenv("MILL_REDIS_URL", broker.url)
    monkeypatch.setenv("MILL_KEY_PREFIX", broker.key_prefix)
    monkeypatch.setenv("MILL_LEASE_S", "30")
    made = mill_celery.make_app()
    yield made
    made.pool.force_close_all()
    made.close()


class CeleryWorker:
    """As much of Celery's consumer as our boot steps use, on a real kombu consumer and a real timer."""

    def __init__(self, app: Celery) -> None:
        self.connection = app.connection_for_read()
        self.channel = self.connection.default_channel
        self.task_consumer = _kombu.Consumer(self.channel, [], on_message=self._on_message, accept=["json"])
        self.timer = _Timer()
        self.delivered: list[Any] = []

    def _on_message(self, message: Any) -> None:
        self.delivered.append(message)

    def add_task_queue(self, name: str) -> None:
        """Do what Celery's own does: read the queue from now on."""
        self.task_consumer.add_queue(_kombu.Queue(name, exchange=name, routing_key=name, channel=self.channel))
        self.task_consumer.consume()

    def cancel_task_queue(self, name: str) -> None:
        """Do what Celery's own does: read the queue no more."""
        self.task_consumer.cancel_by_queue(name)

    def take(self, count: int) -> list[Any]:
        """Wait until so many tickets are delivered, and return them all."""
        deadline = time.monotonic() + 20
        while len(self.delivered) < count:
            assert time.monotonic() < deadline, f"only {len(self.delivered)} of {count} tickets were delivered"
            try:
                self.connection.drain_events(timeout=1)
            except TimeoutError:
                continue
        return self.delivered


@pytest.fixture
def worker(celery: Celery) -> Iterator[CeleryWorker]:
    """Return a connected consumer without queues."""
    made = CeleryWorker(celery)
    yield made
    made.connection.close()


@pytest.fixture
def running() -> Iterator[Callable[[Any], None]]:
    """Note deliveries as Celery does while their tasks run."""
    ids: list[str] = []

    def run(message: Any) -> None:
        request = SimpleNamespace(id=message.headers["id"], _message=message)
        state.requests[request.id] = request
        ids.append(request.id)

    yield run
    for id_ in ids:
        state.requests.pop(id_, None)


Run = Callable[[Any], None]


def _deliver(celery: Celery, worker: CeleryWorker, *ids: str) -> list[Any]:
    """Publish tickets and let them be delivered."""
    mill_celery.publish(celery, DATASET, ids)
    worker.add_task_queue(queue_name(DATASET))
    return worker.take(len(ids))


def _index(books: Queue) -> str:
    return f"{books.keys.unacked}_index"


def _scores(books: Queue) -> dict[bytes, float]:
    """Return the time at which each delivery was last known to be alive."""
    return dict(cast("list[tuple[bytes, float]]", books.client.zrange(_index(books), 0, -1, withscores=True)))


def _age(books: Queue, by_s: float) -> None:
    """Make every delivery older, as time does."""
    for tag, score in _scores(books).items():
        books.client.zadd(_index(books), {tag: score - by_s})


def _sweep(worker: CeleryWorker) -> None:
    """Let kombu take back what is too old."""
    worker.channel.qos.restore_visible(interval=1)


# Leases


def test_a_running_delivery_is_kept_alive(celery: Celery, books: Queue, worker: CeleryWorker, running: Run) -> None:
    """A delivery whose task runs is not taken back however long it takes; one that nobody runs is."""
    for message in _deliver(celery, worker, "runs", "lost"):
        if message.headers["id"] == "d:runs":
            running(message)
    _age(books, 2 * _VISIBILITY_S)
    keeper = LeaseKeeper(worker)
    keeper.start(worker)
    scores = _scores(books)
    assert len(scores) == 2
    assert sum(score > time.time() - 10 for score in scores.values()) == 1
    _sweep(worker)
    assert books.client.llen(books.keys.queue(DATASET)) == 1
    (left,) = books.client.hvals(books.keys.unacked)
    assert b"d:runs" in left
    keeper.stop(worker)


def test_leases_are_refreshed_five_times_per_lease(
    celery: Celery, books: Queue, worker: CeleryWorker, running: Run
) -> None:
    """The timer refreshes well before a delivery runs out, and ceases when the step stops."""
    (message,) = _deliver(celery, worker, "a")
    running(message)
    keeper = LeaseKeeper(worker)
    keeper.start(worker)
    (entry,) = list(worker.timer.queue)
    assert 0 < entry.eta - time.monotonic() <= _VISIBILITY_S / 5
    _age(books, 2 * _VISIBILITY_S)
    entry.entry()
    (score,) = _scores(books).values()
    assert score > time.time() - 10
    keeper.stop(worker)
    keeper.stop(worker)
    assert entry.entry.canceled


def test_what_was_acked_is_not_brought_back(celery: Celery, books: Queue, worker: CeleryWorker, running: Run) -> None:
    """A delivery that is acked while leases are refreshed leaves no score behind."""
    (message,) = _deliver(celery, worker, "a")
    running(message)
    message.ack()
    LeaseKeeper(worker).refresh(worker)
    assert books.client.zcard(_index(books)) == 0


def test_refreshing_survives_a_lost_redis(
    celery: Celery, broker: Broker, books: Queue, worker: CeleryWorker, running: Run
) -> None:
    """While Redis is away nothing is refreshed and nothing is raised; when it is back leases are refreshed again."""
    (message,) = _deliver(celery, worker, "a")
    running(message)
    keeper = LeaseKeeper(worker)
    broker.server.kill()
    keeper.refresh(worker)
    broker.server.restart()
    books.client.zadd(_index(books), {message.delivery_tag: 1.0})  # as it was long ago; this Redis keeps nothing

    def refreshed() -> bool:
        keeper.refresh(worker)
        return min(_scores(books).values()) > time.time() - 10

    wait_until(refreshed, 10, "a lease that is refreshed again")


def test_deliveries_are_noted_and_taken_back_by_redis_time(celery: Celery, books: Queue, worker: CeleryWorker) -> None:
    """A process whose clock is hours off writes Redis' time beside a delivery, and takes back what is old by it."""
    kombu.transport.redis.time = lambda: time.time() + 7200.0
    keep_time_by_redis(LeaseKeeper.clock)
    LeaseKeeper(worker).refresh(worker)
    _deliver(celery, worker, "a")
    (score,) = _scores(books).values()
    assert score == pytest.approx(books.now(), abs=5)
    _sweep(worker)
    assert books.client.hlen(books.keys.unacked) == 1
    _age(books, 2 * _VISIBILITY_S)
    _sweep(worker)
    assert books.client.hlen(books.keys.unacked) == 0
    assert books.client.llen(books.keys.queue(DATASET)) == 1


def test_nothing_is_taken_back_while_the_clock_has_just_been_set(
    celery: Celery, books: Queue, worker: CeleryWorker
) -> None:
    """For one visibility timeout after Redis' clock jumped, old scores mean nothing; then they do again."""
    monotonic = [time.monotonic()]
    clock = RedisClock(monotonic=lambda: monotonic[0])
    keep_time_by_redis(clock)
    clock.ask(books.client)
    _deliver(celery, worker, "a")
    _age(books, 7200.0)
    monotonic[0] -= 7200.0  # against it, Redis' clock is two hours ahead
    _sweep(worker)
    assert books.client.hlen(books.keys.unacked) == 1
    monotonic[0] += _VISIBILITY_S / 2
    _sweep(worker)
    assert books.client.hlen(books.keys.unacked) == 1


def test_a_lost_ack_frees_its_slot(celery: Celery, broker: Broker, books: Queue, worker: CeleryWorker) -> None:
    """A delivery whose ack or return Redis refuses is told, no longer counted as running, and comes back later."""
    free_the_slot_of_a_lost_ack()
    worker.channel.basic_qos(prefetch_count=2)
    first, second = _deliver(celery, worker, "a", "b")
    assert not worker.channel.qos.can_consume()
    broker.client.config_set("min-replicas-to-write", 1)
    try:
        with pytest.raises(redis.exceptions.ResponseError):
            first.ack()
        with pytest.raises(redis.exceptions.ResponseError):
            second.requeue()
    finally:
        broker.client.config_set("min-replicas-to-write", 0)
    assert worker.channel.qos.can_consume()
    assert books.client.hlen(books.keys.unacked) == 2
    _age(books, 2 * _VISIBILITY_S)
    _sweep(worker)
    assert books.client.llen(books.keys.queue(DATASET)) == 2


# Lost connections


def test_a_blip_gives_nothing_back(celery: Celery, books: Queue, worker: CeleryWorker) -> None:
    """A channel that closes while the worker goes on leaves its deliveries alone, and they can be acked later."""
    keep_running_work_over_blips(lambda: False)
    first, _second = _deliver(celery, worker, "a", "b")
    worker.channel.close()
    assert books.client.llen(books.keys.queue(DATASET)) == 0
    assert books.client.hlen(books.keys.unacked) == 2
    first.ack()
    assert (books.client.hlen(books.keys.unacked), books.client.zcard(_index(books))) == (1, 1)


def test_a_worker_that_ends_gives_its_deliveries_back(celery: Celery, books: Queue, worker: CeleryWorker) -> None:
    """At the end kombu's own way is taken: unacked tickets return to the queue at once."""
    stopping = [False]
    keep_running_work_over_blips(lambda: stopping[0])
    first, _second = _deliver(celery, worker, "a", "b")
    first.ack()
    stopping[0] = True
    worker.channel.close()
    assert books.client.llen(books.keys.queue(DATASET)) == 1
    assert books.client.hlen(books.keys.unacked) == 0


def test_a_channel_without_deliveries_closes_quietly(worker: CeleryWorker) -> None:
    """A channel that delivered nothing needs no connection to be closed."""
    keep_running_work_over_blips(lambda: False)
    assert worker.channel.qos is not None
    worker.channel.close()


def test_clients_are_built_once(celery: Celery, books: Queue, worker: CeleryWorker) -> None:
    """A channel keeps its client as long as its pool lives, has its own for reading, and works with it."""
    reuse_redis_clients()
    (message,) = _deliver(celery, worker, "a")
    channel = worker.channel
    kept = channel._create_client()
    assert channel._create_client() is kept
    assert channel._create_client(asynchronous=True) is not kept
    message.ack()
    assert books.client.hlen(books.keys.unacked) == 0
    channel._disconnect_pools()
    assert channel._create_client() is not kept


# Queues


def test_queues_are_followed(
    celery: Celery, books: Queue, worker: CeleryWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker reads the queues of all datasets, soon those of new ones, and none while it is paused."""
    monkeypatch.setattr(QueueFollower, "wanted", staticmethod(books.queues))
    books.register("e", "f" * 16, {})
    mill_celery.publish(celery, DATASET, ["a"])
    follower = QueueFollower(worker)
    follower.start(worker)
    assert len(worker.take(1)) == 1

    books.register("later", "f" * 16, {})
    books.pause("e", "by hand")
    (entry,) = list(worker.timer.queue)
    assert 0 < entry.eta - time.monotonic() <= 1.0
    entry.entry()
    read = [name for name in ("d", "e", "later") if worker.task_consumer.consuming_from(queue_name(name))]
    assert read == ["d", "later"]

    mill_celery.publish(celery, "e", ["b"])
    books.resume("e")
    follower.follow(worker)
    assert len(worker.take(2)) == 2
    follower.stop(worker)
    follower.stop(worker)
    assert entry.entry.canceled


def test_without_a_keeper_no_queue_is_read(worker: CeleryWorker) -> None:
    """A process that has not started its mill reads nothing."""
    follower = QueueFollower(worker)
    follower.start(worker)
    assert not worker.task_consumer.queues
    follower.stop(worker)
