"""A run that is played through in no time: samples of drawn durations, workers that come and go, a server that dies."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence

from app.histogram import Histogram, bucket_of
from app.outlook import Ahead, Scene, eta_of
from app.snapshot import Counts, Eta, State
from app.tally import Counted, Run, Stats

BEGAN = 1_700_000_000.0
Draw = Callable[[random.Random], float]
"""Returns the seconds that an answer takes."""


def lognormal(sigma: float, *, median_s: float = 20.0) -> Draw:
    """Return durations as answers have them: most short, some very long."""
    return lambda rng: rng.lognormvariate(math.log(median_s), sigma)


def capped(sigma: float, *, median_s: float = 20.0, most_s: float = 120.0) -> Draw:
    """Return the same, cut at the longest answer that is allowed."""
    return lambda rng: min(most_s, rng.lognormvariate(math.log(median_s), sigma))


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens when a share of the samples is done."""

    done: float
    slots: int | None = None
    """From then on so many samples are in flight."""
    down_s: float = 0.0
    """For so long the model server is away: what was in flight is asked anew."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What was said at one moment of a run, and what came true."""

    done: float
    """Share of the samples that were done."""
    eta: Eta
    left_s: float
    """Seconds that the rest took, with no further event."""
    run_s: float
    """Seconds that the whole run takes in that case."""
    percent: float


class SimulatedRun:
    """One dataset of `count` samples."""

    def __init__(self, count: int, slots: int, draw: Draw, *, seed: int, events: Sequence[Event] = ()) -> None:
        self._rng = random.Random(seed)
        self._draw, self._count, self._slots = draw, count, slots
        self._events = list(events)
        self.now = 0.0
        self._queued = count
        self._flights: list[tuple[float, float, float]] = []
        """End, start of the call, time at which it was taken."""
        self._seconds: dict[int, dict[str, int]] = {}
        self._counts: dict[int, int] = {}
        self._total_s = 0.0
        self._done = 0
        self._slots_at = self._server_at = self._up_since = 0.0

    def checks(self, shares: Sequence[float]) -> Iterator[Check]:
        """Play the run and look at it when each share is done."""
        left = list(shares)
        self._fill()
        while self._flights:
            self._finish_one()
            while self._events and self._done >= self._events[0].done * self._count:
                yield from self._happen(self._events.pop(0))
            if left and self._done >= left[0] * self._count and self._flights:
                left.pop(0)
                yield self._check(State.RUNNING)

    def _fill(self) -> None:
        while self._queued and len(self._flights) < self._slots:
            self._queued -= 1
            heapq.heappush(self._flights, (self.now + self._draw(self._rng), self.now, self.now))

    def _finish_one(self) -> None:
        end, start, _taken = heapq.heappop(self._flights)
        self.now = end
        self._done += 1
        bucket = bucket_of(end - start)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._total_s += end - start
        tally = self._seconds.setdefault(int(BEGAN + end), {"accepted": 0})
        tally["accepted"] += 1
        self._fill()

    def _happen(self, event: Event) -> Iterator[Check]:
        if event.slots is not None:
            self._slots, self._slots_at = event.slots, self.now
            while len(self._flights) > self._slots:  # a worker was killed
                self._flights.remove(max(self._flights, key=lambda flight: flight[1]))
                heapq.heapify(self._flights)
                self._queued += 1
            self._fill()
        if event.down_s:
            self._server_at = self.now
            self.now += event.down_s / 2
            yield self._check(State.STALLED)
            self.now += event.down_s / 2
            self._server_at = self._up_since = self.now
            asked = [(self.now + self._draw(self._rng), self.now, taken) for _end, _start, taken in self._flights]
            self._flights = asked
            heapq.heapify(self._flights)

    def _check(self, state: State) -> Check:
        ages = sorted((self.now - taken for _end, _start, taken in self._flights), reverse=True)
        left = self._queued + len(ages)
        counts = Counts(samples=self._count, accepted=self._done, left=left, queued=self._queued, in_flight=len(ages))
        stats = Stats(accepted=self._done, latency=Histogram(dict(self._counts), self._total_s))
        counted = Counted(dict(self._seconds), stats, Run(BEGAN))
        scene = Scene(
            now=BEGAN + self.now,
            workers=[{"slots": self._slots, "busy": len(ages), "in_flight": {"e": len(ages)}}],
            obstacle="the model server is unreachable" if state is State.STALLED else None,
            workers_changed_at=BEGAN + self._slots_at,
            server_changed_at=BEGAN + self._server_at,
            server_up_since=None if state is State.STALLED else BEGAN + self._up_since,
        )
        eta = eta_of([Ahead(counts, state, counted, ages)], scene)
        left_s = self._rest_s()
        return Check(self._done / self._count, eta, left_s, self.now + left_s, 100 * self._done / self._count)

    def _rest_s(self) -> float:
        """Return how long the rest takes with the present slots; the durations are those that will be drawn."""
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        ends = [end for end, _start, _taken in self._flights]
        heapq.heapify(ends)
        last = max(ends)
        for _sample in range(self._queued):
            end = heapq.heappop(ends) + self._draw(rng)
            last = max(last, end)
            heapq.heappush(ends, end)
        return last - self.now
