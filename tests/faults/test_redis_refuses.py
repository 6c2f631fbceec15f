"""Redis stays up but refuses: wrong password, read-only, full, evicting; workers say what is wrong and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from app.places import Keys
from producer.ports import free_port
from tests.conftest import ModelServerFactory, RedisFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.fault

_OLD, _NEW = "olive-42-tree", "plum-17-stone"


@pytest.fixture
def own_redis(mill: Mill, new_redis: RedisFactory) -> RedisServer:
    """Give the mill a Redis of its own."""
    server = new_redis()
    mill.env["MILL_REDIS_URL"] = server.url
    return server


def _unacked(mill: Mill, server: RedisServer) -> int:
    return int(server.client().hlen(Keys(mill.env["MILL_KEY_PREFIX"]).unacked))


@contextlib.contextmanager
def _read_only(server: RedisServer) -> Iterator[None]:
    """Make it the replica of a server that is not there."""
    server.client().replicaof("127.0.0.1", free_port())
    yield
    server.client().replicaof("NO", "ONE")


@contextlib.contextmanager
def _without_replicas(server: RedisServer) -> Iterator[None]:
    """Let it refuse writes for want of replicas."""
    server.client().config_set("min-replicas-to-write", 1)
    yield
    server.client().config_set("min-replicas-to-write", 0)


@contextlib.contextmanager
def _silent(server: RedisServer) -> Iterator[None]:
    """Make it a replica that answers no reads either."""
    server.client().config_set("replica-serve-stale-data", "no")
    with _read_only(server):
        yield


@contextlib.contextmanager
def _full(server: RedisServer) -> Iterator[None]:
    """Bound its memory below what is used."""
    server.client().config_set("maxmemory", 2**20)
    yield
    server.client().config_set("maxmemory", 0)


@pytest.mark.slow
@pytest.mark.parametrize("refusing", [_read_only, _without_replicas, _silent, _full])
def test_a_redis_that_takes_no_writes_for_longer_than_the_lease(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory, refusing: object
) -> None:
    """While Redis refuses writes, what runs is recorded and nothing new is asked; then the work goes on by itself."""
    mill.env["MILL_LEASE_S"] = "6"
    server = model_server(latency_s=1.0)
    rows = prompts(60)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(8)

    with refusing(own_redis):  # type: ignore[operator]
        worker.wait_for_output("Redis is away or full")
        wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
        wait_until(lambda: mill.recorded() == server.stats["total"], 10, "all answers on disk", detail=mill.tails)
        asked = server.stats["total"]
        with pytest.raises(AssertionError):
            wait_until(lambda: server.stats["total"] > asked, 9, "another request")
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 20, "every delivery acked", detail=mill.tails)
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())


@pytest.mark.slow
@pytest.mark.parametrize("way_out", ["the file has the new one", "the old one is back"])
def test_a_password_that_is_changed_while_work_runs(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory, way_out: str
) -> None:
    """Workers say in one line that the password is refused, record what runs, and come back by themselves."""
    redis = new_redis(password=_OLD)
    file = mill.path / "password"
    file.write_text(f"{_OLD}\n", encoding="utf-8")
    mill.env |= {"MILL_REDIS_URL": f"redis://127.0.0.1:{redis.port}/0", "MILL_REDIS_PASSWORD_FILE": str(file)}
    server = model_server(latency_s=1.0)
    rows = prompts(60)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4)
    mill.wait_recorded(8)

    admin = redis.client()
    admin.config_set("requirepass", _NEW)
    admin.client_kill_filter(_type="normal", skipme=True)
    told = worker.wait_for_output("refuses the user or password")
    assert "MILL_REDIS_PASSWORD_FILE" in told
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    wait_until(lambda: mill.recorded() == server.stats["total"], 10, "all answers on disk", detail=mill.tails)
    refused = mill.run("status", expect=1)
    assert "refuses the user or password" in " ".join(refused.stdout.split())
    if "new" in way_out:
        file.write_text(f"{_NEW}\n", encoding="utf-8")
    else:
        admin.config_set("requirepass", _OLD)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    unacked = Keys(mill.env["MILL_KEY_PREFIX"]).unacked
    wait_until(lambda: not admin.hlen(unacked), 20, "every delivery acked", detail=mill.tails)
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())
    for secret in (_OLD, _NEW):
        assert secret not in worker.output() + refused.stdout + refused.stderr


@pytest.mark.slow
def test_an_outage_of_three_leases_under_load(
    mill: Mill, new_redis: RedisFactory, model_server: ModelServerFactory
) -> None:
    """Redis away for three leases while two workers are busy: they come back within seconds and lose no answer."""
    redis = new_redis(aof=True)
    mill.env |= {"MILL_REDIS_URL": redis.url, "MILL_LEASE_S": "6"}
    server = model_server(latency_s=2.0)
    rows = prompts(160)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=8) for _ in range(2)]
    mill.wait_recorded(20)

    redis.kill()
    wait_until(lambda: server.in_flight == 0, 20, "no request in flight", detail=mill.tails)
    wait_until(lambda: mill.recorded() == server.stats["total"], 10, "all answers on disk", detail=mill.tails)
    asked = server.stats["total"]
    with pytest.raises(AssertionError):
        wait_until(lambda: server.stats["total"] > asked, 18, "another request")
    redis.restart()
    wait_until(lambda: server.stats["total"] > asked, 10, "work again", detail=mill.tails)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, redis), 20, "every delivery acked", detail=mill.tails)
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


@pytest.mark.slow
def test_bursts_of_blips_under_load_send_a_long_request_once(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """A request of five leases is sent once, while other work goes on and all connections are cut in three bursts."""
    mill.env["MILL_LEASE_S"] = "6"
    server = model_server([{"match": "slow", "delay_s": 30.0}], latency_s=0.3)
    rows = ["slow one", *prompts(700)]
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=4) for _ in range(2)]
    wait_until(lambda: server.count("slow one") == 1, 30, "the slow one in flight", detail=mill.tails)

    for burst in range(1, 4):
        mill.wait_recorded(100 * burst)
        for _ in range(4):
            own_redis.client().client_kill_filter(_type="normal", skipme=True)
            own_redis.client().client_kill_filter(_type="pubsub", skipme=True)
    mill.wait_recorded(len(rows), timeout_s=120)
    mill.wait_idle()

    wait_until(lambda: not _unacked(mill, own_redis), 20, "every delivery acked", detail=mill.tails)
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


def test_an_eviction_policy_that_is_changed_while_work_runs_is_told(
    mill: Mill, own_redis: RedisServer, model_server: ModelServerFactory
) -> None:
    """Once Redis may drop keys, status and progress.json say so and what to do; a policy that is mended is not told."""
    model_server()
    mill.enqueue(prompts(4))
    assert not mill.status()["totals"]["notes"]
    own_redis.client().config_set("maxmemory", "100mb")
    own_redis.client().config_set("maxmemory-policy", "allkeys-lru")
    notes = mill.status()["totals"]["notes"]
    assert [note for note in notes if "maxmemory-policy allkeys-lru" in note and "CONFIG SET" in note]
    own_redis.client().config_set("maxmemory-policy", "noeviction")
    assert not mill.status()["totals"]["notes"]
