"""A rehearsal's figures follow from what was measured and assumed, and what it will open and run is the user's own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.settings import GenerationSettings, QueueSettings, WorkerSettings
from producer.rehearsal import text
from producer.rehearsal.findings import Limit, Measured, find
from producer.rehearsal.looks import Look, Stretch, steady
from producer.rehearsal.plan import Plan, check_keep, opened_from_anywhere
from producer.simulator.realistic import Traits


def plan(**changes: Any) -> Plan:
    """Return a plan of 1,000 rows at ten times the speed."""
    traits = Traits(mean_tokens=200, tokens_per_second=50, server_tokens_per_second=1000, first_token_s=1, speedup=10)
    usual = Plan(
        source="data/my prompts.jsonl",
        opened="/data/my prompts.jsonl",
        reading=("--columns", "prompt=question"),
        limit=100,
        rows=1000,
        generation=GenerationSettings(max_tokens=300, temperature="0.6..1.0", stop=("a", "b")),
        worker=WorkerSettings(),
        request_timeout_s=600,
        queue=QueueSettings(max_pending=500, max_row_mb=2),
        max_in_flight=40,
        workers=3,
        traits=traits,
        keep=None,
    )
    return dataclasses.replace(usual, **changes)


def measured(**changes: Any) -> Measured:
    """Return what was seen: 80 samples of 100 rows, 75 answers of 100 or 300 tokens, 20,000 tokens made in all."""
    usual = Measured(
        read=100,
        refused=20,
        outcomes={"accepted": 70, "rejected": 5, "failed": 5},
        reasons={"rejected: truncated": 5, "failed: server_error": 5},
        tokens=[100] * 50 + [300] * 25,
        latencies_s=[0.5] * 50 + [2.0] * 25,
        generated=25_000.0,
        run_s=4.0,
        tail_s=1.5,
        stretch=Stretch(seconds=2.0, in_flight=39.6, tokens_per_s=9_800.0),
        steady=True,
        worker_cpu_s=0.8,
        worker_peak_bytes=123_000_000,
        redis_bytes=160_000,
        disk_bytes=400_000,
    )
    return dataclasses.replace(usual, **changes)


def test_the_figures() -> None:
    """Tokens that reached nobody count as work of the server and not as output; all times are simulated ones."""
    found = find(plan(), measured())
    assert found.answers is not None
    assert (found.answers.mean_tokens, found.answers.median_tokens, found.answers.longest_tokens) == (
        12_500 / 75,
        100,
        300,
    )
    assert (found.answers.mean_latency_s, found.answers.longest_latency_s) == (10.0, 20.0)
    # Half of the 25,000 tokens were of answers that were recorded; a sample has 12,500 / 80 of them.
    assert found.rate.real_output_tokens_per_s == pytest.approx(4_900)
    assert found.rate.output_tokens_per_s == pytest.approx(490)
    assert found.rate.samples_per_s == pytest.approx(490 / (12_500 / 80))
    assert (found.bound.by, found.bound.server_busy) == (Limit.SERVER, pytest.approx(0.98))
    assert found.bound.in_flight_busy == pytest.approx(0.99)
    # 1,000 / 50 that generate, and as many as begin in the second before their first token.
    assert found.bound.in_flight_for_whole_server == 26
    assert found.needs.worker_cpu_ms_per_sample == pytest.approx(10)
    assert (found.needs.workers, found.needs.worker_peak_mb) == (1, 123)
    assert (found.needs.redis_bytes_per_waiting_sample, found.needs.disk_bytes_per_sample) == (2_000, 5_000)


def test_the_whole_run() -> None:
    """Rows become samples as those rehearsed did; the range is the mean's, with the tail in its upper end."""
    whole = find(plan(), measured()).whole
    assert whole is not None
    assert (whole.rows, whole.samples, whole.disk_bytes) == (1000, 800, 4_000_000)
    assert whole.redis_bytes == 500 * 2_000, "no more wait than MILL_MAX_PENDING"
    mean, deviation = 12_500 / 75, 94.9157995752499  # of 50 times 100 and 25 times 300
    error = 1.9925 * deviation / 75**0.5  # Student's, for 74 degrees of freedom
    assert whole.seconds_low == pytest.approx(750 * (mean - error) / 490, rel=1e-4)
    assert whole.seconds_high == pytest.approx(750 * (mean + error) / 490 + 15, rel=1e-4)
    assert find(plan(rows=None), measured()).whole is None


@pytest.mark.parametrize(
    ("changes", "limit", "words"),
    [
        ({}, Limit.SERVER, "The server is the limit; "),
        ({"stretch": Stretch(2.0, 39.6, 6_000.0)}, Limit.IN_FLIGHT, "The requests in flight are the limit; "),
        ({"stretch": Stretch(2.0, 30.0, 6_000.0)}, Limit.WORKERS, "The workers are the limit; "),
        ({"steady": False}, Limit.SAMPLES, "There were too few samples to find the limit; "),
    ],
)
def test_what_the_limit_is(changes: dict[str, Any], limit: Limit, words: str) -> None:
    """A server that is busy is the limit, else the bound that is reached, else the workers."""
    found = find(plan(), measured(**changes))
    assert found.bound.by is limit
    assert next(text.limit(found.bound, 40)).startswith(words)


def test_more_workers_for_more_samples() -> None:
    """No worker process is to use more than 70 % of a core."""
    needs = find(plan(), measured(worker_cpu_s=80.0)).needs
    # 3.136 samples a second, a second of CPU each.
    assert needs.workers == 5


def test_nothing_answered_is_no_crash() -> None:
    """Where every sample fails there is no answer to speak of, and the rest is told."""
    failed = measured(outcomes={"accepted": 0, "rejected": 0, "failed": 80}, tokens=[], latencies_s=[])
    found = find(plan(), failed)
    assert (found.answers, found.whole, found.rate.real_samples_per_s) == (None, None, 20.0)
    assert any("0 accepted, 0 rejected, 80 failed" in line for line in text.report(found))


def test_the_report_says_all() -> None:
    """The text has the figures, the assumptions and the commands."""
    said = "\n".join(text.report(find(plan(), measured())))
    for words in (
        "100 rows read, 20 refused",
        "80 samples: 70 accepted, 5 rejected, 5 failed",
        "rejected: truncated 5",
        "answers of 200 tokens on average (lognormal, sigma 0.9, cut at 300)",
        "50 tokens/s each and 1,000 in all, first token after 1 s, 0.0% of the requests failing",
        "ran 10 times faster",
        "3.14 samples/s, 490 output tokens/s",
        "800 samples of 1,000 rows: 3.7 min to 5.1 min",
        "4.0 MB (5.0 kB a sample",
        "The server is the limit; 26 in flight would use the whole server.",
        "busy: the server 98%, the 40 requests in flight 99%",
        "10.0 ms of CPU for a sample, and at most 123 MB",
        "  producer up --workers 1",
        "  producer enqueue 'data/my prompts.jsonl' --dataset my_prompts --columns prompt=question --max-tokens 300",
    ):
        assert words in said, said


def test_settings_of_the_processes() -> None:
    """Generation settings go along as they are, and a worker's times are as fast as the server's.

    All rows have room in Redis at once, for no worker takes any before they are queued.
    """
    settings = plan().settings()
    assert settings["MILL_TEMPERATURE"] == "0.6..1.0"
    assert json.loads(settings["MILL_STOP"]) == ["a", "b"]
    assert (settings["MILL_MAX_TOKENS"], settings["MILL_KEEP_TRUNCATED"]) == ("300", "false")
    assert (float(settings["MILL_REQUEST_TIMEOUT_S"]), float(settings["MILL_BACKOFF_S"])) == (60.0, 0.1)
    assert plan(request_timeout_s=None).settings()["MILL_REQUEST_TIMEOUT_S"] == "auto"
    assert plan().slots == 14 + 8
    assert (settings["MILL_MAX_PENDING"], settings["MILL_MAX_ROW_MB"]) == ("500", "2.0")
    assert plan(queue=QueueSettings(max_pending=10)).settings()["MILL_MAX_PENDING"] == "100"


def look(at: float, in_flight: int, queued: int, *, busy_s: float = 0.0, generated: float = 0.0) -> Look:
    """Return a look."""
    return Look(at=at, in_flight=in_flight, busy_s=busy_s, generated=generated, queued=queued)


def test_the_steady_stretch_is_between_start_and_tail() -> None:
    """What counts is from when the run has come up to speed to the last look at which samples were queued."""
    looks = [
        look(10.0, 3, 90),
        look(10.1, 99, 50, busy_s=5, generated=100),
        look(10.5, 97, 30, busy_s=44, generated=500),
        look(12.1, 100, 1, busy_s=203, generated=2_100),
        look(12.2, 95, 0, busy_s=212, generated=2_190),
        look(20.0, 1, 0, busy_s=300, generated=3_000),
    ]
    stretch = steady(looks)
    assert stretch is not None
    assert stretch.seconds == pytest.approx(2.0)
    assert (stretch.in_flight, stretch.tokens_per_s) == (pytest.approx(99), pytest.approx(1000))
    assert steady([one for one in looks if not one.queued]) is None
    assert steady(looks[1:2]) is None


def test_a_source_is_opened_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the current folder gets its whole path; a hub's or a preset's name stays as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "saved").mkdir()
    assert opened_from_anywhere("a.jsonl") == str(tmp_path / "a.jsonl")
    assert opened_from_anywhere("hf:./saved") == f"hf:{tmp_path}/saved"
    for unchanged in ("gsm8k", "hf:saved/data", "hf:openai/gsm8k:main", "missing.jsonl"):
        assert opened_from_anywhere(unchanged) == unchanged


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    """--keep takes a folder that is new or empty."""
    check_keep(tmp_path / "new")
    check_keep(tmp_path)
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="is there already and not empty; name a new folder"):
            check_keep(taken)
    with pytest.raises(UsageError, match=f"nothing can be written to {tmp_path}/file; name another folder"):
        check_keep(tmp_path / "file" / "new")
