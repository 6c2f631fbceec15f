"""Redis dies or is full under the commands: one sentence each, nothing lost; near its memory's end workers go on."""

from __future__ import annotations

import time

import pytest

from app.places import Keys
from producer.ports import free_port
from producer.simulator.rules import Rule
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.fault

_HANGS_S = 15.0
"""Seconds within which a Redis that never answers is told, on a busy machine."""


@pytest.fixture
def own_redis(mill: Mill, new_redis: RedisFactory) -> RedisServer:
    """Give the mill a Redis of its own."""
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    return server


def _fill_up(server: RedisServer) -> None:
    """Bound the memory below what is used, so that every write is refused."""
    server.client().config_set("maxmemory", 2**20)


def _full(server: RedisServer) -> str:
    return f"Redis at {server.url} is full (maxmemory reached); give it more memory, then run the same command again."


@pytest.mark.parametrize("end", ["killed", "full", "killed while enqueue waits for room"])
def test_a_redis_that_fails_under_enqueue_is_told_once(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory, end: str
) -> None:
    """When Redis dies or is full, enqueue ends with 1 and words for people; the same command again completes it."""
    model_server()
    rows = prompts(20_000)
    file = mill.write_rows(rows)
    if "waits" in end:
        mill.env["MILL_MAX_PENDING"] = "100"
    enqueue = mill.start("enqueue", str(file), "--dataset", "case")
    if mill.env.pop("MILL_MAX_PENDING", None):
        enqueue.wait_for_output("100 prompts wait in Redis (MILL_MAX_PENDING), waiting for room; no worker is running")
    client = own_redis.client()
    wait_until(lambda: client.dbsize() >= 3, 30, "a queue", detail=mill.tails)

    if end == "full":
        _fill_up(own_redis)
    else:
        own_redis.kill()
    code = enqueue.wait(60)

    said = enqueue.output()
    assert code == 1, said
    assert "Traceback" not in said
    assert "run the same command again to go on." in said
    told = [line for line in said.splitlines() if line.startswith("producer: Redis at")]
    advice = "start it (producer up starts one) or set MILL_REDIS_URL."
    away = f"Redis at {own_redis.url} cannot be reached; {advice}"
    assert told == [f"producer: {_full(own_redis) if end == 'full' else away}"]
    own_redis.restart()
    again = mill.enqueue(file)
    assert "queued 20,000" in again.stdout
    assert mill.counts()["queued"] == 20_000


def test_a_redis_that_is_full_is_told_by_every_command(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """Enqueue, retry and pause end with 1 and one sentence each; with memory again they do their work."""
    model_server([{"match": "bad", "status": 400}])
    mill.enqueue(["good", "bad"])
    worker = mill.worker()
    mill.wait_recorded(2)
    assert worker.stop() == 0
    _fill_up(own_redis)

    commands = (("retry", "case"), ("pause", "case"), ("enqueue", str(mill.write_rows(["new"])), "--dataset", "case"))
    for words in commands:
        told = mill.run(*words, expect=1)
        assert f"producer: {_full(own_redis)}\n" in told.stderr
        assert told.stderr.count("is full") == 1
        assert "Traceback" not in told.stderr

    own_redis.client().config_set("maxmemory", 0)
    assert "queued 1 failed samples again" in mill.run("retry", "case").stdout
    mill.run("pause", "case")
    assert "queued 1" in mill.run(*commands[-1]).stdout


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_a_redis_that_takes_no_writes_is_looked_at_all_the_same(mill: Mill, own_redis: RedisServer, how: str) -> None:
    """Status says what waits also where Redis is full, or a replica, and a worker has died that is noted there."""
    mill.enqueue(["one", "two"])
    client = own_redis.client()
    client.sadd(Keys(mill.env.get("MILL_KEY_PREFIX", "mill:")).workers, "host-1-dead")
    if how == "full":
        _fill_up(own_redis)
    else:
        client.replicaof("127.0.0.1", str(free_port()))
    told = mill.run("status")
    assert "queued 2" in told.stdout
    assert "Redis ok" in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "cannot be reached"),
        (("verify",), "cannot be reached"),
        (("retry", "case"), "cannot be reached"),
        (("pause", "case"), "cannot be reached"),
        (("bound",), "cannot be reached"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_redis_that_hangs_is_told_by_every_command(
    mill: Mill, own_redis: RedisServer, words: tuple[str, ...], said: str
) -> None:
    """A Redis that takes connections and never answers keeps no command waiting for longer than some seconds."""
    mill.enqueue(["one"])
    own_redis.process.pause()
    began = time.monotonic()
    told = mill.run(*words, expect=1)
    assert time.monotonic() - began < _HANGS_S
    assert said in told.stdout + told.stderr
    assert "Traceback" not in told.stderr
    own_redis.process.resume()


@pytest.mark.slow
def test_near_its_memorys_end_redis_is_emptied_and_filled_in_turns(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory
) -> None:
    """With far more prompts than Redis has memory for, enqueue waits for room and the workers finish everything."""
    small = new_redis(maxmemory="6mb")
    mill.env["MILL_REDIS_URL"] = small.url
    server = model_server(default=Rule(content="fine"))
    rows = [f"row {number} {'x' * 20_000}" for number in range(600)]
    enqueue = mill.start("enqueue", str(mill.write_rows(rows)), "--dataset", "case")
    enqueue.wait_for_output("of its memory (maxmemory), waiting for room; no worker is running")
    assert 0 < mill.counts()["queued"] < 250
    assert small.client().info("memory")["used_memory"] < 0.9 * 6 * 2**20

    worker = mill.worker(concurrency=8)
    mill.wait_recorded(len(rows))
    assert enqueue.wait(30) == 0, enqueue.output()
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())
    assert "OOM" not in worker.output()
