"""The page of metrics: every number under its name and type, unknown ones left out, odd names escaped."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import msgspec
import pytest

from app.dashboard.metrics import LATENCY_BUCKETS, LENGTH_BUCKETS, Reading, exposition
from app.dashboard.metrics_names import FAMILIES, Type
from app.histogram import collect
from app.snapshot import BrokerState, Counts, Endpoint, Eta, Part, Snapshot, State, Tokens
from app.tally import Stats
from tests.support.scrape import parse, series, types

ODD = 'My "Prompts" \\ é {x="1"}'
COUNTS = Counts(
    read=23,
    refused=3,
    samples=20,
    accepted=7,
    rejected=2,
    failed=1,
    left=10,
    queued=5,
    in_flight=4,
    missing=1,
    orphaned=2,
)
PART = Part(
    state=State.RUNNING,
    counts=COUNTS,
    tokens=Tokens(total=1000),
    eta=Eta(seconds=60.0, low_s=40.0, high_s=90.0, at=1.7e9 + 60),
    oldest_in_flight_s=12.5,
    stalled_since=1.7e9 - 900,
    last_record_at=1.7e9 - 3,
)
STATS = Stats(
    accepted=8,
    rejected=3,
    failed=2,
    tokens=1234,
    prompt_tokens=555,
    latency=collect([0.005, 0.5, 0.5, 30.0, 90_000.0]),
    lengths=collect([1, 200, 500_000]),
    faults={"timeout": 4, "server_error": 1},
)
FULL = Reading(
    Snapshot(
        at=1.7e9,
        broker=BrokerState(reachable=True, url="redis://127.0.0.1:6379/0"),
        totals=PART,
        datasets={ODD: PART, "chat": PART},
        workers=[{"owner": "a", "slots": 8, "busy": 3}, {"owner": "b", "slots": 4, "busy": 1}],
        endpoints=[
            Endpoint(name="gpu1-a1", url="http://gpu1/v1", state="down", in_flight=4, bound=128, latency_s=1.5),
            Endpoint(name="gpu2-b2", url="http://gpu1/v1", state="odd"),
        ],
    ),
    redis_up=True,
    stats={ODD: STATS, "chat": Stats()},
    paused=frozenset({"chat"}),
    redis_memory=2_000_000,
    redis_memory_max=8_000_000,
    disk_free=10,
    disk_size=100,
)


def test_every_documented_metric_is_told_with_its_type_and_labels() -> None:
    """A look that knows everything tells every family, each with exactly the type and the labels of the list."""
    page = exposition(FULL).decode()
    assert types(page) == {family.full_name: family.type.value for family in FAMILIES.values()}
    found: dict[str, set[frozenset[str]]] = {}
    for name, labels in parse(page):
        found.setdefault(name, set()).add(frozenset(key for key, _value in labels if key != "le"))
    expected = {name: {frozenset(family.labels)} for family in FAMILIES.values() for name in family.series}
    assert found == expected
    for family in FAMILIES.values():
        assert f"# HELP {family.full_name} {family.meaning}\n" in page


def test_each_number_stands_under_its_name() -> None:
    """Counts, outcomes, ETA, states and sizes are those of the look, of each dataset and server."""
    found = parse(exposition(FULL).decode())
    told = {
        series("dataset_samples", dataset=ODD, outcome="accepted"): 7,
        series("dataset_samples", dataset=ODD, outcome="rejected"): 2,
        series("dataset_samples", dataset=ODD, outcome="failed"): 1,
        series("dataset_samples", dataset=ODD, outcome="none"): 10,
        series("dataset_refused_rows", dataset=ODD): 3,
        series("dataset_output_tokens", dataset=ODD): 1000,
        series("last_record_timestamp_seconds", dataset=ODD): 1.7e9 - 3,
        series("samples_total", dataset=ODD, outcome="accepted"): 8,
        series("samples_total", dataset=ODD, outcome="rejected"): 3,
        series("samples_total", dataset=ODD, outcome="failed"): 2,
        series("samples_total", dataset="chat", outcome="accepted"): 0,
        series("output_tokens_total", dataset=ODD): 1234,
        series("prompt_tokens_total", dataset=ODD): 555,
        series("call_faults_total", dataset=ODD, fault="timeout"): 4,
        series("queue_depth", dataset="chat"): 5,
        series("in_flight", dataset="chat"): 4,
        series("missing", dataset="chat"): 1,
        series("orphaned", dataset="chat"): 2,
        series("oldest_in_flight_seconds", dataset="chat"): 12.5,
        series("dataset_paused", dataset="chat"): 1,
        series("dataset_paused", dataset=ODD): 0,
        series("dataset_state", dataset="chat", state="running"): 1,
        series("dataset_state", dataset="chat", state="done"): 0,
        series("stalled_since_timestamp_seconds", dataset="chat"): 1.7e9 - 900,
        series("eta_seconds", dataset="chat", bound="low"): 40,
        series("eta_seconds", dataset="chat", bound="expected"): 60,
        series("all_eta_seconds", bound="high"): 90,
        series("endpoint_info", endpoint="gpu1-a1", url="http://gpu1/v1"): 1,
        series("endpoint_in_flight", endpoint="gpu1-a1"): 4,
        series("in_flight_limit", endpoint="gpu1-a1"): 128,
        series("endpoint_latency_seconds", endpoint="gpu1-a1"): 1.5,
        series("breaker_state", endpoint="gpu1-a1", state="down"): 1,
        series("breaker_state", endpoint="gpu1-a1", state="up"): 0,
        series("breaker_state", endpoint="gpu2-b2", state="odd"): 1,
        series("workers"): 2,
        series("worker_slots"): 12,
        series("worker_slots_busy"): 4,
        series("redis_up"): 1,
        series("redis_memory_bytes"): 2_000_000,
        series("redis_memory_max_bytes"): 8_000_000,
        series("disk_free_bytes"): 10,
        series("disk_size_bytes"): 100,
        series("snapshot_timestamp_seconds"): 1.7e9,
    }
    assert {key: found.get(key) for key in told} == told
    # Two servers may share a URL (other credentials); their names keep them apart.
    assert series("in_flight_limit", endpoint="gpu2-b2") not in found


def test_a_histogram_counts_every_value() -> None:
    """Buckets are cumulative with fixed bounds, values beyond them count in the first or in +Inf, the sum is exact."""
    found = parse(exposition(FULL).decode())

    def bucket(name: str, le: str, dataset: str = ODD) -> float | None:
        return found.get(series(f"{name}_bucket", dataset=dataset, le=le))

    assert [bucket("request_seconds", le) for le in ("0.1", "0.398107", "0.630957", "39.8107", "3981.07", "+Inf")] == [
        *(1, 1, 3, 4, 4, 5)
    ]
    assert found[series("request_seconds_count", dataset=ODD)] == 5
    assert found[series("request_seconds_sum", dataset=ODD)] == pytest.approx(90_031.005)
    assert [bucket("completion_tokens", le) for le in ("1.0", "251.189", "158489.0", "+Inf")] == [1, 2, 2, 3]
    assert [bucket("completion_tokens", le, "chat") for le in ("1.0", "+Inf")] == [0, 0]
    bounds = [key for key in found if key[0] == "promptmill_request_seconds_bucket" and ("dataset", ODD) in key[1]]
    assert len(bounds) == len(LATENCY_BUCKETS) + 1
    assert 40 > len(LENGTH_BUCKETS) > 20


def test_what_is_unknown_is_left_out() -> None:
    """Without Redis the files' numbers are told and `redis_up` is 0; what only Redis knows is left out, not 0."""
    counts = msgspec.structs.replace(COUNTS, queued=None, in_flight=None, missing=None, orphaned=None)
    part = Part(state=State.UNKNOWN, counts=counts, tokens=Tokens(total=1000), eta=Eta(reason="no Redis"))
    snapshot = Snapshot(
        at=1.7e9, broker=BrokerState(reachable=False, url=""), totals=part, datasets={"chat": part}, workers=[]
    )
    page = exposition(Reading(snapshot)).decode()
    assert set(types(page)) == {
        *("promptmill_dataset_samples", "promptmill_dataset_refused_rows", "promptmill_dataset_output_tokens"),
        *("promptmill_dataset_state", "promptmill_redis_up", "promptmill_snapshot_timestamp_seconds"),
        "promptmill_build_info",
    }
    found = parse(page)
    assert found[series("redis_up")] == 0
    assert found[series("dataset_samples", dataset="chat", outcome="none")] == 10


def test_names_keep_prometheus_conventions() -> None:
    """Counters, and they alone, end in _total, units stand in the name, and promtool has nothing to say."""
    for family in FAMILIES.values():
        assert (family.type is Type.COUNTER) == family.name.endswith("_total")
        if family.unit in {"seconds", "bytes"}:
            assert family.unit in family.name, family.name
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition(FULL), capture_output=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_look_without_anything_is_a_page() -> None:
    """Before the first dataset the page is valid and tells of Redis and of itself."""
    empty = dataclasses.replace(
        FULL,
        snapshot=msgspec.structs.replace(
            FULL.snapshot, datasets={}, endpoints=[], workers=[], totals=Part(state=State.EMPTY, counts=Counts())
        ),
        stats={},
    )
    found = parse(exposition(empty).decode())
    assert found[series("workers")] == 0
    assert not [name for name, labels in found if ("dataset", "chat") in labels]
