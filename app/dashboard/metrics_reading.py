"""Looks at what the metrics tell beside a snapshot: Redis' counters and memory, and the disk."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import redis.exceptions

from app.broker import text
from app.dashboard.metrics import Reading
from app.queue import Queue
from app.snapshot import Snapshot


def read(queue: Queue, prepared: Path, snapshot: Snapshot) -> Reading:
    """Return the whole reading; what cannot be reached is left out of it."""
    free, size = _disk(prepared)
    reading = Reading(snapshot, disk_free=free, disk_size=size)
    if not snapshot.broker.reachable:
        return reading
    try:
        return _with_redis(queue, reading)
    except redis.exceptions.RedisError:
        return reading  # it went away since the snapshot was taken


def _with_redis(queue: Queue, reading: Reading) -> Reading:
    memory = queue.client.info("memory")
    known = queue.datasets()
    return dataclasses.replace(
        reading,
        redis_up=True,
        stats=queue.tally.stats([name for name in reading.snapshot.datasets if name in known]),
        paused=frozenset(map(text, queue.client.hkeys(queue.keys.paused))),
        redis_memory=int(memory["used_memory"]),
        redis_memory_max=int(memory.get("maxmemory", 0)) or None,
    )


def _disk(prepared: Path) -> tuple[int | None, int | None]:
    try:
        usage = shutil.disk_usage(prepared)
    except OSError:  # not made yet, or a network disk that is away
        return None, None
    return usage.free, usage.total
