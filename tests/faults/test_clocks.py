"""Machines whose clocks are hours apart, and clocks that are set while work runs: leases and numbers do not care."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.places import Keys
from tests.conftest import Broker, ModelServerFactory
from tests.support.aftermath import (
    assert_asked_again_at_most,
    assert_asked_once,
    assert_balanced,
    assert_not_asked_since,
    assert_quiet,
    prompts,
    times_asked,
)
from tests.support.clocks import WrongClock
from tests.support.mill import Mill
from tests.support.processes import wait_until

pytestmark = pytest.mark.fault

_HOURS_S = 5 * 3600.0
_LEASE_S = 8.0


def _assert_deliveries_are_as_young_as_they_look(broker: Broker, count: int) -> None:
    """Assert that so many deliveries are noted, none older than the visibility timeout or from the future."""
    keys = Keys(broker.key_prefix)
    scores = broker.client.zrange(f"{keys.prefix}unacked_index", 0, -1, withscores=True)
    now = float(broker.client.time()[0])
    assert broker.client.hlen(keys.unacked) == len(scores) == count
    assert all(-2 < now - score < _LEASE_S for _tag, score in scores), (now, scores)


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [_HOURS_S, -_HOURS_S], ids=["ahead", "behind"])
def test_a_worker_whose_clock_is_hours_off_steals_and_loses_no_delivery(
    mill: Mill, broker: Broker, model_server: ModelServerFactory, tmp_path: Path, ahead_s: float
) -> None:
    """Beside a worker whose clock is five hours off, requests longer than two leases stay whose they are."""
    server = model_server(latency_s=18.0)
    rows = prompts(8)
    mill.enqueue(rows)
    wrong = WrongClock(tmp_path / "clock", ahead_s=ahead_s)
    workers = [mill.worker(concurrency=4), mill.worker(concurrency=4, extra_env=wrong.env)]
    wait_until(lambda: server.in_flight == 8, 30, "8 requests in flight", detail=mill.tails)

    watched_until = time.monotonic() + 1.5 * _LEASE_S
    while time.monotonic() < watched_until:
        time.sleep(0.5)
        _assert_deliveries_are_as_young_as_they_look(broker, 8)
    mill.wait_recorded(8)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [_HOURS_S, -_HOURS_S], ids=["ahead", "behind"])
def test_the_samples_of_a_dead_worker_come_back_whatever_its_clock_said(
    mill: Mill, model_server: ModelServerFactory, tmp_path: Path, ahead_s: float
) -> None:
    """SIGKILL of a worker whose clock is hours off: its samples are asked again within the lease, and no others."""
    server = model_server(latency_s=2.0)
    rows = prompts(24)
    mill.enqueue(rows)
    wrong = WrongClock(tmp_path / "clock", ahead_s=ahead_s)
    dying, _other = mill.worker(concurrency=4, extra_env=wrong.env), mill.worker(concurrency=4)
    wait_until(lambda: server.in_flight == 8, 30, "8 requests in flight", detail=mill.tails)

    dying.kill()
    survived = times_asked(mill, server)
    mill.wait_recorded(len(rows), timeout_s=24 / 4 * 2 + _LEASE_S + 10)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_not_asked_since(server, survived)
    assert_asked_again_at_most(server, 4)


@pytest.mark.slow
def test_a_clock_that_is_set_while_work_runs_changes_no_number(
    mill: Mill, model_server: ModelServerFactory, tmp_path: Path
) -> None:
    """While a worker's clock jumps five hours on and ten back, rate and ETA stay true and each sample is asked once."""
    server = model_server(latency_s=0.5)
    rows = prompts(200)
    mill.enqueue(rows)
    clock = WrongClock(tmp_path / "clock")
    worker = mill.worker(concurrency=4, extra_env=clock.env)
    for number, ahead_s in enumerate((_HOURS_S, -_HOURS_S), start=1):
        mill.wait_recorded(40 * number)
        clock.set(ahead_s)
        mill.wait_recorded(40 * number + 24)
        part = mill.status()["datasets"]["case"]
        assert part["state"] == "running", part
        assert 2 < part["rates"]["now"]["samples_per_s"] < 10, part
        assert 0 < part["eta"]["seconds"] < 120, part
        assert abs(part["eta"]["at"] - time.time()) < 120, part
        assert 0 <= part["oldest_in_flight_s"] < 10, part
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
    assert worker.stop() == 0
    assert_quiet(worker.output())
