"""What a real Redis counts of finished samples: distributions, runs, pauses, and failed calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis.exceptions

from app import broker as app_broker
from app.pace import rates_of
from app.places import Keys
from app.queue import Queue
from app.records import Kind, Sample
from app.tally import Done
from tests.conftest import Broker, RedisFactory
from workers.fault_tally import FaultTally

DATASET = "Ünï/set"


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return the test's work list."""
    client = app_broker.connect(app_broker.parse(broker.url))
    yield Queue(client, Keys(broker.key_prefix))
    client.connection_pool.disconnect()


def put(queue: Queue, *ids: str) -> None:
    """Let samples wait."""
    queue.put(DATASET, [Sample(id=id_, messages=[]) for id_ in ids])


def test_distributions_grow_with_what_is_finished(queue: Queue) -> None:
    """Latencies are those of all answered calls, lengths those of accepted samples; sums are exact to a millisecond."""
    done = [
        Done("a", Kind.ACCEPTED, 100, prompt_tokens=7, latency_s=1.25),
        Done("b", Kind.ACCEPTED, 3000, prompt_tokens=8, latency_s=40.0),
        Done("c", Kind.REJECTED, 8192, prompt_tokens=9, latency_s=1900.0),
        Done("d", Kind.FAILED),
    ]
    put(queue, *(one.id for one in done))
    queue.finish(DATASET, done[:2])
    queue.finish(DATASET, done[2:])
    stats = queue.tally.look(DATASET).stats
    assert (stats.accepted, stats.rejected, stats.failed, stats.settled) == (2, 1, 1, 4)
    assert (stats.tokens, stats.prompt_tokens) == (3100, 24)
    assert (stats.latency.count, stats.latency.total) == (3, 1941.25)
    assert [n for _bound, n in stats.lengths.buckets()] == [1, 1]
    assert stats.latency.buckets()[-1][0] == pytest.approx(1995.26)


def test_a_pause_does_not_slow_the_rates(queue: Queue) -> None:
    """After a resume the windows begin anew, and the run's rate leaves the pause out."""
    queue.put(DATASET, [Sample(id="a", messages=[])])
    now = queue.now()
    queue.client.hset(queue.keys.run(DATASET), "began", repr(now - 1000))
    queue.pause(DATASET, "by hand")
    queue.pause(DATASET, "by hand, again")
    queue.client.hset(queue.keys.run(DATASET), "paused_at", repr(now - 900))
    put(queue, *map(str, range(200)), *(f"x{number}" for number in range(40)))
    queue.finish(DATASET, [Done(str(number), Kind.ACCEPTED, 10) for number in range(200)], at=now - 950)
    held = queue.tally.look(DATASET).run
    assert held is not None
    assert held.worked_s(now) == pytest.approx(100, abs=1)
    queue.resume(DATASET)
    queue.finish(DATASET, [Done(f"x{number}", Kind.ACCEPTED, 10) for number in range(40)], at=now + 5)
    rates = rates_of([queue.tally.look(DATASET)], now=now + 20)
    assert rates.now.samples_per_s == pytest.approx(40 / 20, rel=0.1)
    assert rates.five_minutes == rates.now
    assert rates.run.samples_per_s == pytest.approx(240 / 120, rel=0.02)


def test_a_resume_without_a_pause_changes_nothing(queue: Queue) -> None:
    """Resuming what runs is no new beginning."""
    queue.put(DATASET, [Sample(id="a", messages=[])])
    before = queue.tally.look(DATASET).run
    queue.resume(DATASET)
    assert queue.tally.look(DATASET).run == before


def test_coming_and_going_workers_are_noted(queue: Queue) -> None:
    """A first heartbeat, an end and a death are changes; a second heartbeat is none."""
    assert queue.tally.changed() is None
    queue.beat("one", {}, ttl_s=60)
    first = queue.tally.changed()
    assert first == pytest.approx(queue.now(), abs=5)
    queue.beat("one", {}, ttl_s=60)
    assert queue.tally.changed() == first
    queue.client.delete(queue.keys.worker("one"))
    assert queue.workers() == []
    second = queue.tally.changed()
    assert second is not None
    assert first is not None
    assert second > first
    queue.part("one")
    assert queue.tally.changed() == second


def test_every_failed_call_is_counted_once(queue: Queue) -> None:
    """Faults of many threads reach Redis by kind and dataset, with one command for many of them."""
    faults = FaultTally()
    threads = [
        threading.Thread(target=lambda: [faults.note(DATASET, "timeout") for _ in range(500)]) for _turn in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faults.note("other", "connect")
    faults.tell(queue)
    faults.tell(queue)
    assert queue.tally.look(DATASET).stats.faults == {"timeout": 2000}
    assert queue.tally.look("other").stats.faults == {"connect": 1}


def test_faults_wait_while_redis_is_away(new_redis: RedisFactory) -> None:
    """What could not be told is told when Redis is back, together with what came in meanwhile."""
    server = new_redis(aof=True)
    books = Queue(server.client(), Keys("x:"))
    faults = FaultTally()
    faults.note(DATASET, "timeout")
    server.kill()
    with pytest.raises(redis.exceptions.RedisError):
        faults.tell(books)
    faults.note(DATASET, "timeout")
    server.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            faults.tell(books)
            break
        except redis.exceptions.RedisError:
            time.sleep(0.05)
    assert books.tally.look(DATASET).stats.faults == {"timeout": 2}
