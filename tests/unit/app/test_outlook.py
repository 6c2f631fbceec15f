"""What is said instead of an ETA, and what a forecast is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.histogram import collect
from app.outlook import Ahead, Scene, eta_of, quiet_since
from app.snapshot import Counts, State
from app.surroundings import clock_time
from app.tally import Counted, Run, Stats

NOW = 1_700_000_000.0
WORKER = {"owner": "w1", "state": "running", "slots": 8, "busy": 8, "in_flight": {"e": 8}}
RUNNING = Scene(now=NOW, workers=[WORKER])


def ahead(*, queued: int = 800, ages: list[float] | None = None, state: State = State.RUNNING, **run: Any) -> Ahead:
    """Return a dataset that has settled 4 samples a second with 8 slots, up to now, in answers of 2 s."""
    ages = [1.0] * 8 if ages is None else ages
    counts = Counts(samples=10_000, left=queued + len(ages), queued=queued, in_flight=len(ages))
    seconds = {int(NOW) - second: {"accepted": 4} for second in range(1, 601)}
    stats = Stats(accepted=2400, latency=collect([2.0] * 2400))
    return Ahead(counts, state, Counted(seconds, stats, Run(**{"began": NOW - 600, **run})), ages)


def test_it_is_foretold_in_quiet_water() -> None:
    """800 samples at 4 a second are done in 200 seconds."""
    eta = eta_of([ahead()], RUNNING)
    assert eta.seconds == pytest.approx(202, rel=0.05)
    assert eta.reason is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workers_changed_at": NOW - 2}, "a worker came or went 2 s ago"),
        ({"server_changed_at": NOW - 1}, "a model server went down or came back 1 s ago"),
        ({"workers": []}, "no worker is running"),
        ({"workers": [{**WORKER, "state": "draining"}]}, "every worker is ending"),
        ({"obstacle": "the model server is unreachable"}, "the model server is unreachable"),
    ],
)
def test_what_has_just_changed_is_said(change: dict[str, Any], words: str) -> None:
    """Right after a change, and while something is in the way, nobody knows, and the reason says why."""
    eta = eta_of([ahead()], dataclasses.replace(RUNNING, **change))
    assert (eta.seconds, eta.reason) == (None, words)


def test_a_resume_is_said_for_a_moment() -> None:
    """Three seconds after a resume the forecast is back, and the pause does not count."""
    assert eta_of([ahead(resumed=NOW - 1, paused_s=500.0)], RUNNING).reason == "it was resumed 1 s ago"
    back = eta_of([ahead(resumed=NOW - 5, paused_s=500.0)], RUNNING)
    assert back.seconds == pytest.approx(202, rel=0.1)


def test_a_run_in_which_nothing_moves_stalls() -> None:
    """Workers and servers look well, answers take 2 s, and none has come for ten minutes: no growing ETA."""
    stuck, scene = ahead(ages=[600.0] * 8), dataclasses.replace(RUNNING, now=NOW + 600)
    last = float(int(NOW) - 1)
    assert quiet_since(stuck, scene) == last
    eta = eta_of([stuck], scene)
    assert eta.reason == f"stalled: no sample has finished since {clock_time(last, now=NOW + 600)}"
    assert quiet_since(ahead(), RUNNING) is None
    forgotten = dataclasses.replace(stuck.counted, seconds={})
    long_ago = dataclasses.replace(stuck, counted=forgotten, last_record_at=last - 2000)
    assert quiet_since(long_ago, scene) == last - 2000, "after 15 minutes the files alone know when it was"


def test_one_that_moves_is_enough() -> None:
    """Of two datasets one stalls: together they have an ETA."""
    moving = ahead()
    seconds = {second: amounts for second, amounts in moving.counted.seconds.items() if second < NOW - 300}
    stuck = dataclasses.replace(moving, counted=dataclasses.replace(moving.counted, seconds=seconds))
    assert quiet_since(stuck, RUNNING) is not None
    assert eta_of([moving, stuck], RUNNING).seconds is not None


def test_a_dataset_without_an_answer_holds_the_sum_back() -> None:
    """How long its samples take nobody knows."""
    new = dataclasses.replace(ahead(), counted=Counted(run=Run(began=NOW - 5)))
    assert eta_of([new], RUNNING).reason == "no finished sample yet in this run"
    assert eta_of([ahead(), new], RUNNING).reason == "one of the datasets has no finished sample yet in this run"


def test_samples_that_wait_for_a_permit_are_queued() -> None:
    """32 taken by workers and 8 answered at a time take as long as 24 more in the queue."""
    crowded = dataclasses.replace(RUNNING, workers=[{**WORKER, "slots": 32, "busy": 32}])
    held = eta_of([ahead(queued=800, ages=[4.0] * 32)], crowded)
    queued = eta_of([ahead(queued=824, ages=[1.0] * 8)], RUNNING)
    assert held.seconds is not None
    assert held.seconds == pytest.approx(queued.seconds, rel=0.02)


def test_an_outage_does_not_age_the_samples() -> None:
    """After an hour without a server its samples are asked anew: they are not an hour old."""
    old = ahead(ages=[3600.0] * 8)
    scene = dataclasses.replace(RUNNING, server_changed_at=NOW - 10, server_up_since=NOW - 10)
    eta = eta_of([old], scene)
    assert eta.seconds == pytest.approx(202, rel=0.1)
    assert eta.high_s is not None
    assert eta.high_s < 300
