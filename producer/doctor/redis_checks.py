"""The Redis server: there, safe to keep prompts in, with room, and with a clock like ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from app import broker
from app.broker import BrokerUrl
from app.clock import RedisClock
from app.errors import BrokerError
from app.room import FULL
from producer.doctor.checks import Check, Level
from producer.measures import size

MOST_SKEW_S = 5.0
"""A clock that differs by more is worth a word."""


def check_redis(url: BrokerUrl) -> Iterator[Check]:
    """Look at the server; whatever is wrong with it is a finding, never an error."""
    try:
        with broker.translated(url), contextlib.closing(broker.connect_for_command(url)) as client:
            found = cast("Mapping[str, Any]", client.info())
            redis_clock = RedisClock()
            redis_clock.ask(client)
            ahead_s = redis_clock.now() - time.time()
    except BrokerError as error:
        yield Check(Level.FAIL, "redis.reachable", str(error))
        return
    name = "Valkey" if found.get("server_name") == "valkey" else "Redis"
    version = found.get("valkey_version") or found.get("redis_version") or "of unknown version"
    yield Check(Level.OK, "redis.reachable", f"{name} {version} answers at {url}.")
    yield from _writes(url, found)
    yield _eviction(url, found)
    yield _persistence(found)
    yield _memory(url, found)
    yield clock("redis.clock", "Redis", ahead_s)


def _writes(url: BrokerUrl, found: Mapping[str, Any]) -> Iterator[Check]:
    if found.get("role") in {"slave", "replica"}:
        sentence = f"Redis at {url} is read-only (a replica?); point MILL_REDIS_URL at the primary."
        yield Check(Level.FAIL, "redis.writes", sentence)
    if found.get("aof_last_write_status", "ok") != "ok" or found.get("rdb_last_bgsave_status", "ok") != "ok":
        sentence = f"Redis at {url} cannot write its files to disk; give its disk space, then look at its log."
        yield Check(Level.FAIL, "redis.writes", sentence)


def _eviction(url: BrokerUrl, found: Mapping[str, Any]) -> Check:
    if danger := broker.eviction_danger(found, str(url)):
        return Check(Level.FAIL, "redis.eviction", danger)
    policy = found.get("maxmemory_policy", "noeviction")
    why = "" if policy == "noeviction" else ", and no maxmemory is set"
    return Check(Level.OK, "redis.eviction", f"it drops no keys (maxmemory-policy {policy}{why}).")


def _persistence(found: Mapping[str, Any]) -> Check:
    if found.get("aof_enabled"):
        return Check(Level.OK, "redis.persistence", "it writes an append-only file: the queue survives its restart.")
    sentence = (
        "it writes no append-only file: after its restart waiting prompts are gone until enqueue is run again "
        "(records are safe); run: redis-cli CONFIG SET appendonly yes."
    )
    return Check(Level.WARN, "redis.persistence", sentence)


def _memory(url: BrokerUrl, found: Mapping[str, Any]) -> Check:
    used, most = int(found.get("used_memory", 0)), int(found.get("maxmemory", 0))
    if not most:
        return Check(Level.OK, "redis.memory", f"it uses {size(used)} and has no maxmemory.")
    told = f"it uses {size(used)} of {size(most)} (maxmemory)"
    if used >= FULL * most:
        advice = f"enqueue waits above {FULL:.0%}; give Redis at {url} more memory."
        return Check(Level.FAIL if used >= most else Level.WARN, "redis.memory", f"{told}: {advice}")
    return Check(Level.OK, "redis.memory", f"{told}.")


def clock(name: str, whose: str, ahead_s: float, *, server: str | None = None) -> Check:
    """Return what a clock that is so many seconds ahead of this machine's means."""
    if abs(ahead_s) <= MOST_SKEW_S:
        return Check(Level.OK, name, f"the clock of {whose} and this machine's agree within {MOST_SKEW_S:g} s.", server)
    way = "ahead of" if ahead_s > 0 else "behind"
    sentence = (
        f"the clock of {whose} is {abs(ahead_s):.0f} s {way} this machine's; leases go by Redis, but times in records "
        "and logs will not fit together: set the clocks by NTP."
    )
    return Check(Level.WARN, name, sentence, server)
