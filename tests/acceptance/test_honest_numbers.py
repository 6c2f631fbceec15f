"""Numbers that a person acts on: what was never read, what an export lacks, what will never come."""

from __future__ import annotations

import pytest

from app.history import rates_between, read_points
from app.places import dataset_folder
from app.records import Kind
from producer.simulator.rules import Rule
from tests.conftest import ModelServerFactory
from tests.support.mill import Mill
from tests.support.processes import wait_until


def test_an_input_that_was_not_read_to_its_end_is_not_complete(mill: Mill, model_server: ModelServerFactory) -> None:
    """After a killed enqueue all that was queued gets done, and yet verify and status tell of the rest."""
    model_server()
    rows = mill.write_rows([f"row {n}" for n in range(20_000)])
    killed = mill.start("enqueue", str(rows), "--dataset", "case")
    wait_until(lambda: mill.recorded(kinds=[Kind.PENDING]) >= 500, 30, "the first rows in samples.jsonl")
    killed.kill()
    told = mill.run("verify", "case", expect=1)
    assert "rows.jsonl was not read to its end" in told.stdout
    assert any("was not read to its end" in note for note in mill.status()["datasets"]["case"]["notes"])

    mill.enqueue(rows, "--limit", "600")
    mill.worker(concurrency=32)
    mill.wait_idle(timeout_s=120)
    assert "was not read to its end" not in mill.run("verify", "case", expect=None).stdout


def test_an_export_tells_what_it_lacks(mill: Mill, model_server: ModelServerFactory) -> None:
    """The export of a dataset that is not finished says how many samples are not in it, and why."""
    model_server([Rule(match="bad", status=400)])
    mill.enqueue(["good", "bad one"])
    mill.worker().wait_ready()
    mill.wait_idle()
    mill.enqueue(["good", "bad one", "late"], "--no-retry-failed", expect=0)
    mill.run("pause", "case")
    told = mill.run("export", "case", "--format", "openai", "--output", str(mill.path / "out.jsonl"))
    lacking = told.stderr.splitlines()[-1]
    assert "samples, these are not in it:" in lacking
    assert "1 failed" in lacking


def test_a_wrong_folder_is_asked_about(mill: Mill, model_server: ModelServerFactory) -> None:
    """Where Redis knows a dataset and the folder does not, status asks whether the folder is the right one."""
    model_server()
    mill.enqueue(["a"])
    mill.worker()
    mill.wait_idle()
    mill.env["MILL_PREPARED_DIR"] = str(mill.path / "elsewhere")
    notes = mill.status()["datasets"]["case"]["notes"]
    assert any("is this the right MILL_PREPARED_DIR?" in note for note in notes)


def test_the_last_bad_samples_are_given_up(mill: Mill, model_server: ModelServerFactory) -> None:
    """Two samples that always fail the server do not excuse each other: a run ends, with both among its failures."""
    model_server([Rule(match="poison one", status=500), Rule(match="poison two", drop="middle")])
    mill.env["MILL_MAX_ATTEMPTS"] = "3"
    mill.enqueue(["poison one", "poison two", *[f"fine {n}" for n in range(10)]])
    mill.worker()
    mill.wait_recorded(12, timeout_s=90)
    counts = mill.counts()
    assert (counts["accepted"], counts["failed"]) == (10, 2)


def test_unreadable_logs_are_one_sentence(mill: Mill) -> None:
    """A log that cannot be read ends the command with its path, not with a traceback."""
    logs = mill.path / "state" / "logs"
    mill.env["MILL_STATE_DIR"] = str(mill.path / "state")
    logs.mkdir(parents=True)
    (logs / "mill1.log").mkdir()
    told = mill.run("logs", expect=1)
    assert "mill1.log" in told.stderr
    assert "Traceback" not in told.stderr


def test_what_is_counted_while_it_runs(mill: Mill, model_server: ModelServerFactory) -> None:
    """Latency, lengths and failed calls are in status with their true values, and a worker's points tell the same."""
    model_server([Rule(match="shaky", times=2, status=500), Rule(match="hopeless", status=400)], latency_s=0.2)
    mill.env.update(MILL_PROGRESS_S="0.5", MILL_BACKOFF_S="0.05")
    mill.enqueue(["shaky", "hopeless", *[f"fine {n}" for n in range(12)]])
    mill.worker(concurrency=2)
    mill.wait_recorded(14, timeout_s=60)
    wait_until(lambda: mill.status()["totals"]["call_faults"], 20, "the failed calls in Redis")
    part = mill.status()["datasets"]["case"]
    assert part["call_faults"] == {"server_error": 2, "bad_request": 1}
    assert part["latency"]["count"] == 13
    assert 0.2 <= part["latency"]["mean_s"] <= part["latency"]["p95_s"] * 1.3 < 2
    assert part["tokens"]["mean"] * 13 == pytest.approx(part["tokens"]["total"], rel=0.01)
    assert part["tokens"]["p95"] is not None
    assert sum(n for _bound, n in part["tokens"]["buckets"]) == 13
    assert part["rates"]["run"]["samples_per_s"] > 0
    assert part["run_started_at"] <= part["first_record_at"] <= part["last_record_at"]

    folder = dataset_folder(mill.prepared, "case")
    wait_until(lambda: any(point.left == 0 for point in read_points(folder)), 20, "the last point")
    points = read_points(folder)
    assert (points[-1].accepted, points[-1].failed, points[-1].failed_by) == (13, 1, {"bad_request": 1})
    assert points[-1].tokens == part["tokens"]["total"]
    assert any(0.1 < (point.latency_p95_s or 0) < 2 for point in points)
    assert sum((pace.samples_per_s or 0) * (pace.at - pace.since) for pace in rates_between(points)) == pytest.approx(
        points[-1].accepted - points[0].accepted
    )
