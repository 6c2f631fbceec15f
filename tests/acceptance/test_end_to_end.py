"""The main job: workers die and join in the middle of a run, and every sample is recorded exactly once."""

from __future__ import annotations

import pytest

from tests.conftest import ModelServerFactory
from tests.support.books import assert_progress_files, balanced, records
from tests.support.mill import Mill


@pytest.mark.parametrize(
    ("prompts", "slots", "latency_s"),
    [(300, 8, 0.2), pytest.param(2000, 32, 0.5, marks=pytest.mark.slow)],
)
def test_a_worker_dies_and_another_joins(
    mill: Mill, model_server: ModelServerFactory, prompts: int, slots: int, latency_s: float
) -> None:
    """With one of two workers killed and a third added every sample is there once, for few requests more."""
    server = model_server(latency_s=latency_s, latency_sigma=0.5)
    rows = [{"id": f"p{number}", "prompt": f"Prompt number {number}"} for number in range(prompts)]
    mill.enqueue(rows, preflight=True)
    first = mill.worker(concurrency=slots, name="first")
    mill.worker(concurrency=slots, name="second")
    mill.wait_recorded(prompts // 4)
    first.kill()
    mill.worker(concurrency=slots, name="third")
    mill.wait_recorded(prompts, timeout_s=150)
    balanced(mill, read=prompts, accepted=prompts, failed=0, missing=0)
    assert "complete" in mill.run("verify").stdout
    assert prompts <= len(server.requests) <= prompts + slots
    assert {record["source"]["id"] for record in records(mill)} == {row["id"] for row in rows}
    assert all(record["content"] == f"echo: {record['messages'][0]['content']}" for record in records(mill))
    assert_progress_files(mill)
    assert "100.0 %" in mill.run("status").stdout


def test_datasets_take_turns(mill: Mill, model_server: ModelServerFactory) -> None:
    """A small dataset that comes after a large one does not wait for its end."""
    server = model_server(latency_s=0.05)
    mill.enqueue([f"large {number}" for number in range(200)], dataset="large")
    mill.enqueue([f"small {number}" for number in range(10)], dataset="small")
    mill.enqueue([f"third {number}" for number in range(10)], dataset="third")
    mill.worker(concurrency=4)
    for name, count in (("small", 10), ("third", 10), ("large", 200)):
        mill.wait_recorded(count, name)
    order = [request.key.split()[0] for request in server.requests]
    for name in ("small", "third"):
        last = max(place for place, word in enumerate(order) if word == name)
        assert last < 60, f"{name} ended after {last} requests"
    mill.wait_idle("large")
    totals = mill.status()["totals"]
    assert (totals["counts"]["accepted"], totals["state"]) == (220, "done")
    mill.run("verify")
