"""What is told of model servers: their load by their own account, their latency, and how they are, in words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from app import broker as app_broker
from app.places import Keys, endpoint_name
from app.queue import Queue
from app.snapshot import HUNG, Endpoint
from app.surroundings import describe, find_obstacle, read_endpoints
from tests.conftest import Broker

URL = "http://127.0.0.1:8001"
NAME = endpoint_name(URL)


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return a work list in which workers have told of one server."""
    client = app_broker.connect(app_broker.parse(broker.url))
    made = Queue(client, Keys(broker.key_prefix))
    client.sadd(made.keys.endpoints, NAME)
    client.hset(made.keys.endpoint(NAME), items=["url", URL, "state", "up", "since", "1", "reason", "ok"])
    yield made
    client.close()


def _beat(in_flight: int, latency_s: float | None) -> dict[str, Any]:
    told = {"in_flight": {NAME: in_flight}, "held": {NAME: in_flight}, "bound": {NAME: 8}}
    return {**told, "latency_s": {NAME: latency_s}}


def test_load_and_latency_are_told(queue: Queue) -> None:
    """The gauges come as numbers with their time, and the latency is the mean over workers by their calls."""
    queue.client.hset(
        queue.keys.endpoint(NAME), "gauges", '{"running":3,"waiting":1,"at":5.5,"kv":0.25,"idle_s":0,"peak":9}'
    )
    (endpoint,) = read_endpoints(queue, [_beat(3, 2.0), _beat(1, 6.0), _beat(4, None)])
    assert endpoint.gauges == {"running": 3, "waiting": 1, "kv": 0.25, "at": 5.5}
    assert endpoint.latency_s == 3.0
    assert (endpoint.in_flight, endpoint.bound) == (8, 8)


def test_what_nobody_knows_is_null(queue: Queue) -> None:
    """A server without metrics has no gauges, and one that has answered nothing yet no latency."""
    (endpoint,) = read_endpoints(queue, [_beat(1, None), {"in_flight": None}])
    assert (endpoint.gauges, endpoint.latency_s) == (None, None)


def test_gauges_of_another_version_are_passed_over(queue: Queue) -> None:
    """What cannot be understood is no reason to show nothing."""
    queue.client.hset(queue.keys.endpoint(NAME), "gauges", '["what is this"]')
    (endpoint,) = read_endpoints(queue, [_beat(1, None)])
    assert endpoint.gauges is None


def test_a_hung_server_is_called_so() -> None:
    """A server that takes requests and answers nothing is not called unreachable."""
    endpoint = Endpoint(name=NAME, url=URL, state="down", since=time.time(), reason=f"{HUNG}no answer for 90 s")
    said = find_obstacle([{"state": "running"}], [endpoint], now=time.time())
    assert said == describe(endpoint, now=time.time())
    assert said.startswith("the model server hangs since ")
    assert said.endswith(f": {URL} (no answer for 90 s)")
