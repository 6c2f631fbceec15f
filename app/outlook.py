"""When it will be done, as a range, or the one sentence that says why nobody can know. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from app.forecast import Load, forecast
from app.histogram import Histogram, bucket_of
from app.pace import begin_of, last_settled, settled_in_run, settled_since
from app.snapshot import Counts, Eta, State
from app.surroundings import clock_time, mapping
from app.tally import KEEP_S, Counted

_SETTLING_S = 3.0
"""Seconds after a change of workers, servers or a pause in which nothing is foretold."""
_QUIET_S, _QUIET_TIMES = 120.0, 3.0
"""Nothing has finished for so long, and for so many times what 95 % of the answers take: it stalls."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all datasets share at the moment of a snapshot."""

    now: float
    """Unix seconds by Redis' clock."""
    reachable: bool = True
    workers: Sequence[Mapping[str, Any]] = ()
    obstacle: str | None = None
    """One sentence for what keeps every worker from working."""
    obstacle_since: float | None = None
    """Unix seconds since which it does, where that is known."""
    workers_changed_at: float | None = None
    """When a worker last came or went."""
    started_by: str = "producer up, or celery -A app worker"
    """How such workers are started."""
    server_changed_at: float | None = None
    """When a model server last went down or came back."""
    server_up_since: float | None = None
    """Since when there has been a model server without a break."""

    @property
    def takers(self) -> int:
        """Workers that take new samples."""
        return sum(worker.get("state") != "draining" for worker in self.workers)

    @property
    def slots(self) -> int:
        """Samples that all workers together can have in flight."""
        return sum(int(worker.get("slots") or 0) for worker in self.workers)

    @property
    def served(self) -> float:
        """Which part of the samples in flight is being answered; the rest waits for a permit or a retry."""
        calls = sum(int(n) for worker in self.workers for n in mapping(worker.get("in_flight")).values())
        busy = sum(int(worker.get("busy") or 0) for worker in self.workers)
        return min(1.0, calls / busy) if calls and busy else 1.0


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What a dataset has ahead, and what is known of its pace."""

    counts: Counts
    state: State
    counted: Counted
    ages: Sequence[float] = ()
    """Seconds for which each sample in flight has been taken, the oldest first."""
    last_record_at: float | None = None
    """When the newest sample on disk was finished."""


def eta_of(ahead: Sequence[Ahead], scene: Scene) -> Eta:
    """Return when all of them will be done: one dataset, or several that share the workers.

    What is paused or lost neither ends nor keeps the rest from ending.
    """
    moving = [one for one in ahead if one.counts.live and one.state is not State.PAUSED]
    reason = _why_not(ahead, moving, scene)
    if reason is not None:
        return Eta(reason=reason)
    found = forecast([_load(one, scene) for one in moving])
    if found is None:
        finished = sum(settled_in_run(one.counted) for one in moving)
        return Eta(reason=f"too few finished samples in this run ({finished}) to tell")
    return Eta(
        seconds=round(found.seconds, 1),
        low_s=round(found.low_s, 1),
        high_s=round(found.high_s, 1),
        at=round(scene.now + found.seconds, 1),
    )


def _why_not(ahead: Sequence[Ahead], moving: Sequence[Ahead], scene: Scene) -> str | None:
    """Return why nobody can know."""
    live = sum(one.counts.live for one in moving)
    rules = (
        (not any(one.counts.left for one in ahead), "nothing to do"),
        (not scene.reachable, "without Redis nobody can tell what is queued"),
        (not any(one.counts.live for one in ahead), "nothing is queued"),
        (not moving, "paused"),
        (not scene.workers, "no worker is running"),
        (scene.obstacle is not None, scene.obstacle),
        (not scene.takers, "every worker is ending"),
        (
            sum(one.counts.orphaned or 0 for one in moving) == live,
            "the rest waits until a dead worker's lease runs out",
        ),
        (not any(settled_in_run(one.counted) for one in moving), "no finished sample yet in this run"),
    )
    reason = next((reason for holds, reason in rules if holds), None)
    if reason is not None:
        return reason
    if not all(settled_in_run(one.counted) for one in moving):
        return "one of the datasets has no finished sample yet in this run"
    since = max((quiet for one in moving if (quiet := quiet_since(one, scene))), default=None)
    if since is not None and all(quiet_since(one, scene) for one in moving):
        return f"stalled: no sample has finished since {clock_time(since, now=scene.now)}"
    return _what_changed(moving, scene)


def _what_changed(moving: Sequence[Ahead], scene: Scene) -> str | None:
    """Return what has changed so lately that the pace is not known yet."""
    resumed = max((one.counted.run.resumed or 0.0 for one in moving if one.counted.run), default=0.0)
    changes = (
        (resumed, "it was resumed"),
        (scene.workers_changed_at, "a worker came or went"),
        (scene.server_changed_at, "a model server went down or came back"),
    )
    for at, what in changes:
        ago = scene.now - (at or 0.0)
        if 0 <= ago < _SETTLING_S:
            return f"{what} {ago:.0f} s ago"
    return None


def quiet_since(ahead: Ahead, scene: Scene) -> float | None:
    """Return the moment after which nothing has finished, if that is far longer ago than answers take."""
    run = ahead.counted.run
    # What is longer ago than Redis' tallies reach is known by the files.
    last = last_settled(ahead.counted, now=scene.now) or ahead.last_record_at
    if run is None or last is None or not settled_in_run(ahead.counted):
        return None
    p95 = _latencies(ahead.counted).quantile(0.95) or 0.0
    steady = max(last, run.steady, scene.workers_changed_at or 0.0, scene.server_changed_at or 0.0)
    return float(last) if scene.now - steady > max(_QUIET_S, _QUIET_TIMES * p95) else None


def _latencies(counted: Counted) -> Histogram:
    return counted.stats.latency.since(counted.run.before.latency) if counted.run else counted.stats.latency


def _load(ahead: Ahead, scene: Scene) -> Load:
    """Return what a forecast needs.

    Of the samples in flight the oldest are being answered; the rest waits for a permit and counts as queued. A sample
    that was taken before the model servers came back is being asked anew since then.
    """
    start = _steady_since(ahead.counted, scene)
    window_s, settled = scene.now - start, settled_since(ahead.counted, start, now=scene.now)
    ages = list(ahead.ages)[: ahead.counts.in_flight]
    answered = max(1, round(len(ages) * scene.served)) if ages else 0
    slots = float(answered or max(1, scene.slots))
    durations = _durations(ahead.counted, slots=slots, settled=settled, window_s=window_s)
    waits_s = (len(ages) - answered) * (durations.mean or 0.0) / slots
    longest_s = scene.now - scene.server_up_since if scene.server_up_since else math.inf
    return Load(
        queued=ahead.counts.live - answered,
        ages=[max(0.0, min(age, longest_s) - waits_s) for age in ages[:answered]],
        durations=durations,
        settled=settled,
        window_s=window_s,
        slots=slots,
    )


def _steady_since(counted: Counted, scene: Scene) -> float:
    """Return the whole second since which nothing has changed that matters to the pace, at most 15 minutes back."""
    changes = [at for at in (scene.workers_changed_at, scene.server_changed_at) if at and at <= scene.now]
    begin = max(begin_of(counted, now=scene.now), *changes, scene.now - KEEP_S, key=float)
    return float(math.ceil(begin))


def _durations(counted: Counted, *, slots: float, settled: int, window_s: float) -> Histogram:
    """Return how long this run's samples took; where most failed without an answer, as their number says."""
    latencies = _latencies(counted)
    if 2 * latencies.count >= settled_in_run(counted) or not settled:
        return latencies
    mean = slots * window_s / settled
    return Histogram({bucket_of(mean): settled}, mean * settled)
