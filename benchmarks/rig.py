"""What the benchmarks share: real processes, their CPU time and memory, and a worker's run against the fake server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.mill import Mill
from tests.support.processes import PROJECT_ROOT, ManagedProcess, subprocess_env
from tests.support.redis_server import RedisServer

PROMPT_CHARS = 2000
ANSWER_CHARS = 4000
FROM, TO = 0.15, 0.8
"""The part of a run that counts: its start (connecting) and its end (the last slow answers) are left out."""
_LOOK_S = 0.1
_LONGEST_RUN_S = 300.0
_TICKS_PER_S = 100.0
"""Of /proc/PID/stat on Linux."""

# As the embedded server of `producer up` runs.
_REDIS_OPTIONS = ("--appendonly", "yes", "--appendfsync", "everysec")


@dataclasses.dataclass(frozen=True)
class Look:
    """A run at one moment."""

    at: float
    done: int
    cpu_s: float
    busy_s: float
    """The fake server's time integral of requests in flight."""
    server_s: float
    """The fake server's clock."""
    rss_mb: float


@dataclasses.dataclass(frozen=True)
class Stretch:
    """What lies between two looks."""

    begin: Look
    end: Look

    @property
    def per_second(self) -> float:
        """Samples done in a second."""
        return (self.end.done - self.begin.done) / (self.end.at - self.begin.at)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds (user and system) per sample."""
        return 1000 * (self.end.cpu_s - self.begin.cpu_s) / (self.end.done - self.begin.done)

    @property
    def cores(self) -> float:
        """CPU seconds per second."""
        return (self.end.cpu_s - self.begin.cpu_s) / (self.end.at - self.begin.at)

    def occupancy(self, slots: int) -> float:
        """Share of the server's slots that were busy."""
        return (self.end.busy_s - self.begin.busy_s) / (self.end.server_s - self.begin.server_s) / slots


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Give a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="promptmill-bench-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Run a Redis or Valkey with the persistence that the product's own has."""
    path = folder / "redis"
    path.mkdir()
    with RedisServer(path, options=_REDIS_OPTIONS) as server:
        yield server


@contextlib.contextmanager
def model_server(folder: Path, *, latency_s: float, sigma: float = 0.5) -> Iterator[str]:
    """Run the fake model server in a process of its own and give its URL."""
    words = ["--port", "0", "--latency", str(latency_s), "--sigma", str(sigma), "--content-chars", str(ANSWER_CHARS)]
    command = [sys.executable, "-m", "producer.simulator.server", *words]
    with ManagedProcess(command, log_dir=folder / "logs", name="model", cwd=PROJECT_ROOT) as process:
        yield str(json.loads(process.wait_for_output("listening"))["listening"])


def make_mill(folder: Path, redis_url: str, model_url: str = "http://127.0.0.1:9", **settings: object) -> Mill:
    """Return the product with a prepared folder of its own; settings are MILL_ variables without the prefix."""
    env = {
        "MILL_REDIS_URL": redis_url,
        "MILL_PREPARED_DIR": str(folder / "prepared"),
        "MILL_STATE_DIR": str(folder / "state"),
        "MILL_MODEL_URLS": model_url,
    }
    return Mill({**env, **{f"MILL_{name.upper()}": str(value) for name, value in settings.items()}}, folder)


def write_prompts(path: Path, count: int, *, chars: int = PROMPT_CHARS) -> Path:
    """Write that many different prompts of `chars` characters as JSONL."""
    filler = "All work and no play makes Jack a dull boy. " * (chars // 44 + 1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            file.write(json.dumps({"prompt": f"{number:9d} {filler}"[:chars]}) + "\n")
    return path


def slots_for(bound: int) -> int:
    """Return the concurrency that keeps one call waiting for each permit that comes free."""
    return bound + max(8, math.ceil(0.06 * bound))


def run_workers(mill: Mill, *, count: int, slots: int, dataset: str, workers: int = 1) -> Stretch:
    """Enqueue, start workers with that many slots each, watch them until all is recorded, stop them."""
    mill.enqueue(write_prompts(mill.path / "prompts.jsonl", count), dataset=dataset, timeout_s=_LONGEST_RUN_S)
    running = [mill.worker(concurrency=slots) for _ in range(workers)]
    try:
        done, pids = LineCounter(mill.out(dataset)), [worker.pid for worker in running]
        return watch(pids, count=count, done=done, model_url=mill.env["MILL_MODEL_URLS"])
    finally:
        for worker in running:
            worker.stop()


def watch(pids: Sequence[int], *, count: int, done: Callable[[], int], model_url: str) -> Stretch:
    """Look at processes ten times a second until they have done all; return the part of the run that counts."""
    looks: list[Look] = []
    deadline = time.monotonic() + _LONGEST_RUN_S
    while not looks or looks[-1].done < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{looks[-1].done} of {count} samples were done after {_LONGEST_RUN_S:.0f} s")
        time.sleep(_LOOK_S)
        stats = server_stats(model_url)
        cpu, weight = sum(map(cpu_s, pids)), sum(map(rss_mb, pids))
        looks.append(Look(time.monotonic(), done(), cpu, stats["busy_s"], stats["now_s"], weight))
    begin = next(look for look in looks if look.done >= FROM * count)
    end = next(look for look in looks if look.done >= TO * count)
    if end is begin:
        raise ValueError(f"{count} samples were done too fast to be watched; take more")
    return Stretch(begin, end)


class LineCounter:
    """Counts a growing file's lines, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0
        self._offset = 0

    def __call__(self) -> int:
        """Return how many lines there are by now."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while block := file.read(2**20):
                    self._lines += block.count(b"\n")
                    self._offset += len(block)
        return self._lines


def server_stats(model_url: str) -> dict[str, Any]:
    """Return the fake server's tallies."""
    with urllib.request.urlopen(f"{model_url}/__stats", timeout=30) as answer:  # noqa: S310 our own server
        stats: dict[str, Any] = json.load(answer)
    return stats


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_mb(pid: int) -> float:
    """Return a process's resident memory in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def timed(command: Sequence[str], env: dict[str, str] | None = None) -> tuple[float, float]:
    """Run a command to its end; return its wall seconds and its CPU seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, env=subprocess_env(env), cwd=PROJECT_ROOT, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
