"""What status says of real files and a real Redis, as JSON, as text and as exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import broker as app_broker
from app import manifest
from app.broker import BrokerUrl
from app.ledger import Ledger, Pen
from app.places import Keys, dataset_folder, endpoint_name
from app.progress import take_snapshot
from app.queue import Queue
from app.records import Kind, Sample
from app.settings import GenerationSettings
from app.snapshot import Snapshot, State
from app.tally import Done
from producer import status
from tests.conftest import Broker, RedisFactory
from tests.support.jsonl_check import parse_strict

BEAT = {"node": "w1@host", "state": "running", "slots": 8, "busy": 2, "in_flight": {}, "held": {}}


@pytest.fixture
def url(broker: Broker) -> BrokerUrl:
    """Return the test's Redis."""
    return app_broker.parse(broker.url)


@pytest.fixture
def queue(broker: Broker, url: BrokerUrl) -> Iterator[Queue]:
    """Return the test's work list."""
    client = app_broker.connect(url)
    yield Queue(client, Keys(broker.key_prefix))
    client.connection_pool.disconnect()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return an empty dataset folder `d` with a manifest."""
    with Ledger.open(dataset_folder(tmp_path, "d")) as opened:
        manifest.fix_settings(opened, "d", GenerationSettings(), {}, new=False)
        yield opened


def enqueue(queue: Queue, ledger: Ledger, n: int, *, dataset: str = "d") -> list[str]:
    """Do what enqueue does, tickets aside."""
    ids = [f"s{place}" for place in range(n)]
    ledger.commit([Pen(Kind.PENDING, id_, json.dumps({"id": id_}).encode() + b"\n") for id_ in ids])
    queue.register(dataset, "f", {})
    queue.put(dataset, [Sample(id=id_, messages=[]) for id_ in ids])
    return ids


def record(queue: Queue, ledger: Ledger, id_: str, kind: Kind = Kind.ACCEPTED, *, reason: str = "", at: float) -> None:
    """Do what a recorder does."""
    line = {"id": id_, "reason": reason or None, "usage": {"completion_tokens": 100}}
    ledger.commit([Pen(kind, id_, json.dumps(line).encode() + b"\n", reason, tokens=100)])
    queue.finish("d", [Done(id_, kind, 100, prompt_tokens=20, latency_s=1.5)], at=at)


def balance(snapshot: Snapshot) -> dict[str, int]:
    """Return the counts of `d`, after checking that they add up."""
    counts: dict[str, int] = parse_strict(status.status_json(snapshot))["datasets"]["d"]["counts"]
    assert counts["read"] == counts["refused"] + counts["samples"]
    kinds = ("accepted", "rejected", "failed", "queued", "in_flight", "missing")
    assert counts["samples"] == sum(counts[kind] for kind in kinds)
    return counts


def set_endpoint(queue: Queue, server: str, state: str, reason: str) -> str:
    """Publish a model server's health as workers do."""
    name = endpoint_name(server)
    fields = {"url": server, "state": state, "since": repr(time.time() - 60), "reason": reason}
    for field, value in fields.items():
        queue.client.hset(queue.keys.endpoint(name), field, value)
    queue.client.sadd(queue.keys.endpoints, name)
    return name


def test_a_run_from_queue_to_done(queue: Queue, ledger: Ledger, url: BrokerUrl, tmp_path: Path) -> None:
    """Every step of ten samples is counted where it is, with rate, tokens, reasons and exit code."""
    ids = enqueue(queue, ledger, 10)
    queue.beat("w1", BEAT, ttl_s=60)
    snapshot = take_snapshot(queue, tmp_path, url=url)
    assert balance(snapshot)["queued"] == 10
    assert snapshot.datasets["d"].eta.reason == "no finished sample yet in this run"
    assert status.exit_code(snapshot) == 0

    start = time.time()
    assert all(queue.take("d", id_, "w1").sample for id_ in ids[:4])
    for id_ in ids[:2]:
        record(queue, ledger, id_, at=start + 2)
    record(queue, ledger, ids[2], Kind.REJECTED, reason="too_short", at=start + 3)
    snapshot = take_snapshot(queue, tmp_path, url=url, now=lambda: start + 6)
    counts, part = balance(snapshot), snapshot.datasets["d"]
    assert (counts["accepted"], counts["rejected"], counts["in_flight"], counts["queued"]) == (2, 1, 1, 6)
    assert part.reasons["rejected"] == {"too_short": 1}
    assert (part.tokens.total, part.tokens.mean, part.tokens.prompt_total) == (200, 100.0, 60)
    assert part.tokens.p95 == 100
    assert (part.latency.mean_s, part.latency.count) == (1.5, 3)
    now = part.rates.now
    assert now.window_s is not None
    assert now.samples_per_s == pytest.approx(2 / now.window_s, rel=0.01)
    assert now.tokens_per_s == pytest.approx(200 / now.window_s, rel=0.01)
    assert part.rates.run.samples_per_s == pytest.approx(2 / 6, rel=0.1)
    assert part.eta.seconds is not None
    assert part.eta.low_s is not None
    assert part.eta.high_s is not None
    assert 4 < part.eta.low_s < part.eta.seconds < part.eta.high_s < 40, "six that take about 1.5 s, one after another"
    assert part.eta.at == pytest.approx(start + 6 + part.eta.seconds, abs=1)
    assert status.exit_code(snapshot) == 0

    for id_ in ids[3:9]:
        record(queue, ledger, id_, at=start + 6)
    record(queue, ledger, ids[9], Kind.FAILED, reason="timeout", at=start + 6)
    snapshot = take_snapshot(queue, tmp_path, url=url)
    assert (balance(snapshot)["failed"], snapshot.totals.state, snapshot.totals.percent) == (1, State.DONE, 100.0)
    assert status.exit_code(snapshot) == 1


def test_a_worker_that_died_leaves_orphans(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """Samples of a worker without heartbeat are queued and orphaned, not in flight for ever."""
    ids = enqueue(queue, ledger, 3)
    queue.beat("w1", BEAT, ttl_s=60)
    queue.take("d", ids[0], "w1")
    queue.take("d", ids[1], "dead")
    counts = balance(take_snapshot(queue, tmp_path))
    assert (counts["in_flight"], counts["queued"], counts["orphaned"]) == (1, 2, 1)
    queue.part("w1")
    snapshot = take_snapshot(queue, tmp_path)
    assert (balance(snapshot)["orphaned"], snapshot.totals.state) == (2, State.WAITING)
    assert (snapshot.totals.eta.seconds, snapshot.totals.rates.now.samples_per_s) == (None, 0.0)


def test_an_empty_redis_says_run_enqueue_again(queue: Queue, ledger: Ledger, broker: Broker, tmp_path: Path) -> None:
    """After Redis lost everything the samples are missing, status says what to do, and exits with 1."""
    enqueue(queue, ledger, 5)
    broker.client.flushall()
    snapshot = take_snapshot(queue, tmp_path)
    assert balance(snapshot)["missing"] == 5
    assert "5 samples are neither done nor queued; run producer enqueue again" in status.as_text(snapshot)
    assert status.exit_code(snapshot) == 1


def test_a_refusing_server_is_shown_without_its_login(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """A paused endpoint stalls the run, is named with its reason, and ends status with 1."""
    enqueue(queue, ledger, 5)
    name = set_endpoint(queue, "http://user:secret@h:1/v1", "paused", "401: invalid api key\x1b[31m")
    queue.beat("w1", {**BEAT, "in_flight": {name: 3}, "bound": {name: 16}}, ttl_s=60)
    snapshot = take_snapshot(queue, tmp_path)
    assert snapshot.totals.state is State.STALLED
    endpoint = snapshot.endpoints[0]
    assert (endpoint.url, endpoint.in_flight, endpoint.bound) == ("http://h:1/v1", 3, 16)
    shown = status.as_text(snapshot, width=400)
    assert "http://h:1/v1 paused (3 of 16 in flight)" in shown
    assert "The model server refuses every request since" in shown
    assert "401: invalid api key" in shown
    assert "\x1b" not in shown
    assert "secret" not in shown + status.status_json(snapshot).decode()
    assert status.exit_code(snapshot) == 1


def test_a_server_of_an_earlier_run_is_left_out(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """Only servers that the living workers use are shown."""
    enqueue(queue, ledger, 5)
    set_endpoint(queue, "http://old:1", "down", "gone")
    used = set_endpoint(queue, "http://new:1", "up", "")
    queue.beat("w1", {**BEAT, "held": {used: 4}}, ttl_s=60)
    snapshot = take_snapshot(queue, tmp_path)
    assert [endpoint.url for endpoint in snapshot.endpoints] == ["http://new:1"]
    assert (snapshot.totals.state, status.exit_code(snapshot)) == (State.RUNNING, 0)


def test_a_paused_dataset_says_why(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """A paused dataset has no ETA but its reason, and is no failure."""
    enqueue(queue, ledger, 5)
    queue.beat("w1", BEAT, ttl_s=60)
    queue.pause("d", "by hand")
    part = take_snapshot(queue, tmp_path).datasets["d"]
    assert (part.state, part.eta.reason) == (State.PAUSED, "paused")
    assert "Paused: by hand." in part.notes


def test_the_wrong_folder_is_noticed(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """A prepared folder without the dataset that Redis holds believes Redis, asks about the folder and stays empty."""
    enqueue(queue, ledger, 5)
    elsewhere = tmp_path / "elsewhere"
    snapshot = take_snapshot(queue, elsewhere)
    assert balance(snapshot)["queued"] == 5
    assert any("MILL_PREPARED_DIR" in note for note in snapshot.datasets["d"].notes)
    assert not elsewhere.exists()


def test_a_dead_redis_leaves_the_files(new_redis: RedisFactory, ledger: Ledger, tmp_path: Path) -> None:
    """When Redis does not answer, status reports from the files, says so, and exits with 1 while work is left."""
    server = new_redis()
    url = app_broker.parse(server.url)
    client = app_broker.connect(url)
    queue = Queue(client, Keys("x:"))
    ids = enqueue(queue, ledger, 4)
    record(queue, ledger, ids[0], at=time.time())
    server.kill()
    snapshot = take_snapshot(queue, tmp_path, url=url)
    client.connection_pool.disconnect()
    assert (snapshot.broker.reachable, snapshot.broker.url) == (False, url.shown)
    counts = snapshot.datasets["d"].counts
    assert (counts.accepted, counts.left, counts.queued) == (1, 3, None)
    assert "cannot be reached" in snapshot.totals.notes[0]
    assert "queued unknown" in status.as_text(snapshot)
    assert status.exit_code(snapshot) == 1


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_text_fits_any_width(queue: Queue, ledger: Ledger, tmp_path: Path, width: int) -> None:
    """No line is wider than asked for, nothing is lost, and no byte steers a terminal."""
    enqueue(queue, ledger, 5)
    queue.register("日本語データセット" * 4, "f", {})
    set_endpoint(queue, "http://" + "long" * 30, "down", "Connection refused " * 9)
    queue.beat("w1", {**BEAT, "note": "all\rwell"}, ttl_s=60)
    from rich.cells import cell_len  # noqa: PLC0415 - as wide as a terminal shows it

    shown = status.as_text(take_snapshot(queue, tmp_path), width=width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert not set(shown) & {"\x1b", "\r"}
    assert "queued 5" in shown
