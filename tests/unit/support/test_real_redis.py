"""The Redis helper runs a real server that can be killed and brought back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from tests.conftest import Broker
from tests.support.redis_server import RedisServer

RedisFactory = Callable[..., RedisServer]


def test_session_server_is_empty_for_each_test(broker: Broker) -> None:
    """A test starts with no keys and a prefix of its own."""
    assert broker.client.dbsize() == 0
    assert broker.key_prefix.endswith(":")
    broker.client.set(broker.key_prefix + "a", "b")
    assert broker.client.get(broker.key_prefix + "a") == "b"


def test_kill_and_restart_with_aof(new_redis: RedisFactory) -> None:
    """With AOF a SIGKILL loses nothing that was acknowledged, and port and URL stay."""
    server = new_redis(aof=True)
    url = server.url
    server.client().set("kept", "yes")
    server.kill()
    assert not server.running
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.restart()
    assert server.url == url
    assert server.client().get("kept") == "yes"


def test_restart_without_persistence_is_empty(new_redis: RedisFactory) -> None:
    """Without AOF a restarted server has forgotten everything."""
    server = new_redis()
    server.client().set("lost", "yes")
    server.restart()
    assert server.client().get("lost") is None


def test_password(new_redis: RedisFactory) -> None:
    """A password is needed and part of the URL."""
    server = new_redis(password="secret")  # noqa: S106  of a server that lives for this test
    client = server.client()
    assert client.ping()
    server.password = None
    with pytest.raises(redis.AuthenticationError):
        server.client().ping()


def test_memory_limit(new_redis: RedisFactory) -> None:
    """A memory limit refuses writes under noeviction."""
    server = new_redis(maxmemory="4mb")
    client = server.client()
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        _fill(client)


def _fill(client: redis.Redis) -> None:
    """Write 10 MB in small pieces."""
    for number in range(100):
        client.set(f"k{number}", "x" * 100_000)
