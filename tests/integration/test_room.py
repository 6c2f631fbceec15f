"""How much enqueue puts into a real Redis: at most so many prompts, and never its last fifth of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app import broker as brokers
from app.places import Keys
from app.queue import Queue
from app.records import Sample
from app.room import Room
from tests.conftest import RedisFactory
from tests.support.redis_server import RedisServer

_MIB = 2**20


@pytest.fixture
def server(new_redis: RedisFactory) -> RedisServer:
    """Return a server whose memory the test bounds."""
    return new_redis()


@pytest.fixture
def books(server: RedisServer) -> Iterator[Queue]:
    """Return an empty queue with one dataset."""
    client = brokers.connect(brokers.parse(server.url))
    queue = Queue(client, Keys("x:"))
    queue.register("d", "f", {})
    yield queue
    client.close()


def _samples(count: int, size: int = 10) -> list[Sample]:
    return [Sample(id=f"s{n}", messages=[{"role": "user", "content": "x" * size}]) for n in range(count)]


def test_the_number_of_prompts_is_bounded(books: Queue) -> None:
    """As many fit as MILL_MAX_PENDING leaves; at the bound none does, and the reason names it."""
    room = Room(books, max_pending=10)
    assert room.fit(_samples(50)) == (10, "")
    books.put("d", _samples(7))
    assert room.fit(_samples(50)) == (3, "")
    books.put("d", _samples(10))
    assert room.fit(_samples(50)) == (0, "10 prompts wait in Redis (MILL_MAX_PENDING)")


def test_the_last_fifth_of_memory_is_left_to_workers(server: RedisServer, books: Queue) -> None:
    """What fits is reckoned by size between two looks at Redis, and each look sees what was put or taken meanwhile."""
    now = 0.0
    used = int(server.client().info("memory")["used_memory"])
    server.client().config_set("maxmemory", 2 * (used + 10 * _MIB))
    below_the_mark = 0.8 * 2 * (used + 10 * _MIB) - used
    room = Room(books, max_pending=1000, clock=lambda: now)
    need = 1.25 * _MIB + 4096
    samples = _samples(100, size=_MIB)
    count, _ = room.fit(samples)
    assert below_the_mark / need - 2 < count <= below_the_mark / (1.25 * _MIB)
    books.put("d", samples[:count])

    assert room.fit(samples) == (0, f"Redis holds {count} prompts and uses 80% of its memory (maxmemory)")
    books.forget("d", [sample.id for sample in samples[1:count]])
    assert room.fit(samples)[0] == 0, "within the second nothing is asked again"
    now = 1.0
    assert room.fit(samples)[0] >= count - 2


def test_an_empty_queue_takes_one_whatever_its_size(server: RedisServer, books: Queue) -> None:
    """Nobody will make room where nothing waits, so a prompt is tried, and a server that is full says so itself."""
    used = int(server.client().info("memory")["used_memory"])
    server.client().config_set("maxmemory", int(used * 1.1))
    assert Room(books, max_pending=10).fit(_samples(5)) == (1, "")
    server.client().config_set("maxmemory", 1)
    assert Room(books, max_pending=10).fit(_samples(5)) == (5, "")
