"""What a server's /metrics says of its load, in three servers' words, and what a row of readings shows."""

from __future__ import annotations

import pytest

from workers.gauges import Gauges, parse

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 20.0
vllm:e2e_request_latency_seconds_bucket{le="0.3"} oops
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 2.0
sglang:num_queue_reqs{model_name="m"} 5.0
sglang:token_usage{model_name="m"} 0.75
"""
LLAMA_CPP = b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (VLLM, Gauges(running=7, waiting=1, at=5.0, kv=0.5, progress=120.0)),
        (SGLANG, Gauges(running=2, waiting=5, at=5.0, kv=0.75)),
        (LLAMA_CPP, Gauges(running=1, waiting=2, at=5.0)),
    ],
    ids=["vllm", "sglang", "llama.cpp"],
)
def test_the_load_is_read(page: bytes, expected: Gauges) -> None:
    """Running and waiting are summed over engines, the fullest cache counts, and other series are passed over."""
    assert parse(page, at=5.0) == expected


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>no such page</html>",
        b'{"num_requests": 3}',
        b"process_cpu_seconds_total 3\n",
        b"vllm:num_requests_running oops\n",
        b"vllm:num_requests_running{ 3\n",
        b"vllm:num_requests_running nan\n",
        b"\xff\xfe\x00",
    ],
)
def test_other_pages_say_nothing(page: bytes) -> None:
    """A page of another kind, or one that cannot be understood, is no reading."""
    assert parse(page, at=5.0) is None


def _row(*readings: tuple[float, float]) -> Gauges:
    """Return the last of readings, each the moment and the requests that run."""
    latest: Gauges | None = None
    for at, running in readings:
        latest = Gauges(running=running, waiting=0, at=at).after(latest)
    assert latest is not None
    return latest


def test_idleness_adds_up_over_readings() -> None:
    """Only time between readings that all found nothing counts, and the busiest reading is remembered."""
    assert _row((0, 3), (10, 0)).idle_s == 0
    idle = _row((0, 3), (10, 0), (20, 0), (31, 0))
    assert (idle.idle_s, idle.peak) == (21, 3)
    assert _row((0, 3), (10, 0), (20, 1), (30, 0)).idle_s == 0
    assert _row((0, 0), (10, 0)).peak == 0


def test_gaps_and_clocks_are_not_idleness() -> None:
    """An hour without a reading, or a clock that jumps, counts as twenty seconds at most, and never as less than 0."""
    assert _row((0, 1), (10, 0), (3610, 0)).idle_s == 20
    assert _row((0, 1), (3610, 0), (10, 0)).idle_s == 0


def test_an_answer_can_prove_the_readings_wrong() -> None:
    """A call that ran while the server called itself idle, and was answered long after, was not counted."""
    idle, busy = _row((0, 1), (10, 0)), _row((0, 1))
    assert idle.contradict(10.0, call_s=30.0)
    assert not busy.contradict(10.0, call_s=30.0)
    assert not idle.contradict(10.0, call_s=9.0)
    assert not idle.contradict(1.0, call_s=30.0)
