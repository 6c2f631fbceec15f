"""Model servers that go, come back, refuse everybody or take very long: the run waits, says so, and loses nothing."""

from __future__ import annotations

import time

import pytest

from app.records import Kind
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, by_source_id, records
from tests.support.mill import Mill
from tests.support.processes import wait_until

KEY = "sk-not-to-be-seen-4711"


def test_a_server_that_goes_and_comes_back(mill: Mill, model_server: ModelServerFactory) -> None:
    """While the server is gone status names it and its time, no sample fails, and the run goes on by itself."""
    server = model_server(latency_s=0.1)
    mill.enqueue([f"k {number}" for number in range(60)])
    worker = mill.worker(concurrency=8)
    mill.wait_recorded(20)
    server.stop()
    part = wait_until(
        lambda: next((one for one in [mill.status()] if one["datasets"]["case"]["state"] == "stalled"), None),
        20,
        "the outage in status",
    )
    assert part["datasets"]["case"]["eta"]["seconds"] is None
    assert part["datasets"]["case"]["stalled_since"] == part["endpoints"][0]["since"]
    told = mill.run("status", expect=1).stdout
    assert "is unreachable since" in told
    assert "ETA unknown" in told
    at_the_gap = worker.output().count("is down")
    server.start()
    began = time.monotonic()
    recorded = mill.recorded()
    mill.wait_recorded(recorded + 1, timeout_s=10)
    assert time.monotonic() - began < 10
    balanced(mill, accepted=60, failed=0)
    assert server.peak_in_flight <= 8
    assert at_the_gap == worker.output().count("is down") == 1, "told once, not once a probe"


def test_no_server_at_the_start(mill: Mill, model_server: ModelServerFactory) -> None:
    """A worker that starts before its server waits for it, and nothing fails meanwhile."""
    server = model_server()
    server.stop()
    mill.enqueue(["one", "two", "three"])
    worker = mill.worker()
    assert "is down" in worker.output()
    mill.run("status", expect=1)
    server.start()
    balanced(mill, accepted=3, failed=0)


def test_one_bad_request_and_a_wrong_key(mill: Mill, model_server: ModelServerFactory) -> None:
    """One refused prompt fails alone after one request; a wrong key pauses the run, fails nothing, is never shown."""
    server = model_server([{"match": "only me", "status": 400, "message": "cannot do that"}], api_key=KEY)
    mill.env["MILL_API_KEY"] = KEY
    mill.enqueue([f"t {number}" for number in range(20)] + ["only me"], dataset="good")
    worker = mill.worker()
    balanced(mill, "good", accepted=20, failed=1)
    assert server.count("only me") == 1
    (record,) = by_source_id(mill, "good", Kind.FAILED).values()
    assert "cannot do that" in record["error"]
    worker.stop()
    mill.env["MILL_API_KEY"] = wrong = KEY[::-1]
    asked = len(server.requests)
    mill.enqueue([f"u {number}" for number in range(20)])
    worker = mill.worker(concurrency=4)
    worker.wait_for_output("HTTP 401")
    told = mill.run("status", "case", expect=1).stdout
    assert "stalled" in told
    assert "HTTP 401" in told
    assert len(server.requests) - asked <= 4
    balanced(mill, failed=0, left=20)
    assert worker.stop() == 0
    mill.env["MILL_API_KEY"] = KEY
    mill.worker()
    balanced(mill, accepted=20)
    for path in [*mill.path.rglob("*.log"), *mill.path.rglob("*.json*")]:
        text = path.read_text(errors="replace")
        assert KEY not in text, path
        assert wrong not in text, path


@pytest.mark.slow
def test_a_server_that_has_no_such_model_or_path(mill: Mill, model_server: ModelServerFactory) -> None:
    """A wrong model name holds its dataset, a wrong path the server: neither costs a sample, and both go on later."""
    server = model_server([{"match": "path", "status": 404, "message": "Not Found"}])
    names, paths = ([f"{word} {number}" for number in range(20)] for word in ("name", "path"))
    mill.enqueue(names, "--model", "no-such-model", dataset="name")
    first = mill.worker(concurrency=4)
    first.wait_for_output("dataset name is paused")
    assert "no-such-model" in mill.run("status", "name").stdout
    mill.enqueue(paths, dataset="path")
    first.wait_for_output("HTTP 404: Not Found")
    assert "stalled" in mill.run("status", "path", expect=1).stdout
    assert len(server.requests) <= 8, "no more than its slots, for either"
    balanced(mill, "name", failed=0, left=20)
    balanced(mill, "path", failed=0, left=20)
    assert first.stop() == 0

    server.set_rules()
    mill.worker()
    balanced(mill, "path", accepted=20)
    mill.enqueue(names, "--model", "toy-model", "--new-settings", dataset="name")
    mill.run("resume", "name")
    balanced(mill, "name", accepted=20)
    assert all(record["attempts"] == 1 for record in records(mill, "name"))


@pytest.mark.slow
def test_an_answer_that_outlasts_its_lease(mill: Mill, model_server: ModelServerFactory) -> None:
    """An answer that takes twice the lease is asked for once, and nobody waits behind it."""
    server = model_server([{"match": "very slow", "delay_s": 11}])
    mill.env["MILL_LEASE_S"] = "5"
    mill.enqueue(["very slow", *(f"quick {number}" for number in range(30))])
    mill.worker(concurrency=2)
    mill.worker(concurrency=2)
    mill.wait_recorded(30, timeout_s=8)
    assert server.in_flight == 1
    balanced(mill, accepted=31)
    assert server.count("very slow") == 1


@pytest.mark.slow
def test_a_prompt_that_a_gateway_alone_refuses(mill: Mill, model_server: ModelServerFactory) -> None:
    """A prompt that is refused as if the key were wrong, while others are answered, fails by itself; the run ends."""
    server = model_server([{"match": "forbidden", "status": 403, "message": "Blocked by policy 7."}], latency_s=0.1)
    mill.env |= {"MILL_MAX_ATTEMPTS": "2", "MILL_BACKOFF_S": "0.2"}
    mill.enqueue([*(f"f {number}" for number in range(40)), "forbidden", *(f"g {number}" for number in range(160))])
    mill.worker(concurrency=4)
    mill.wait_recorded(201)
    balanced(mill, accepted=200, failed=1)
    assert [record["reason"] for record in by_source_id(mill, kind=Kind.FAILED).values()] == ["unauthorized"]
    assert server.counts["forbidden"] <= 4
