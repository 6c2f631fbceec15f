"""The processes of a chaos run: Redis, model servers, workers, producers, and the small disk that they write to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis

from app import broker
from app.places import Keys
from producer.ports import free_port
from tests.chaos.crew import Seat
from tests.chaos.inputs import DATASETS, Input
from tests.chaos.server import Mood
from tests.support.mill import Mill
from tests.support.processes import ManagedProcess
from tests.support.redis_server import RedisServer

LEASE_S = 8
_PREFIX = "chaos:"
_PERMITS = 12
"""Requests in flight per server."""
_DISK_MIB, _MIB_PER_SAMPLE = 192, 0.004
_SIGMA = 0.8
_MOST_ENQUEUES = 4


@dataclasses.dataclass(frozen=True)
class Flights:
    """Samples that workers have taken and not recorded."""

    prompts: list[str] = dataclasses.field(default_factory=list)
    unknown: int = 0
    """At most so many more: Redis could not say."""

    def __len__(self) -> int:
        return len(self.prompts) + self.unknown


@dataclasses.dataclass(frozen=True)
class Options:
    """What a chaos run is made of."""

    seed: int
    seconds: float
    workers: int = 3
    slots: int = 6
    """Requests that a worker makes at once."""
    samples_per_second: float = 20.0
    """How fast the inputs grow."""
    latency_s: float = 0.3
    """Mean seconds of an answer; the spread is lognormal."""

    @property
    def samples(self) -> int:
        """The samples of all datasets together."""
        return max(60, int(self.seconds * self.samples_per_second))


class ModelHost:
    """One fake model server as a process, started again on its port and with a new journal each time."""

    def __init__(self, number: int, folder: Path, options: Options) -> None:
        self.name = f"server{number}"
        self.port = free_port()
        self.paused = False
        self.down = False
        """Whether it was killed on purpose and stays down for a while."""
        self.starts = 0
        self.mood = Mood(folder / f"{self.name}.mood")
        self.moody = False
        self._folder = folder
        self._words = ["--latency", str(options.latency_s), "--sigma", str(_SIGMA)]
        self._seed = options.seed * 10 + number
        self._process: ManagedProcess | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process is not None and self._process.running

    @property
    def process(self) -> ManagedProcess:
        """The process; raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process

    def kill(self) -> None:
        """Kill it; it stays down until `start`."""
        self.down = True
        self.process.kill()

    def start(self) -> None:
        """Start it; it listens some time later."""
        self.starts += 1
        self.down = False
        words = [
            *("--port", str(self.port), "--seed", str(self._seed + self.starts * 1000)),
            *("--journal", str(self._folder / f"{self.name}.{self.starts}.journal")),
            *("--mood", str(self._folder / f"{self.name}.mood")),
        ]
        command = [sys.executable, "-m", "tests.chaos.server", *self._words, *words]
        self._process = ManagedProcess(command, log_dir=self._folder / "logs", name=self.name)


class World:
    """Everything that runs; `close` ends it all."""

    def __init__(self, options: Options, folder: Path, say: Callable[[str], None]) -> None:
        """Take the options, an empty folder, and what prints a line."""
        self.options = options
        self.folder = folder
        self.say = say
        self.problems: list[str] = []
        self.repeats: list[tuple[str, Flights]] = []
        """What may be asked once more, and why."""
        self.started_at = time.time()
        """Unix seconds at which the faults' clock began."""
        self.progress = 0.0
        """How much of the inputs is known, from 0 to 1."""
        (folder / "inputs").mkdir()
        (folder / "redis").mkdir()
        self.prepared = folder / "prepared"
        self.prepared.mkdir()
        self.disk = self._mount()
        self.redis = RedisServer(folder / "redis", aof=True)
        self.redis_paused = self.redis_full = False
        self.hosts = [ModelHost(number, folder, options) for number in (1, 2)]
        self.mill = Mill(self._env(), folder)
        self.seats = [Seat(number, self.mill, slots=options.slots) for number in range(1, options.workers + 1)]
        share = options.samples // len(DATASETS)
        self.inputs = [Input(name, share, folder=folder / "inputs", seed=options.seed) for name in DATASETS]
        self.enqueues: list[ManagedProcess] = []
        self.enqueued = 0
        self.commands = 0

    def _env(self) -> dict[str, str]:
        return {
            "MILL_REDIS_URL": self.redis.url,
            "MILL_KEY_PREFIX": _PREFIX,
            "MILL_PREPARED_DIR": str(self.prepared),
            "MILL_STATE_DIR": str(self.folder / "state"),
            "MILL_MODEL_URLS": ",".join(host.url for host in self.hosts),
            "MILL_MAX_IN_FLIGHT": str(_PERMITS),
            "MILL_MAX_PENDING": str(max(200, int(20 * self.options.samples_per_second))),
            "MILL_LEASE_S": str(LEASE_S),
            "MILL_PROGRESS_S": "2",
            "MILL_PROBE_S": "1",
            "MILL_BACKOFF_S": "0.2",
            "MILL_BACKOFF_MAX_S": "3",
            "MILL_RETRY_AFTER_MAX_S": "3",
            # An answer that never comes, or a bad hour of a server, must not make a sample fail.
            "MILL_MAX_ATTEMPTS": "12",
            "MILL_REQUEST_TIMEOUT_S": "30",
            "MILL_CONNECT_TIMEOUT_S": "5",
        }

    def _mount(self) -> bool:
        """Put a small disk under the prepared folder, where this machine lets us."""
        size = f"size={_DISK_MIB + int(self.options.samples * _MIB_PER_SAMPLE)}m"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.prepared)]
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def start(self) -> None:
        """Start everything but the producers."""
        self.redis.start()
        for host in self.hosts:
            host.start()
        for host in self.hosts:
            host.process.wait_for_output("listening")
        for seat in self.seats:
            seat.tend()

    def close(self, *, keep: bool) -> None:
        """End every process and unmount the disk; `keep` copies what is on it into the folder."""
        self.mill.close()
        for host in self.hosts:
            if host.starts:
                host.process.close()
        self.redis.stop()
        if self.disk:
            if keep:
                shutil.copytree(self.prepared, self.folder / "prepared-copy", dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(self.prepared)], capture_output=True, check=False)

    # Workers

    def tend(self) -> None:
        """Fill empty seats, start servers again that a prompt has killed, and look at what has ended."""
        for host in self.hosts:
            if not host.running and not host.down:
                host.start()
        self.problems += [sentence for seat in self.seats if (sentence := seat.tend())]
        for process in [one for one in self.enqueues if not one.running]:
            self.enqueues.remove(process)
            if process.returncode not in {0, 1, -9} or "Traceback" in process.output():
                self.problems.append(f"{process.name} ended with {process.returncode}: {process.tail()}")

    def in_flight(self, *seats: Seat) -> Flights:
        """Return the samples that these workers have taken and not recorded."""
        unknown = Flights(unknown=self.options.slots * len(seats))
        if not self.redis.running or self.redis_paused:
            return unknown
        keys, nodes, prompts = Keys(_PREFIX), tuple(f"{seat.node}@" for seat in seats), list[str]()
        try:
            with contextlib.closing(self.client()) as client:
                for name in DATASETS:
                    flights = client.hgetall(keys.flights(name))
                    ids = [id_ for id_, owner in flights.items() if broker.text(owner).startswith(nodes)]
                    payloads = client.hmget(keys.prompts(name), ids) if ids else []
                    prompts += [json.loads(payload)["messages"][-1]["content"] for payload in payloads if payload]
        except redis.RedisError:
            return unknown
        return Flights(prompts)

    def client(self, password: str | None = None) -> redis.Redis:
        """Return a client that gives up soon; the caller closes it."""
        return redis.Redis.from_url(self.redis.url, password=password, socket_timeout=3)

    def may_repeat(self, why: str, flights: Flights) -> None:
        """Note that these samples may be asked once more."""
        self.repeats.append((why, flights))

    # Producers

    def enqueue(self, source: Input, *, part: bool = False) -> ManagedProcess:
        """Start an enqueue of what is known of an input now, or of a part of it."""
        path = (source.write_part if part else source.write)(self.progress)
        self.enqueued += 1
        process = self.mill.start("enqueue", str(path), "--dataset", source.dataset, name=f"enqueue-{source.dataset}")
        self.enqueues.append(process)
        return process

    def command(self, *words: str) -> ManagedProcess:
        """Start another of the producer's commands; it may be refused, and must not end in a traceback."""
        self.commands += 1
        process = self.mill.start(*words, name=f"command-{self.commands}")
        self.enqueues.append(process)
        return process

    @property
    def busy(self) -> bool:
        """Whether as many enqueues run as may."""
        return len(self.enqueues) >= _MOST_ENQUEUES
