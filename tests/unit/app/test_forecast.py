"""The ETA comes true: simulated runs of every kind end within the range that was foretold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from app.forecast import Load, forecast
from app.histogram import Histogram, collect
from tests.support.simulated_run import Check, Draw, Event, SimulatedRun, capped, lognormal

SHARES = [step / 20 for step in range(1, 20)] + [0.97, 0.99]
"""When a run is looked at, from its first twentieth on."""
Kind = tuple[int, int, Draw]
"""Samples, slots and durations."""
KINDS: list[Kind] = [
    (count, slots, draw)
    for slots, count in ((8, 300), (8, 1000), (32, 600), (32, 1500), (128, 1500))
    for draw in (lognormal(0.5), lognormal(1.0), lognormal(1.5), capped(1.0))
]


def looks(number: int, kind: Kind, events: Sequence[Event] = (), *, runs: int = 3) -> list[Check]:
    """Return every look at some runs of one kind; `number` is part of their seeds."""
    count, slots, draw = kind
    return [
        check
        for run in range(runs)
        for check in SimulatedRun(count, slots, draw, seed=1000 * number + run, events=events).checks(SHARES)
    ]


def came_true(checks: Sequence[Check]) -> float:
    """Return the share of foretold ranges that hold the true end."""
    told = [check for check in checks if check.eta.seconds is not None]
    held = [(check.eta.low_s or 0.0) <= check.left_s <= (check.eta.high_s or 0.0) for check in told]
    return statistics.mean(held)


def test_the_range_holds_the_true_end_of_steady_runs() -> None:
    """In 90 of 100 looks, over lognormal and capped lengths, few and many slots, short and long runs."""
    checks = [check for number, kind in enumerate(KINDS) for check in looks(number, kind)]
    assert all(check.eta.seconds is not None for check in checks)
    assert came_true(checks) >= 0.9


@pytest.mark.parametrize(
    "event", [Event(0.4, slots=64), Event(0.4, slots=16), Event(0.4, down_s=300)], ids=["more", "fewer", "outage"]
)
def test_the_range_holds_the_true_end_after_a_change(event: Event) -> None:
    """Workers come, workers die, the server is away for five minutes: what is said afterwards still comes true."""
    checks = [
        check
        for number, draw in enumerate((lognormal(0.5), lognormal(1.0), lognormal(1.5), capped(1.0)))
        for check in looks(number, (1000, 32, draw), [event], runs=6)
        if check.done >= event.done
    ]
    assert came_true(checks) >= 0.9


def test_the_point_is_near_the_truth() -> None:
    """After a fifth of a steady run the point is within 15 % of the run's length in nine of ten looks."""
    kinds: list[Kind] = [
        (2000, 8, lognormal(1.0)),
        (2000, 32, lognormal(0.5)),
        (2000, 32, capped(1.5)),
        (4000, 32, lognormal(1.0)),
    ]
    looked = (check for number, kind in enumerate(kinds) for check in looks(number, kind))
    checks = [check for check in looked if check.done >= 0.2]
    errors = sorted(abs((check.eta.seconds or 0.0) - check.left_s) / check.run_s for check in checks)
    assert errors[int(0.9 * len(errors))] <= 0.15
    assert statistics.mean(errors) <= 0.05


def test_what_cannot_be_known_is_null_with_its_reason() -> None:
    """During an outage, and right after one or after a change of workers, there is a reason instead of an ETA."""
    events = [Event(0.3, down_s=100), Event(0.6, slots=16)]
    told = [check.eta for check in looks(1, (400, 8, lognormal(1.0)), events, runs=1)]
    silent = [eta for eta in told if eta.seconds is None]
    reasons = {eta.reason or "" for eta in silent}
    assert any("unreachable" in reason for reason in reasons)
    assert any("went down or came back" in reason for reason in reasons)
    assert any("a worker came or went" in reason for reason in reasons)
    assert all((eta.low_s, eta.high_s, eta.at) == (None, None, None) for eta in silent)
    assert len(silent) == 3, "a few seconds later it is known again"


def test_nothing_is_ever_negative_and_ranges_are_in_order() -> None:
    """0 <= low <= point <= high at every look, however strange the run."""
    kinds: list[Kind] = [
        (20, 32, lognormal(1.5)),
        (5, 2, capped(0.1)),
        (300, 1, lognormal(0.01)),
        (200, 64, lognormal(2.5)),
    ]
    for number, kind in enumerate(kinds):
        for check in looks(number, kind, [Event(0.5, slots=1), Event(0.7, down_s=5)]):
            if check.eta.seconds is not None:
                assert 0 <= (check.eta.low_s or 0) <= check.eta.seconds <= (check.eta.high_s or 0)
            assert check.percent <= 100


def test_short_answers_that_finish_first_do_not_deceive() -> None:
    """Early in a run, 64 slots have finished 20 short answers: those that still run tell that most take longer."""
    early = Load(queued=1000, ages=[30.0] * 64, durations=collect([10.0] * 20))
    naive_s = 1064 * 10.0 / 64
    told = forecast([early])
    assert told is not None
    assert told.low_s > naive_s


def test_loads_that_share_their_slots_end_later_than_each_alone() -> None:
    """Two datasets with half the slots each take as long together as their work, not as the longer of both."""
    first = Load(queued=500, ages=[1.0] * 8, durations=collect([4.0, 5.0, 6.0] * 50))
    second = Load(queued=100, ages=[1.0] * 8, durations=collect([40.0, 50.0, 60.0] * 50))
    both, alone = forecast([first, second]), forecast([second])
    assert both is not None
    assert alone is not None
    assert both.seconds == pytest.approx((500 * 5 + 100 * 50) / 16, rel=0.2)
    assert alone.seconds == pytest.approx(100 * 50 / 8, rel=0.2)


def test_a_window_tells_of_a_server_that_has_slowed_down() -> None:
    """Where lately fewer were settled than durations promise, the point moves there and the range widens."""
    durations = collect([10.0] * 5000)
    as_ever = forecast([Load(10_000, [5.0] * 50, durations, settled=3000, window_s=600)])
    slower = forecast([Load(10_000, [5.0] * 50, durations, settled=1500, window_s=600)])
    assert as_ever is not None
    assert slower is not None
    assert as_ever.seconds == pytest.approx(2000, rel=0.05)
    assert slower.seconds == pytest.approx(4000, rel=0.15)


def test_a_sample_that_never_ends_is_not_promised_soon() -> None:
    """A last sample that has been asked for an hour, where others took ten seconds, may well take another hour."""
    told = forecast([Load(queued=0, ages=[3600.0], durations=collect([10.0] * 1000))])
    assert told is not None
    assert told.high_s > 1800


def test_too_little_is_no_forecast() -> None:
    """Nothing ahead, or fewer than three finished samples, is no ground for one."""
    assert forecast([]) is None
    assert forecast([Load(queued=0, ages=[], durations=collect([1.0] * 9))]) is None
    assert forecast([Load(queued=5, ages=[1.0], durations=Histogram())]) is None
    assert forecast([Load(queued=5, ages=[1.0], durations=collect([1.0, 2.0]))]) is None
