"""When a run will end, as a range: from how long samples take, and from how many have been settled lately.

A mean over the finished samples alone is too small for a long time, because short answers finish first. So those in
flight count too, as durations that are longer than their age ("right-censored"): the share of samples that take longer
than x is estimated as Kaplan and Meier do (J. Am. Stat. Assoc. 53, 1958), and beyond the longest age that enough
samples have reached it goes on as the lognormal that fits best (EM for censored values; Dempster et al., J. R. Stat.
Soc. B 39, 1977). With that many slots and that mean the queue empties at a known pace (Little's law); what was settled
in a window corrects the pace. The end is when the last of all ends: the tail of the slowest is part of the range.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

from app.histogram import PER_DECADE, Histogram, bucket_of, middle

FEWEST = 3
"""Finished samples below which nothing is said."""
_LOW, _HIGH = 0.04, 0.96
_SPREAD = 2.2
"""Standard deviations that the range takes of the pace's error: 1.64 for 90 %, and a little for what no model knows."""
_DRIFT = 0.08
"""Relative error of assuming that the next samples take as long as the ones before."""
_PRIOR_SPREAD, _PRIOR_WEIGHT = 1.0, 3.0
"""The lognormal's sigma before anything is known, and how many samples that is worth."""
_AT_RISK = 12
"""Samples that must have reached an age for their share that ended there to count by itself."""
_UNHEARD_OF = 1e-6
"""A share of samples of such an age is too small to say how long one that has reached it still takes; it is assumed
that it is as likely to take another 40 % of its age as not."""
_WIDEST = 3.0
"""Natural logarithm of the largest factor by which the range may differ from the point for what is not known."""
_ROUNDS, _SETTLED = 60, 1e-3
_WHOLE_SECOND_S = 0.5
"""Error of a window that is counted in whole seconds."""
_LEAST_WORK = 0.1
"""Slots that are nearly done shorten the rest at most to this share."""
_FINE = 4
"""Grid points per bucket."""
_DECADES = 7.0
_FINEST_S = 0.005


@dataclasses.dataclass(frozen=True)
class Load:
    """What is ahead of one dataset, and what is known of how fast it goes."""

    queued: int
    ages: Sequence[float]
    """Seconds for which the samples in flight have been asked."""
    durations: Histogram
    """Seconds that finished samples took."""
    settled: int = 0
    """Samples of any outcome that were finished in the window."""
    window_s: float = 0.0
    """Seconds looked back, over which nothing changed that matters: workers, servers, pauses."""
    slots: float | None = None
    """Samples that can be asked at once; as many as are in flight unless given."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Seconds from now until all is done: about 90 of 100 runs end between `low_s` and `high_s`."""

    seconds: float
    low_s: float
    high_s: float


def forecast(loads: Sequence[Load]) -> Forecast | None:
    """Return when all loads, which share their slots, will be done; None while too little is known of one of them."""
    busy = [load for load in loads if load.queued or load.ages]
    if not busy or any(load.durations.count < FEWEST for load in busy):
        return None
    views = [_look(load) for load in busy]
    return _finish(views)


class _Survival:
    """The share of samples that take longer than x seconds, on a logarithmic grid."""

    def __init__(self, share: Callable[[float], float]) -> None:
        steps = int(_DECADES * 10 * _FINE)
        self.xs = [0.0, *(_FINEST_S * 10 ** (step / (10 * _FINE)) for step in range(steps + 1))]
        self.ys = [min(1.0, max(0.0, share(x))) for x in self.xs]
        self._areas, self._logs, self.second = self._integrate()

    def _integrate(self) -> tuple[list[float], list[float], float]:
        """Return the integrals from 0 of S and of -log(1 - S) at each grid point, and the mean of the squares."""
        areas, logs, second = [0.0], [0.0], 0.0
        for place in range(1, len(self.xs)):
            x0, x1, y0, y1 = self.xs[place - 1], self.xs[place], self.ys[place - 1], self.ys[place]
            areas.append(areas[-1] + (x1 - x0) * (y0 + y1) / 2)
            second += (x1 - x0) * (x0 * y0 + x1 * y1)
            logs.append(logs[-1] + (x1 - x0) * (_missing(y0) + _missing(y1)) / 2)
        return areas, logs, second

    @property
    def mean(self) -> float:
        """The mean duration."""
        return self._areas[-1]

    def at(self, x: float) -> float:
        """Return the share that takes longer than x."""
        return self._between(self.ys, x)

    def rest(self, age: float) -> float:
        """Return the mean time that a sample of that age still takes."""
        alive = self.at(age)
        if alive <= 0:
            return 0.0
        return (self._areas[-1] - self._between(self._areas, age)) / alive

    def log_done(self, low: float, high: float) -> float:
        """Return the integral of log(1 - S) between two durations: never positive."""
        return self._between(self._logs, low) - self._between(self._logs, high)

    def _between(self, values: Sequence[float], x: float) -> float:
        place = bisect.bisect_right(self.xs, x)
        if place >= len(self.xs):
            return values[-1]
        x0, x1 = self.xs[place - 1], self.xs[place]
        return values[place - 1] + (values[place] - values[place - 1]) * (x - x0) / (x1 - x0)


def _missing(share: float) -> float:
    return -math.log(max(1e-9, 1.0 - share))


@dataclasses.dataclass(frozen=True)
class _View:
    """One load, understood."""

    load: Load
    survival: _Survival
    slots: float
    pace_s: float
    """Seconds of a slot that a queued sample takes."""
    error: float
    """Relative standard error of `pace_s`."""
    sigma: float
    """Of the lognormal that fits best."""


def _look(load: Load) -> _View:
    survival, sigma = _survival(load)
    slots = load.slots or float(len(load.ages)) or 1.0
    spread = max(0.0, survival.second / survival.mean**2 - 1.0)
    """Squared coefficient of variation."""
    mean = survival.mean * _rounding(load.durations)
    by_model = spread / load.durations.count + _DRIFT**2
    if load.settled < FEWEST or load.window_s <= 0:
        return _View(load, survival, slots, mean, math.sqrt(by_model), sigma)
    # In a window that began with fresh slots more, or fewer, are settled than the pace's share: by (spread - 1) / 2.
    bias = slots * abs(spread - 1.0) / 2 / load.settled
    by_count = spread / load.settled + bias**2 + (_WHOLE_SECOND_S / load.window_s) ** 2
    counted = slots * load.window_s / load.settled
    trust = by_model / (by_model + by_count)
    apart = math.log(counted / mean)
    pace = mean * math.exp(trust * apart)
    # Where the two disagree, nobody knows which is right.
    error = math.sqrt(by_model * by_count / (by_model + by_count) + trust * (1 - trust) * apart**2)
    return _View(load, survival, slots, pace, error, sigma)


def _rounding(durations: Histogram) -> float:
    """Return the exact mean over the one that the buckets give, by which a narrow distribution is off."""
    width = math.log(10) / PER_DECADE
    # The mean of a bucket whose logarithms are spread evenly, over its geometric middle.
    spread = 2 * math.sinh(width / 2) / width
    by_buckets = sum(middle(bucket) * spread * n for bucket, n in durations.counts.items())
    return durations.total / by_buckets if durations.total > 0 else 1.0


def _survival(load: Load) -> tuple[_Survival, float]:
    """Return how long samples take, by those that are finished and those that are not, and the lognormal's sigma."""
    ended = {bucket: n for bucket, n in load.durations.counts.items() if n > 0}
    waiting: dict[int, int] = {}
    for age in load.ages:
        bucket = bucket_of(age)
        waiting[bucket] = waiting.get(bucket, 0) + 1
    mu, sigma = _fit_lognormal(ended, waiting)
    steps = _kaplan_meier(ended, load.ages)
    bounds = [bound for bound, _share in steps]

    def share(x: float) -> float:
        if x <= 0:
            return 1.0
        log_x = 10 * math.log10(x)
        place = bisect.bisect_left(bounds, log_x)
        if place < len(steps):
            b0, s0 = steps[place - 1] if place else (steps[0][0] - 1, 1.0)
            b1, s1 = steps[place]
            return s1 + (s0 - s1) * (b1 - log_x) / (b1 - b0) if log_x > b0 else s0
        known, left = steps[-1] if steps else (-math.inf, 1.0)
        if known == -math.inf:
            return _above((math.log(x) - mu) / sigma)
        base = _above((known / 10 * math.log(10) - mu) / sigma)
        return left * _above((math.log(x) - mu) / sigma) / base if base > 1e-12 else 0.0

    return _Survival(share), sigma


def _kaplan_meier(ended: dict[int, int], ages: Sequence[float]) -> list[tuple[float, float]]:
    """Return (bucket's upper bound in tenths of a decade, share that takes longer), as far as enough are known."""
    steps, share = list[tuple[float, float]](), 1.0
    waiting = sorted(PER_DECADE * math.log10(max(age, _FINEST_S)) for age in ages)
    passed, at_risk = 0, float(sum(ended.values()) + len(waiting))
    for bucket in range(min(ended), max(ended) + 1):
        unreached, leaving = 0.0, 0
        while passed < len(waiting) and waiting[passed] <= bucket:
            # An age within the bucket was at risk in the part of the bucket that it has reached.
            unreached += min(1.0, bucket - waiting[passed])
            leaving += 1
            passed += 1
        reached = at_risk - unreached
        if reached < _AT_RISK:
            break
        gone = ended.get(bucket, 0)
        share *= 1.0 - min(1.0, gone / reached)
        at_risk -= gone + leaving
        steps.append((float(bucket), share))
    return steps


def _fit_lognormal(ended: dict[int, int], waiting: dict[int, int]) -> tuple[float, float]:
    """Return the mean and standard deviation of the logarithm, by EM over finished and unfinished durations."""
    done = [(math.log(middle(bucket)), n) for bucket, n in ended.items()]
    open_ = [(math.log(middle(bucket)), n) for bucket, n in waiting.items()]
    count = sum(n for _y, n in done)
    everything = count + sum(n for _y, n in open_)
    mu = sum(y * n for y, n in done) / count
    sigma = _PRIOR_SPREAD
    first, squares = sum(y * n for y, n in done), sum(y * y * n for y, n in done)
    for _round in range(_ROUNDS):
        s1, s2 = first, squares
        for y, n in open_:
            z = (y - mu) / sigma
            hazard = _hazard(z)
            s1 += n * (mu + sigma * hazard)
            s2 += n * (mu**2 + sigma**2 + sigma * (y + mu) * hazard)
        new_mu = s1 / everything
        variance = max(0.0, s2 - 2 * new_mu * s1 + everything * new_mu**2)
        new_sigma = math.sqrt((variance + _PRIOR_WEIGHT * _PRIOR_SPREAD**2) / (everything + _PRIOR_WEIGHT))
        moved = abs(new_mu - mu) + abs(new_sigma - sigma)
        mu, sigma = new_mu, new_sigma
        if moved < _SETTLED:
            break
    return mu, sigma


def _above(z: float) -> float:
    """Return the share of a standard normal above z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def _hazard(z: float) -> float:
    """Return the density over the share above z of a standard normal."""
    if z > 8:
        return z + 1 / z
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / _above(z)


# The end


def _finish(views: Sequence[_View]) -> Forecast:
    slots = sum(view.slots for view in views)
    queued = sum(view.load.queued for view in views)
    empty_s, error_s = _until_empty(views, slots, queued)
    tails = [_Tail(view, empty_s) for view in views]

    def log_share_ended(x: float) -> float:
        return sum(tail.log_share_ended(x) for tail in tails)

    middle_s = _solve(log_share_ended, 0.5, empty_s)
    low_s = _solve(log_share_ended, _LOW, empty_s)
    high_s = _solve(log_share_ended, _HIGH, empty_s)
    # How well the slowest are known: the error of the lognormal's quantile that the last one of all reaches.
    oldest = max((age for view in views for age in view.load.ages), default=0.0)
    tail_s = middle_s - empty_s + oldest * math.exp(-queued / slots)
    doubt = min(_WIDEST, _SPREAD * _tail_error(views, slots))
    pace = min(_WIDEST, _SPREAD * error_s / empty_s) if empty_s else 0.0
    below = math.hypot(middle_s - low_s, empty_s * (1 - math.exp(-pace)), tail_s * (1 - math.exp(-doubt)))
    above = math.hypot(high_s - middle_s, empty_s * (math.exp(pace) - 1), tail_s * (math.exp(doubt) - 1))
    return Forecast(middle_s, max(0.0, middle_s - below), middle_s + above)


def _until_empty(views: Sequence[_View], slots: float, queued: int) -> tuple[float, float]:
    """Return the seconds until the last queued sample is begun, and their standard error."""
    if not queued:
        return 0.0, 0.0
    work = sum(view.load.queued * view.pace_s for view in views)
    # Slots that are further from, or nearer to, their samples' end than usual; that is evened out as they turn over.
    ahead = sum(view.survival.rest(age) for view in views for age in view.load.ages)
    usual = slots * sum(view.survival.second / view.survival.mean / 2 * view.load.queued / queued for view in views)
    offset = (ahead - usual) * (1.0 - math.exp(-queued / slots))
    empty_s = max(_LEAST_WORK * work, work + offset) / slots
    pace = sum((view.load.queued * view.pace_s * view.error) ** 2 for view in views)
    luck = sum(view.load.queued * max(0.0, view.survival.second - view.survival.mean**2) for view in views)
    return empty_s, math.sqrt(pace + luck) / slots


def _tail_error(views: Sequence[_View], slots: float) -> float:
    """Return the standard error of the logarithm of the longest of the last durations."""
    z = math.sqrt(2 * math.log(max(2.0, slots)))
    return max(view.sigma * math.sqrt((1 + z * z / 2) / view.load.durations.count) for view in views)


class _Tail:
    """The chance that all of a dataset is done by a moment."""

    def __init__(self, view: _View, empty_s: float) -> None:
        self._survival = view.survival
        self._empty_s = empty_s
        self._starts_per_s = view.load.queued / empty_s if empty_s > 0 else 0.0
        self._fresh = view.load.queued if empty_s <= 0 else 0
        by_age: dict[int, tuple[int, float]] = {}
        for age in view.load.ages:
            bucket = bucket_of(age)
            n, total = by_age.get(bucket, (0, 0.0))
            by_age[bucket] = (n + 1, total + age)
        self._ages = [(total / n, n, view.survival.at(total / n)) for n, total in by_age.values()]

    def log_share_ended(self, x: float) -> float:
        """Return the logarithm of the chance that all is done within x seconds."""
        log = -self._fresh * _missing(self._survival.at(x))
        for age, n, alive in self._ages:
            log -= n * _missing(self._survival.at(age + x) / alive if alive > _UNHEARD_OF else (age / (age + x)) ** 2)
        if self._starts_per_s:
            log += self._starts_per_s * self._survival.log_done(max(0.0, x - self._empty_s), x)
        return log


def _solve(log_share_ended: Callable[[float], float], share: float, at_least: float) -> float:
    """Return when that share of runs has ended, by halving."""
    wanted, low, high = math.log(share), at_least, at_least + 1.0
    while log_share_ended(high) < wanted and high < 1e9:
        low, high = high, at_least + 2 * (high - at_least)
    for _step in range(30):
        guess = (low + high) / 2
        low, high = (low, guess) if log_share_ended(guess) >= wanted else (guess, high)
        if high - low < 1e-3 * high:
            break
    return high
