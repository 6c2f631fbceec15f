"""A dataset that was enqueued with the wrong settings, and what a person does about it."""

from __future__ import annotations

import json

from app.records import Kind
from tests.conftest import ModelServerFactory
from tests.support.jsonl_check import assert_strict
from tests.support.mill import Mill
from tests.support.processes import wait_until


def test_a_missing_model_pauses_its_dataset_alone(mill: Mill, model_server: ModelServerFactory) -> None:
    """A mistyped model costs no sample anything and stops no other dataset; new settings and resume mend it."""
    server = model_server(model="right", latency_s=0.01)
    mill.enqueue([f"wrong {n}" for n in range(30)], "--model", "wrong", dataset="typo")
    mill.worker(concurrency=4)
    wait_until(lambda: mill.status("typo")["datasets"]["typo"]["state"] == "paused", 20, "a paused dataset")
    asked = len(server.requests)
    mill.enqueue(["fine 1", "fine 2"], "--model", "right", dataset="fine")
    mill.wait_recorded(2, "fine")

    status = mill.status("typo")["datasets"]["typo"]
    assert (status["counts"]["samples"], status["counts"]["failed"], status["counts"]["accepted"]) == (30, 0, 0)
    assert any("no model 'wrong'" in note and "right" in note for note in status["notes"])
    assert asked <= 8  # one for each slot, and what came back before the worker stopped reading

    told = mill.enqueue([f"wrong {n}" for n in range(30)], "--model", "right", "--new-settings", dataset="typo")
    assert "already queued 30" in told.stdout
    assert "producer resume typo" in told.stderr
    mill.run("resume", "typo")
    mill.wait_recorded(30, "typo")
    records = assert_strict(mill.out("typo"), count=30).records
    assert {record["model"] for record in records} == {"right"}
    assert {record["attempts"] for record in records} == {1}


def test_new_settings_reach_samples_that_wait(mill: Mill, model_server: ModelServerFactory) -> None:
    """Samples that were queued but not asked yet are asked with the new settings, and their records say so."""
    model_server(latency_s=0.01)
    rows = [f"row {n}" for n in range(20)]
    mill.enqueue(rows, "--max-tokens", "100")
    refused = mill.enqueue(rows, "--max-tokens", "200", expect=2)
    assert "max_tokens: 100 -> 200" in refused.stderr
    mill.enqueue(rows, "--max-tokens", "200", "--new-settings")
    mill.worker()
    mill.wait_recorded(20)
    records = assert_strict(mill.out(), count=20).records
    manifest = json.loads(mill.folder().manifest.read_text(encoding="utf-8"))
    assert {record["sampling"]["max_tokens"] for record in records} == {200}
    assert {record["settings"] for record in records} == {manifest["settings"][-1]["fingerprint"]}


def test_a_worker_that_ends_hands_back_at_once_what_it_has_not_asked(
    mill: Mill, model_server: ModelServerFactory
) -> None:
    """With no server to ask, SIGTERM does not wait for the drain: nothing is running that could finish."""
    model_server().stop()
    mill.enqueue([f"row {n}" for n in range(12)])
    worker = mill.worker(concurrency=4, drain_s=120)
    wait_until(lambda: mill.counts()["in_flight"] == 4, 20, "taken samples")
    assert worker.stop() == 0  # stop() gives up long before 120 s
    counts = mill.counts()
    assert (counts["queued"], counts["in_flight"], counts["missing"]) == (12, 0, 0)
    assert mill.recorded(kinds=list(Kind)) == 12  # samples.jsonl alone


def test_verify_speaks_json(mill: Mill) -> None:
    """`verify --json` is one JSON document that names each dataset and what is not complete."""
    mill.enqueue(["only one"])
    told = mill.run("verify", "--json", expect=1).json()
    assert isinstance(told, dict)
    assert told["case"]["complete"] is False
