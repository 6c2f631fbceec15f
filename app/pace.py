"""How fast it goes: finished samples per second over a minute, five minutes and the run. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from app.records import RECORDED, Kind
from app.snapshot import Rate, Rates
from app.tally import Counted

NOW_S, FIVE_MINUTES_S = 60.0, 300.0
"""Seconds that the short windows look back."""
CLOCK_SET_BACK_S = 60.0
"""What lies further ahead was noted before Redis' clock was set back, and says nothing of now."""
_SHORTEST_SPAN_S = 1.0


def rates_of(counted: Sequence[Counted], *, now: float, end: float | None = None) -> Rates:
    """Return the rates of one dataset, or of several together over the same windows.

    A window begins no earlier than the run, or the resume after its last pause. The run's ends at `end`, where the
    work has ended before now.
    """
    if not any(map(settled_in_run, counted)):
        return Rates()
    return Rates(
        now=measure(counted, now=now, window_s=NOW_S),
        five_minutes=measure(counted, now=now, window_s=FIVE_MINUTES_S),
        run=_whole_run(counted, now=now if end is None else end),
    )


def measure(counted: Sequence[Counted], *, now: float, window_s: float) -> Rate:
    """Return the rates over one window, the same for all; nothing in the first second.

    Tallies are per whole second, so the window begins at a whole second too; the running second counts as far as it
    has come. A second shared with an earlier run is left out.
    """
    begins = [begin_of(one, now=now) for one in counted]
    start = max(min(begins, default=-math.inf), math.ceil(now) - window_s)
    span = now - start
    if span < _SHORTEST_SPAN_S:
        return Rate()
    sums = dict.fromkeys((*RECORDED, "tokens"), 0)
    for one, begin in zip(counted, begins, strict=True):
        for second, amounts in one.seconds.items():
            if max(start, begin) <= second <= now + CLOCK_SET_BACK_S:
                for what in sums:
                    sums[what] += amounts.get(what, 0)
    return _rate(sums, span)


def begin_of(counted: Counted, *, now: float) -> float:
    """Return the whole second since which the dataset's tallies count."""
    run = counted.run
    if run is None or run.steady > now + CLOCK_SET_BACK_S:
        return -math.inf
    return math.ceil(run.steady)


def settled_since(counted: Counted, start: float, *, now: float) -> int:
    """Return the samples of any outcome that were finished from that second on."""
    seen = (amounts for second, amounts in counted.seconds.items() if start <= second <= now + CLOCK_SET_BACK_S)
    return sum(amounts.get(kind, 0) for amounts in seen for kind in RECORDED)


def settled_in_run(counted: Counted) -> int:
    """Return the samples of any outcome that this run has finished."""
    run = counted.run
    return counted.stats.settled - run.before.settled if run else counted.stats.settled


def last_settled(counted: Counted, *, now: float) -> float | None:
    """Return the second in which the newest of the last 15 minutes' samples was finished."""
    begin = begin_of(counted, now=now)
    return max((second for second in counted.seconds if begin <= second <= now + CLOCK_SET_BACK_S), default=None)


def _whole_run(counted: Sequence[Counted], *, now: float) -> Rate:
    sums = dict.fromkeys((*RECORDED, "tokens"), 0)
    span = 0.0
    for one in counted:
        if one.run is None:
            continue
        span = max(span, one.run.worked_s(now))
        before = one.run.before
        sums[Kind.ACCEPTED] += one.stats.accepted - before.accepted
        sums[Kind.REJECTED] += one.stats.rejected - before.rejected
        sums[Kind.FAILED] += one.stats.failed - before.failed
        sums["tokens"] += one.stats.tokens - before.tokens
    return Rate() if span < _SHORTEST_SPAN_S else _rate(sums, span)


def _rate(sums: Mapping[str, int], span: float) -> Rate:
    return Rate(
        samples_per_s=round(sums[Kind.ACCEPTED] / span, 3),
        tokens_per_s=round(sums["tokens"] / span, 3),
        rejected_per_s=round(sums[Kind.REJECTED] / span, 3),
        failed_per_s=round(sums[Kind.FAILED] / span, 3),
        window_s=round(span, 3),
    )
