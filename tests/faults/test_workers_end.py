"""Workers that are killed, stopped, interrupted and frozen: running requests end or go back."""

from __future__ import annotations

import signal
import time

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
from tests.support.mill import Mill
from tests.support.processes import WorkerProcess, wait_until

pytestmark = pytest.mark.fault

_LEASE_S = 8
_NOISE_S = 8
"""Seconds that a busy machine may add to any bound here."""


def _left_in_redis(broker: Broker) -> tuple[int, int, int]:
    """Return how many tickets are queued, delivered and not acked, and samples noted as being asked."""
    keys, client = Keys(broker.key_prefix), broker.client
    return int(client.llen(keys.queue("case"))), int(client.hlen(keys.unacked)), int(client.hlen(keys.flights("case")))


def _stop_within(worker: WorkerProcess, timeout_s: float, *signals: tuple[signal.Signals, bool]) -> None:
    """Send signals (to the whole group where told so), half a second apart, and assert an orderly end."""
    for number, whole_group in signals:
        (worker.send_group_signal if whole_group else worker.send_signal)(number)
        time.sleep(0.5)
    assert worker.wait(timeout_s) == 0, worker.tail()
    assert_quiet(worker.output())


@pytest.mark.slow
def test_the_samples_of_a_killed_worker_are_asked_again_by_the_other(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """SIGKILL of one of two workers with 8 in flight: its samples, and no others, are asked again within the lease."""
    server = model_server(latency_s=2.0)
    rows = prompts(48)
    first, _second = mill.worker(concurrency=8), mill.worker(concurrency=8)
    mill.enqueue(rows)
    wait_until(lambda: server.in_flight == 16, 30, "16 requests in flight", detail=mill.tails)

    first.kill()
    killed_at = time.time()
    survived = times_asked(mill, server)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_not_asked_since(server, survived)
    assert_asked_again_at_most(server, 8)
    first_asked = dict[str, float]()
    for request in server.requests:
        first_asked.setdefault(request.key, request.at)
    repeats = [request.at for request in server.requests if request.at > first_asked[request.key]]
    assert repeats
    assert max(repeats) - killed_at < _LEASE_S + _NOISE_S


def test_sigterm_lets_running_requests_finish_and_leaves_the_rest(
    mill: Mill, broker: Broker, model_server: ModelServerFactory
) -> None:
    """After SIGTERM what runs is finished and recorded, the rest is on the queue at once, and the exit code is 0."""
    server = model_server(latency_s=2.0)
    rows = prompts(30)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=8)
    wait_until(lambda: server.in_flight == 8, 30, "8 requests in flight", detail=mill.tails)

    _stop_within(worker, 15, (signal.SIGTERM, False))

    done = mill.recorded()
    assert 8 <= done == sum(server.counts.values())
    assert server.aborted == 0
    assert _left_in_redis(broker) == (len(rows) - done, 0, 0)
    mill.worker(concurrency=16)
    mill.wait_recorded(len(rows))
    mill.wait_idle()
    assert_balanced(mill, rows)
    assert_asked_once(server, rows)


@pytest.mark.parametrize(
    ("drain_s", "signals"),
    [
        (1.0, [(signal.SIGTERM, False)]),
        (600.0, [(signal.SIGTERM, False), (signal.SIGTERM, False)]),
        (600.0, [(signal.SIGTERM, True), (signal.SIGTERM, True)]),
        (600.0, [(signal.SIGINT, True), (signal.SIGINT, True)]),
        (600.0, [(signal.SIGQUIT, False)]),
    ],
    ids=["drain-over", "sigterm-twice", "sigterm-twice-to-the-group", "ctrl-c-twice", "sigquit"],
)
def test_requests_that_may_not_finish_are_handed_back_at_once(
    mill: Mill,
    broker: Broker,
    model_server: ModelServerFactory,
    drain_s: float,
    signals: list[tuple[signal.Signals, bool]],
) -> None:
    """When the drain is over, or a second signal comes, a worker ends within seconds and every ticket is queued."""
    server = model_server(latency_s=600.0)
    rows = prompts(10)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=4, drain_s=drain_s)
    wait_until(lambda: server.in_flight == 4, 30, "4 requests in flight", detail=mill.tails)

    _stop_within(worker, 4 + _NOISE_S, *signals)

    assert _left_in_redis(broker) == (len(rows), 0, 0)
    wait_until(lambda: server.aborted == 4, 10, "4 requests given up")
    server.set_options(latency_s=0.1)
    mill.worker(concurrency=4)
    mill.wait_recorded(len(rows), timeout_s=4 + _NOISE_S)
    assert_balanced(mill, rows)
    assert_asked_again_at_most(server, 4)


@pytest.mark.slow
def test_a_frozen_worker_that_wakes_up_writes_no_second_line(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker stopped for longer than its lease loses its samples to another, and adds nothing when it goes on."""
    server = model_server(latency_s=3.0)
    rows = prompts(8)
    mill.enqueue(rows)
    frozen = mill.worker(concurrency=4)
    wait_until(lambda: server.in_flight == 4, 30, "4 requests in flight", detail=mill.tails)
    frozen.pause()
    other = mill.worker(concurrency=8)
    mill.wait_recorded(len(rows))

    frozen.resume()
    wait_until(lambda: mill.status()["workers"][1:], 15, "both workers' heartbeats", detail=mill.tails)
    mill.wait_idle()

    assert frozen.stop() == 0
    assert other.stop() == 0
    assert_balanced(mill, rows)
    assert_asked_again_at_most(server, 4)
    assert_quiet(frozen.output())
    assert_quiet(other.output())


def test_a_lost_ticket_comes_back_through_the_sweep(
    mill: Mill, broker: Broker, model_server: ModelServerFactory
) -> None:
    """Tickets that vanish from the queue are noticed and queued again while workers run, and asked once."""
    server = model_server()
    rows = prompts(12)
    mill.enqueue(rows)
    queue = Keys(broker.key_prefix).queue("case")
    assert broker.client.lpop(queue, 3)

    assert mill.run("verify", "case", expect=1).stdout.count("without a ticket") == 1
    mill.worker(concurrency=4)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert_asked_once(server, rows)
