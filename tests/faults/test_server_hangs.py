"""Servers that take requests and answer nothing, or forget some: found long before the timeout, and nothing fails."""

from __future__ import annotations

import json
import time

import pytest

from tests.conftest import ModelServerFactory
from tests.support.aftermath import assert_asked_once, assert_balanced, assert_quiet, prompts
from tests.support.mill import Mill
from tests.support.processes import wait_until
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]

_SLOTS = 8
_FOUND_WITHIN_S = 60
"""Seconds until a server that answers nothing is known to hang: 20 of patience, two looks of 15, and room."""
_SEEN_THROUGH_WITHIN_S = 240
"""The same for one that passes its health check: 120 at least, up to a minute between looks, 30 for a trial."""
_LOST_WITHIN_S = 75
"""Seconds until requests that a server has forgotten are asked again: 30 of idleness seen every 10, and room."""
_BACK_WITHIN_S = 10


def _faults(mill: Mill) -> list[str]:
    """Return the kinds of the failed calls that accepted records tell of."""
    lines = mill.out().read_bytes().splitlines()
    return [fault["fault"] for line in lines for fault in json.loads(line)["faults"]]


def _status_text(mill: Mill) -> str:
    return " ".join(mill.run("status", expect=None).stdout.split())


def test_a_hung_server_is_found_and_its_late_answers_are_kept(mill: Mill) -> None:
    """A server that stands still is told as hung within minutes; when it goes on, each request was sent once."""
    rows = prompts(120)
    # A server that goes on may first close connections that it takes for idle ones, with requests unread in them.
    mill.env["MILL_MAX_ATTEMPTS"] = "2"
    with ServerProcess(mill.logs, latency_s=0.5) as server:
        mill.env["MILL_MODEL_URLS"] = server.url
        mill.enqueue(rows)
        worker = mill.worker(concurrency=_SLOTS)
        mill.wait_recorded(24)
        server.process.pause()
        wait_until(lambda: "the model server hangs since" in _status_text(mill).lower(), _FOUND_WITHIN_S, "a hang told")
        assert "is down: hung: no answer to anything for" in worker.output()
        done = mill.recorded()
        server.process.resume()
        mill.wait_recorded(done + 1, timeout_s=_BACK_WITHIN_S)
        mill.wait_recorded(len(rows))
        mill.wait_idle()
        asked = {text: n for text, n in server.counts().items() if text != "Hi"}
        assert set(asked.values()) == {1}
        assert worker.stop() == 0
    assert_balanced(mill, rows)
    assert_quiet(worker.output())


def test_a_server_that_is_well_in_appearance_only(mill: Mill, model_server: ModelServerFactory) -> None:
    """One that passes health checks and answers no request is seen through, and what it lost is asked again."""
    server = model_server(latency_s=0.2, metrics=False)
    mill.env["MILL_MAX_ATTEMPTS"] = "1"
    rows = prompts(120)
    mill.enqueue(rows)
    worker = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(24)
    server.set_options(hangs="generation")
    worker.wait_for_output("passes its health check", _SEEN_THROUGH_WITHIN_S)
    assert "the model server hangs since" in _status_text(mill).lower()

    done = mill.recorded()
    server.set_options(hangs=None)
    worker.wait_for_output("is up: ok", _BACK_WITHIN_S)
    mill.wait_recorded(len(rows), timeout_s=220)  # those that hung have their time, and all slots hold some
    mill.wait_idle()

    assert done < len(rows)
    assert_balanced(mill, rows)
    assert _faults(mill) == ["lost"] * _SLOTS
    assert f"lost {_SLOTS} of {_SLOTS} requests" in worker.output()
    assert server.peak_in_flight <= _SLOTS + 1


def test_requests_that_an_idle_server_forgot_are_asked_again(mill: Mill, model_server: ModelServerFactory) -> None:
    """When /metrics says that nothing runs, the requests that wait are sent again at once, and no others."""
    forgotten = [f"forget me {number}" for number in range(3)]
    slow = [{"match": f"slow {number}", "delay_s": 12} for number in range(2)]
    server = model_server([{"match": "forget me", "times": 3, "forget": True}, *slow])
    mill.env["MILL_MAX_ATTEMPTS"] = "1"
    rows = [*forgotten, "slow 0", "slow 1", *prompts(20)]
    mill.enqueue(rows)
    worker = mill.worker(concurrency=_SLOTS)
    mill.wait_recorded(22, timeout_s=40)
    began = time.monotonic()
    mill.wait_recorded(len(rows), timeout_s=_LOST_WITHIN_S)
    mill.wait_idle()

    assert_balanced(mill, rows)
    assert time.monotonic() - began > 10
    assert "lost 3 of 3 requests (its /metrics shows no request at all" in worker.output()
    assert _faults(mill) == ["lost"] * 3
    assert [server.count(text) for text in forgotten] == [2, 2, 2]
    assert_asked_once(server, [row for row in rows if row not in forgotten])
    (endpoint,) = mill.status()["endpoints"]
    assert endpoint["gauges"]["running"] == 0
    assert endpoint["latency_s"] > 0
