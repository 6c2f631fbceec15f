"""How fast prompts get onto the queue, what they weigh there, and whether the producer's memory stays flat."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from app.places import Keys
from benchmarks.figures import Figure, Options
from benchmarks.rig import PROMPT_CHARS, make_mill, redis_server, rss_mb, timed, workplace, write_prompts
from tests.support.mill import Mill
from tests.support.redis_server import RedisServer

_SAMPLES = 15_000
_PLAIN_SAMPLES = 5_000
_SHORT_CHARS = 200
_LOOK_S = 0.2
_LONGEST_S = 3600.0
_DATASET = "queue"
_PRODUCER = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"

PLAIN = """
import json, sys
from celery import Celery
app = Celery(broker=sys.argv[1])
@app.task(name="generate", ignore_result=True)
def generate(prompt): pass
for line in open(sys.argv[2], encoding="utf-8"):
    generate.apply_async((json.loads(line)["prompt"],))
"""
"""The loop that people write instead."""


def measure(options: Options) -> Iterator[Figure]:
    """Run a plain `apply_async` loop and `producer enqueue` in turn."""
    plain, ours, plain_cpu, our_cpu, weights = list[float](), list[float](), list[float](), list[float](), list[float]()
    for _ in range(options.repeat):
        with workplace() as folder, redis_server(folder) as redis:
            wall, cpu = _enqueue_plainly(folder, redis)
            plain.append(_PLAIN_SAMPLES / wall)
            plain_cpu.append(1e6 * cpu / _PLAIN_SAMPLES)
        with workplace() as folder, redis_server(folder) as redis:
            wall, cpu, weight = _enqueue(make_mill(folder, redis.url), redis)
            ours.append(_SAMPLES / wall)
            our_cpu.append(1e6 * cpu / _SAMPLES)
            weights.append(weight)
    yield Figure("plain apply_async loop", plain, "samples/s", digits=0)
    yield Figure("producer enqueue, start included", ours, "samples/s", at_least=3000, digits=0)
    yield Figure("producer enqueue / apply_async", [a / b for a, b in zip(ours, plain, strict=True)], at_least=2.5)
    yield Figure("plain apply_async loop: CPU per sample", plain_cpu, "us", digits=0)
    yield Figure("producer enqueue: CPU per sample", our_cpu, "us", digits=0)
    yield Figure("Redis beyond the prompt", weights, "kB/sample", at_most=1.2)
    yield from _memory(1_000_000 if options.full else 200_000)


def _enqueue_plainly(folder: Path, redis: RedisServer) -> tuple[float, float]:
    prompts = write_prompts(folder / "prompts.jsonl", _PLAIN_SAMPLES)
    return timed([sys.executable, "-c", PLAIN, redis.url, str(prompts)])


def _enqueue(mill: Mill, redis: RedisServer) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds, and the kB of Redis for each sample beyond its prompt."""
    prompts = write_prompts(mill.path / "prompts.jsonl", _SAMPLES)
    before = _used_bytes(redis)
    wall, cpu = timed([sys.executable, "-c", _PRODUCER, "enqueue", str(prompts), "--dataset", _DATASET], mill.env)
    return wall, cpu, (_used_bytes(redis) - before) / _SAMPLES / 1000 - PROMPT_CHARS / 1000


def _used_bytes(redis: RedisServer) -> int:
    return int(redis.client().info("memory")["used_memory"])


def _memory(rows: int) -> Iterator[Figure]:
    """Enqueue many short prompts while something else empties the queue, as workers would."""
    with workplace() as folder, redis_server(folder) as redis:
        mill = make_mill(folder, redis.url, max_pending=20_000)
        prompts = write_prompts(folder / "prompts.jsonl", rows, chars=_SHORT_CHARS)
        producer = mill.start("enqueue", str(prompts), "--dataset", _DATASET)
        weights = list[float]()
        with _emptying(redis):
            while producer.running:
                weights.append(rss_mb(producer.pid))
                threading.Event().wait(_LOOK_S)
        producer.wait(_LONGEST_S)
    weights = [weight for weight in weights if weight]  # an ended process has none
    early, late = max(weights[: len(weights) // 4]), max(weights)
    yield Figure(f"producer's memory over {rows:,} rows", [late], "MB", digits=0)
    yield Figure("of that, grown after the first quarter", [late - early], "MB", at_most=20, digits=1)


@contextlib.contextmanager
def _emptying(redis: RedisServer) -> Iterator[None]:
    client, keys, ended = redis.client(), Keys("mill:"), threading.Event()

    def empty() -> None:
        while not ended.wait(_LOOK_S):
            client.delete(keys.prompts(_DATASET), keys.queue(_DATASET))

    thread = threading.Thread(target=empty, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
