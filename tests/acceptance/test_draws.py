"""Sampling settings that are distributions: each sample is asked with its own draw, whoever asks it and whenever."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from app import draws
from tests.conftest import ModelServerFactory
from tests.support.books import balanced, records
from tests.support.mill import Mill

TEMPERATURE, EFFORT = "0.6..1.0", "low:1,medium:2,high:1"
OPTIONS = ("--temperature", TEMPERATURE, "--top-p", "0.8:1,1.0:3", "--reasoning-effort", EFFORT, "--seed", "42")
NAMES = ("temperature", "top_p", "reasoning_effort")


def drawn(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record's sample must have been asked with."""
    given = dict(zip(NAMES, (TEMPERATURE, "0.8:1,1.0:3", EFFORT), strict=True))
    return {name: draws.draw(name, value, 42, record["id"]) for name, value in given.items()}


def test_each_sample_is_asked_with_its_own_draw(mill: Mill, model_server: ModelServerFactory) -> None:
    """Requests and records hold the drawn values, copies draw apart, and a kill with a resume changes no draw."""
    server = model_server([{"match": "slow", "delay_s": 3, "times": 8}])
    rows = [f"{'slow' if number % 3 == 0 else 'quick'} {number}" for number in range(12)]
    mill.enqueue(rows, "--samples-per-prompt", "2", *OPTIONS)
    worker = mill.worker(concurrency=10)
    mill.wait_recorded(16)
    worker.kill()
    assert "already recorded 16" in mill.enqueue(rows[::-1], "--samples-per-prompt", "2", *OPTIONS).stdout
    mill.worker(concurrency=4)
    balanced(mill, accepted=24)
    written = records(mill)
    for record in written:
        assert {name: record["sampling"][name] for name in NAMES} == drawn(record), record["id"]
    assert len({record["sampling"]["temperature"] for record in written}) == 24
    assert {record["sampling"]["reasoning_effort"] for record in written} == {"low", "medium", "high"}
    sent = Counter((request.key, *(request.body[name] for name in NAMES)) for request in server.requests)
    kept = {(record["messages"][-1]["content"], *drawn(record).values()) for record in written}
    assert set(sent) == kept, "a sample that was asked again was asked with the same draw"
    assert sum(sent.values()) == 32


def test_a_distribution_is_a_setting_like_others(mill: Mill, model_server: ModelServerFactory) -> None:
    """The manifest holds the distribution, another one is refused by name, and the same in other words is not."""
    model_server()
    mill.enqueue(["one"], "--temperature", "0.6 .. 1", "--seed", "1")
    mill.worker()
    balanced(mill, accepted=1)
    content = json.loads(mill.folder().manifest.read_text())["settings"][0]["content"]
    assert content["temperature"] == "0.6..1.0"
    assert "queued 0" in mill.enqueue(["one"], "--temperature", "0.60..1.0", "--seed", "1").stdout
    told = mill.enqueue(["one"], "--temperature", "0.6", "--seed", "1", expect=2)
    assert 'temperature: "0.6..1.0" -> 0.6' in told.stderr
    for command in (("status",), ("report", "case", "--output", str(mill.path / "report.html")), ("retry", "case")):
        mill.run(*command)


def test_a_mistake_is_told_before_anything_is_made(mill: Mill) -> None:
    """A distribution that cannot be used is one sentence with the option's name and exit code 2."""
    told = mill.enqueue(["one"], "--top-p", "0.5..1.5", expect=2)
    assert told.stderr == (
        "producer: --top-p cannot be used: 1.5 (in 0.5..1.5) is out of bounds: it must be above 0 and at most 1.\n"
    )
    assert not mill.prepared.exists()
