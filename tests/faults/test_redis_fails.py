"""Redis dies, comes back, comes back empty, drops connections: answers are kept and nothing runs twice for it."""

from __future__ import annotations

import signal
import time
from typing import cast

import pytest

from app.places import Keys
from producer.simulator.server import ModelServer
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import (
    assert_asked_again_at_most,
    assert_asked_once,
    assert_balanced,
    assert_not_asked_since,
    assert_quiet,
    prompts,
    times_asked,
)
from tests.support.mill import Mill
from tests.support.processes import WorkerProcess, wait_until
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.fault


@pytest.fixture
def own_redis(mill: Mill, new_redis: RedisFactory) -> RedisServer:
    """Give the mill a Redis of its own that keeps what it was told over a crash."""
    server = new_redis(aof=True)
    mill.env["MILL_REDIS_URL"] = server.url
    return server


def _unacked(mill: Mill, redis_server: RedisServer) -> int:
    return int(redis_server.client().hlen(Keys(mill.env["MILL_KEY_PREFIX"]).unacked))


def _oldest_lease(mill: Mill, redis_server: RedisServer) -> float:
    """Return when the delivery that was refreshed the longest ago was refreshed, in Unix seconds."""
    index = f"{Keys(mill.env['MILL_KEY_PREFIX']).unacked}_index"
    found = cast("list[tuple[bytes, float]]", redis_server.client().zrange(index, 0, 0, withscores=True))
    return found[0][1]


def _assert_nothing_was_lost_or_repeated(
    mill: Mill, server: ModelServer, rows: list[str], worker: WorkerProcess
) -> None:
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
def test_a_redis_that_crashes_and_comes_back_costs_nothing(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """After kill -9 of Redis, and a restart once all answers are on disk, workers go on; every sample is asked once."""
    server = model_server(latency_s=1.0)
    rows = prompts(48)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=8)
    mill.wait_recorded(8)

    own_redis.kill()
    worker.wait_for_output("Redis is away")
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    wait_until(lambda: mill.recorded() == server.stats["total"], 20, "all answers recorded", detail=mill.tails)
    assert not own_redis.running
    own_redis.restart()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 10, "every delivery acked", detail=mill.tails)
    _assert_nothing_was_lost_or_repeated(mill, server, rows, worker)


@pytest.mark.slow
def test_a_redis_that_crashes_again_and_again_ends_no_worker(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """Eight crashes of Redis in the middle of full work leave the same worker at work, and every sample asked once."""
    server = model_server(latency_s=0.5)
    rows = prompts(400)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=16)
    for _ in range(8):
        before = mill.recorded()
        mill.wait_recorded(before + 10, timeout_s=30)
        own_redis.restart()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 15, "every delivery acked", detail=mill.tails)
    _assert_nothing_was_lost_or_repeated(mill, server, rows, worker)


@pytest.mark.slow
def test_answers_that_come_while_redis_is_away_are_written_at_once(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """With Redis away for longer than the lease, answers reach the disk meanwhile, and none is asked for again."""
    server = model_server(latency_s=3.0)
    rows = prompts(24)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=8)
    wait_until(lambda: server.in_flight == 8, 30, "8 requests in flight", detail=mill.tails)

    own_redis.kill()
    gone_at = time.monotonic()
    mill.wait_recorded(8, timeout_s=12)
    assert not own_redis.running
    recorded = times_asked(mill, server)
    time.sleep(max(0.0, 15 - (time.monotonic() - gone_at)))
    own_redis.restart()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_not_asked_since(server, recorded)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
def test_a_redis_that_comes_back_empty_is_filled_again_by_enqueue(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory
) -> None:
    """After an empty restart status says how many samples are neither done nor queued; enqueue queues exactly those."""
    forgetful = new_redis()
    mill.env["MILL_REDIS_URL"] = forgetful.url
    server = model_server(latency_s=0.5)
    rows = prompts(40)
    mill.enqueue(rows)
    mill.worker(concurrency=4)
    mill.wait_recorded(4)

    forgetful.restart()
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    done = wait_until(lambda: mill.recorded() == server.stats["total"] and mill.recorded(), 10, "all answers recorded")
    said = mill.run("status", expect=1).stdout
    assert f"{len(rows) - done} samples are neither done nor queued; run producer enqueue again" in " ".join(
        said.split()
    )
    assert mill.counts()["missing"] == len(rows) - done
    again = mill.enqueue(rows).stdout
    assert f"already recorded {done}, already queued 0, queued {len(rows) - done}" in again
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)


@pytest.mark.slow
def test_a_worker_told_to_stop_while_redis_is_away_ends(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """SIGTERM during an outage of Redis ends the worker within its drain, and what it had is asked later or on disk."""
    server = model_server(latency_s=600.0)
    rows = prompts(8)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4, drain_s=1)
    wait_until(lambda: server.in_flight == 4, 30, "4 requests in flight", detail=mill.tails)

    own_redis.kill()
    worker.wait_for_output("Redis is away")
    worker.send_signal(signal.SIGTERM)
    code = worker.wait(30)

    assert code == 0
    assert_quiet(worker.output())
    own_redis.restart()
    server.set_options(latency_s=0.1)
    mill.worker(concurrency=4)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_again_at_most(server, 4)


@pytest.mark.slow
def test_a_request_longer_than_its_lease_is_sent_once_over_two_blips(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """A request of 25 s under a lease of 8 s is sent exactly once, though every connection to Redis is cut twice."""
    server = model_server(latency_s=25.0)
    rows = prompts(6)
    mill.enqueue(rows)
    worker, other = mill.worker(concurrency=3), mill.worker(concurrency=8)
    wait_until(lambda: server.in_flight == len(rows), 30, "all in flight", detail=mill.tails)
    began = _oldest_lease(mill, own_redis)

    for blip in (1, 2):
        # Nearly a lease each: without a refresh over the first blip the second would find it run out.
        told = began + blip * 7
        wait_until(lambda told=told: _oldest_lease(mill, own_redis) >= told, 20, "leases refreshed", detail=mill.tails)
        own_redis.client().client_kill_filter(_type="normal")
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 10, "every delivery acked", detail=mill.tails)
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    for one in (worker, other):
        assert one.stop() == 0
        assert_quiet(one.output())


@pytest.mark.slow
def test_blips_under_load_repeat_nothing(mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory) -> None:
    """Every connection to Redis is cut three times in the middle of full work: all is done, and asked once."""
    server = model_server(latency_s=0.5)
    rows = prompts(120)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=8)
    mill.wait_recorded(8)

    for _ in range(3):
        done = mill.recorded()
        own_redis.client().client_kill_filter(_type="normal")
        mill.wait_recorded(done + 8)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 10, "every delivery acked", detail=mill.tails)
    _assert_nothing_was_lost_or_repeated(mill, server, rows, worker)


@pytest.mark.parametrize(("slots", "latency_s"), [(256, 5.0), pytest.param(1024, 20.0, marks=pytest.mark.slow)])
def test_tasks_that_finish_together_are_all_acked(
    mill: Mill, own_redis: RedisServer, slots: int, latency_s: float
) -> None:
    """When every slot's answer comes in the same moment, every record is written and every delivery acked."""
    rows = prompts(slots)
    with ServerProcess(mill.logs, latency_s=latency_s) as server:
        mill.env |= {"MILL_MODEL_URLS": server.url, "MILL_MAX_IN_FLIGHT": str(slots)}
        mill.enqueue(rows)
        worker = mill.worker(concurrency=slots)
        wait_until(lambda: server.stats()["in_flight"] == slots, 40, "all in flight", detail=mill.tails)
        server.process.pause()
        time.sleep(latency_s)
        server.process.resume()
        mill.wait_recorded(slots)
        mill.wait_idle()
        wait_until(lambda: not _unacked(mill, own_redis), 10, "every delivery acked", detail=mill.tails)
        assert max(server.counts().values()) == 1
        assert worker.stop() == 0
    assert_balanced(mill, rows)
    assert_quiet(worker.output())
