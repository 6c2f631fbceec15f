"""The breaker's promises in figures: few probes, closed everywhere at once, back soon, and no attempt used."""

from __future__ import annotations

import json
import time

import pytest

from producer.simulator.rules import Rule
from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.slow]

_WORKERS = 3
_SLOTS = 6
_PROBE_S = 3
"""Seconds between two probes, which is the default of MILL_PROBE_S."""
_LOOKS = 5
"""Probes that are watched; three workers that do not share them would make them in two thirds of a period."""
_CLOSED_WITHIN_S = 10.0
"""Seconds until no worker sends a request any more: one tick, and much room for a busy machine."""
_BACK_WITHIN_S = 10


def test_a_dead_engine_over_three_workers(mill: Mill, model_server: ModelServerFactory) -> None:
    """All stop, one probe per 3 s is made by all together, work resumes within 10 s, and one attempt is enough."""
    server = model_server(latency_s=0.4)
    mill.env |= {"MILL_MAX_ATTEMPTS": "1", "MILL_PROBE_S": str(_PROBE_S)}
    rows = prompts(400)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=_SLOTS) for _ in range(_WORKERS)]
    mill.wait_recorded(60)

    server.set_options(healthy=False)
    server.set_rules(default=Rule(status=503, message="EngineCore encountered an issue. EngineDeadError"))
    says = "EngineDeadError"
    wait_until(
        lambda: all(says in worker.output() for worker in workers), _CLOSED_WITHIN_S, "all know of a dead engine"
    )
    wait_until(lambda: server.in_flight == 0, 10, "no request in flight")
    asked, looks, since = len(server.requests), server.stats["paths"]["/health"], time.monotonic()
    wait_until(lambda: server.stats["paths"]["/health"] >= looks + _LOOKS, 60, "probes")
    assert len(server.requests) == asked
    # A turn each, one that was taken before, and its delay.
    assert (time.monotonic() - since) / _PROBE_S + 2 >= _LOOKS

    server.set_rules()
    server.set_options(healthy=True)
    done = mill.recorded()
    mill.wait_recorded(done + 1, timeout_s=_BACK_WITHIN_S)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    faults = [fault["fault"] for line in mill.out().read_bytes().splitlines() for fault in json.loads(line)["faults"]]
    assert set(faults) == {"engine_dead"}
    assert len(faults) <= 2 * _WORKERS * _SLOTS
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


def test_a_server_that_is_gone_over_three_workers(mill: Mill, model_server: ModelServerFactory) -> None:
    """A server that breaks every call off and is gone for a while costs no attempt, and work resumes within 10 s."""
    server = model_server(latency_s=0.4)
    mill.env |= {"MILL_MAX_ATTEMPTS": "1", "MILL_PROBE_S": str(_PROBE_S)}
    rows = prompts(300)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=_SLOTS) for _ in range(_WORKERS)]
    mill.wait_recorded(60)

    asked = len(server.requests)
    server.stop()
    wait_until(lambda: any(" is down" in worker.output() for worker in workers), 10, "an outage told of")
    time.sleep(6)
    assert len(server.requests) <= asked + _WORKERS * _SLOTS
    done = mill.recorded()
    server.start()
    mill.wait_recorded(done + 1, timeout_s=_BACK_WITHIN_S)
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    for worker in workers:
        assert worker.stop() == 0
        assert_quiet(worker.output())


@pytest.mark.parametrize(
    ("status", "words"),
    [(503, "The engine is currently busy."), (503, "The request queue is full."), (429, "Too many requests")],
)
def test_a_busy_server_is_slowed_down_for_and_never_down(
    mill: Mill, model_server: ModelServerFactory, status: int, words: str
) -> None:
    """Refusals for load lower what is in flight, cost no attempt, and close nothing."""
    server = model_server(latency_s=0.3)
    mill.env["MILL_MAX_ATTEMPTS"] = "1"
    rows = prompts(120)
    mill.enqueue(rows)
    workers = [mill.worker(concurrency=_SLOTS) for _ in range(2)]
    mill.wait_recorded(24)
    busy = Rule(status=status, message=words)
    server.set_rules(default=busy)
    refused = len(server.requests)
    wait_until(lambda: len(server.requests) >= refused + 12, 20, "refused requests")
    assert mill.status()["endpoints"][0]["state"] == "up"
    server.set_rules()
    mill.wait_recorded(len(rows))
    mill.wait_idle()

    assert_balanced(mill, rows)
    faults = [fault["fault"] for line in mill.out().read_bytes().splitlines() for fault in json.loads(line)["faults"]]
    assert set(faults) == {"overloaded"}
    for worker in workers:
        assert " is down" not in worker.output()
