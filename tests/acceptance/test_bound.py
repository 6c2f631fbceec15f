"""The bound on requests in flight, changed while workers run."""

from __future__ import annotations

import time

import pytest

from tests.conftest import ModelServerFactory
from tests.support.books import balanced
from tests.support.mill import Mill
from tests.support.processes import wait_until

_TAKES_HOLD_WITHIN_S = 5
"""Seconds until every worker keeps to a new bound, with room for a busy machine."""


def test_a_bound_takes_hold_while_workers_run(mill: Mill, model_server: ModelServerFactory) -> None:
    """Two workers go up and down with the bound, never above it, and to MILL_MAX_IN_FLIGHT when it is taken back."""
    server = model_server(latency_s=0.4)
    mill.env["MILL_MAX_IN_FLIGHT"] = "4"
    mill.enqueue([f"b {number}" for number in range(600)])
    for _ in range(2):
        mill.worker(concurrency=8)
    wait_until(lambda: server.in_flight == 4, 15, "four requests in flight")
    assert server.peak_in_flight == 4
    mill.env["MILL_MAX_IN_FLIGHT"] = "99"
    told = mill.run("bound")
    assert told.stdout.startswith("At most 4 requests in flight per model server now, over all workers"), "as theirs is"
    assert "(MILL_MAX_IN_FLIGHT of the workers)" in told.stdout

    told = mill.run("bound", "12")
    assert told.stdout.startswith("At most 12 requests in flight per model server from now on, over all workers")
    assert told.stderr == ""
    wait_until(lambda: server.in_flight == 12, _TAKES_HOLD_WITHIN_S, "twelve requests in flight")
    assert server.peak_in_flight == 12
    wait_until(lambda: mill.status()["endpoints"][0]["bound"] == 12, _TAKES_HOLD_WITHIN_S, "the bound in status")

    mill.run("bound", "2")
    wait_until(lambda: server.in_flight <= 2, _TAKES_HOLD_WITHIN_S, "two requests in flight")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert server.in_flight <= 2
    assert "At most 2 requests" in mill.run("bound").stdout

    assert "At most 4 requests" in mill.run("bound", "default").stdout
    wait_until(lambda: server.in_flight == 4, _TAKES_HOLD_WITHIN_S, "four requests in flight again")

    told = mill.run("bound", "17")
    assert "16 slots of 2 workers cannot keep 17 at the model server busy; start more workers" in told.stderr
    server.set_options(latency_s=0.0)
    balanced(mill, accepted=600, failed=0)


@pytest.mark.parametrize("word", ["0", "-1", "many", "1.5", "65537", "²"])
def test_what_is_no_bound_is_refused(mill: Mill, word: str) -> None:
    """A bound that would stop all work, or is no number, changes nothing and is answered in one sentence."""
    told = mill.run("bound", "--", word, expect=2)
    assert told.stderr == f"producer: {word!r} is no bound; give a number of requests from 1 to 65536, or 'default'.\n"
    assert "MILL_MAX_IN_FLIGHT as set here" in mill.run("bound").stdout
