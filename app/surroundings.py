"""Reads who works and on which model servers, and says what keeps them from working."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from app.broker import text
from app.places import public_url
from app.queue import Queue
from app.snapshot import HUNG, Endpoint

_WAITS = "waiting"
"""How the state of a worker begins that could work but for something outside."""


def read_endpoints(queue: Queue, workers: Sequence[Mapping[str, Any]]) -> list[Endpoint]:
    """Return the model servers that the living workers use; without workers, all that Redis remembers."""
    flights: dict[str, int] = {}
    bounds: dict[str, int] = {}
    for worker in workers:
        for name, n in mapping(worker.get("in_flight")).items():
            flights[name] = flights.get(name, 0) + int(n)
        for name, n in mapping(worker.get("bound")).items():
            bounds[name] = max(bounds.get(name, 0), int(n))
    latencies = _latencies(workers)
    used = set(flights).union(*(mapping(worker.get("held")) for worker in workers))
    names = sorted(text(name) for name in cast("set[bytes]", queue.client.smembers(queue.keys.endpoints)))
    with queue.client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hgetall(queue.keys.endpoint(name))
        replies = pipe.execute()
    found = []
    for name, fields in zip(names, replies, strict=True):
        if used and name not in used:
            continue  # a server of an earlier run
        said = {text(key): text(value) for key, value in fields.items()}
        found.append(
            Endpoint(
                name=name,
                url=public_url(said.get("url", "")),
                state=said.get("state", "up"),
                since=float(said["since"]) if said.get("since") else None,
                reason=said.get("reason", ""),
                in_flight=flights.get(name, 0),
                bound=bounds.get(name) or None,
                gauges=_gauges(said.get("gauges")),
                latency_s=latencies.get(name),
            )
        )
    return found


_SHOWN_GAUGES = ("running", "waiting", "kv", "at")


def _gauges(told: str | None) -> dict[str, float] | None:
    """Return what a worker read from the server's `/metrics`, for people."""
    try:
        read = msgspec.json.decode(told or "{}", type=dict[str, float])
    except msgspec.DecodeError:
        return None  # written by a worker of another version
    return {name: read[name] for name in _SHOWN_GAUGES if name in read} or None


def _latencies(workers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each endpoint's mean latency in seconds; a worker counts by its requests in flight."""
    sums: dict[str, tuple[float, float]] = {}
    for worker in workers:
        in_flight = mapping(worker.get("in_flight"))
        for name, latency_s in mapping(worker.get("latency_s")).items():
            if latency_s is not None:
                weight = max(1.0, float(in_flight.get(name, 0)))
                seconds, weights = sums.get(name, (0.0, 0.0))
                sums[name] = (seconds + weight * float(latency_s), weights + weight)
    return {name: seconds / weights for name, (seconds, weights) in sums.items()}


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a field of a heartbeat that holds something by name; nothing for one of another version's making."""
    return value if isinstance(value, dict) else {}


def find_obstacle(workers: Sequence[Mapping[str, Any]], endpoints: Sequence[Endpoint], *, now: float) -> str | None:
    """Return what keeps every living worker from working, as the start of a sentence; None where one can work."""
    if not workers:
        return None
    sick = [endpoint for endpoint in endpoints if endpoint.state != "up"]
    if sick and len(sick) == len(endpoints):
        others = f"; none of the {len(sick)} model servers can be used" if len(sick) > 1 else ""
        return describe(sick[0], now=now) + others
    held_up = [worker for worker in workers if str(worker.get("state", "")).startswith(_WAITS)]
    if len(held_up) == len(workers):
        worker = held_up[0]
        note = str(worker.get("note") or "").rstrip(".")
        return f"every worker is {worker['state']}" + (f" ({note})" if note else "")
    return None


def describe(endpoint: Endpoint, *, now: float) -> str:
    """Say how a model server is, as the start of a sentence."""
    words = {"down": "is unreachable", "paused": "refuses every request"}.get(endpoint.state, f"is {endpoint.state}")
    words = "hangs" if endpoint.reason.startswith(HUNG) else words
    since = f" since {clock_time(endpoint.since, now=now)}" if endpoint.since else ""
    reason = f" ({endpoint.reason.removeprefix(HUNG).rstrip('.')})" if endpoint.reason else ""
    return f"the model server {words}{since}: {endpoint.url or endpoint.name}{reason}"


def clock_time(at: float, *, now: float) -> str:
    """Return a moment as local time, with the date unless it is today's."""
    moment, today = (dt.datetime.fromtimestamp(when, dt.UTC).astimezone() for when in (at, now))
    return f"{moment:%H:%M:%S}" if moment.date() == today.date() else f"{moment:%Y-%m-%d %H:%M:%S}"


def worth_saying(workers: Sequence[Mapping[str, Any]], endpoints: Sequence[Endpoint], *, now: float) -> list[str]:
    """Return a sentence for each model server that cannot be used and each worker that has something to tell."""
    said = [describe(endpoint, now=now) for endpoint in endpoints if endpoint.state != "up" and workers]
    for worker in workers:
        note = str(worker.get("note") or "").rstrip(".")
        if note:
            said.append(f"worker {worker.get('node') or worker.get('owner')}: {note}")
    return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in said]
