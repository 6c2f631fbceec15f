"""What the monitor shows when Redis is gone: what a worker wrote while it is fresh, and what stays true afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from app.places import dataset_folder
from app.progress import encode
from app.snapshot import BrokerState, Counts, Endpoint, Eta, Latency, Part, Rate, Rates, Snapshot, State
from producer.monitor.files import FRESH_S, fill_in, read_progress

GONE = BrokerState(reachable=False, url="")


def told(prepared: Path, dataset: str, *, age_s: float, accepted: int = 40) -> None:
    """Write what a worker wrote so many seconds ago: 10 samples in flight, 3 a second."""
    left = 100 - accepted
    part = Part(
        state=State.RUNNING,
        counts=Counts(read=100, samples=100, accepted=accepted, left=left, queued=left - 10, in_flight=10),
        percent=float(accepted),
        rates=Rates(
            now=Rate(samples_per_s=3.0, tokens_per_s=300.0, rejected_per_s=0.0, failed_per_s=0.0, window_s=60.0)
        ),
        latency=Latency(mean_s=2.0, p95_s=4.0, count=40, sum_s=80.0),
        eta=Eta(seconds=20.0, low_s=15.0, high_s=30.0),
        call_faults={"timeout": 5},
    )
    snapshot = Snapshot(
        at=time.time() - age_s,
        broker=BrokerState(reachable=True, url="redis://h:1/0"),
        totals=part,
        datasets={dataset: part},
        workers=[{"node": "mill1", "at": time.time() - age_s}],
        endpoints=[Endpoint(name="a", url="http://a", state="up")],
    )
    folder = dataset_folder(prepared, dataset)
    folder.path.mkdir()
    folder.progress.write_bytes(encode(snapshot))


def counted(*datasets: str, accepted: int = 50, total: int = 100) -> Snapshot:
    """Return what the files say now: `accepted` are recorded of each."""
    left = total - accepted
    counts = Counts(
        read=total,
        samples=total,
        accepted=accepted,
        left=left,
        queued=None,
        in_flight=None,
        missing=None,
        orphaned=None,
    )
    part = Part(state=State.UNKNOWN if left else State.DONE, counts=counts, percent=100 * accepted / total)
    return Snapshot(at=time.time(), broker=GONE, totals=part, datasets=dict.fromkeys(datasets, part))


def test_fresh_numbers_are_shown_whole(tmp_path: Path) -> None:
    """What a worker wrote seconds ago is shown as it is, servers and workers too, with its time."""
    told(tmp_path, "a", age_s=5)
    filled, at = fill_in(counted("a"), tmp_path)
    part = filled.datasets["a"]
    assert (part.state, part.counts.accepted, part.counts.in_flight) == (State.RUNNING, 40, 10)
    assert part.eta.seconds == 20.0
    assert (len(filled.workers), len(filled.endpoints)) == (1, 1)
    assert at == pytest.approx(time.time() - 5, abs=2)
    assert not filled.broker.reachable


def test_old_numbers_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    """Later the records are counted anew, latency and failed calls so far stay, and the rest is unknown."""
    told(tmp_path, "a", age_s=FRESH_S + 60)
    filled, at = fill_in(counted("a"), tmp_path)
    part = filled.datasets["a"]
    assert (part.state, part.counts.accepted, part.counts.in_flight) == (State.UNKNOWN, 50, None)
    assert (part.latency.p95_s, part.call_faults) == (4.0, {"timeout": 5})
    assert (part.rates.now.samples_per_s, part.eta.seconds) == (None, None)
    assert (filled.workers, filled.endpoints) == ([], [])
    assert at is not None


def test_what_is_done_is_done(tmp_path: Path) -> None:
    """Where all samples are recorded nothing is in flight, whatever a worker wrote before."""
    told(tmp_path, "a", age_s=5, accepted=90)
    part = fill_in(counted("a", accepted=100), tmp_path)[0].datasets["a"]
    assert (part.state, part.counts.accepted, part.counts.queued, part.counts.in_flight) == (State.DONE, 100, 0, 0)


def test_totals_are_the_sums_of_what_is_shown(tmp_path: Path) -> None:
    """The sum of several datasets is that of their shown counts and rates; one unknown count makes the sum unknown."""
    told(tmp_path, "a", age_s=5)
    told(tmp_path, "b", age_s=5)
    totals = fill_in(counted("a", "b"), tmp_path)[0].totals
    assert (totals.counts.accepted, totals.counts.in_flight, totals.percent) == (80, 20, 40.0)
    assert (totals.state, totals.rates.now.samples_per_s) == (State.RUNNING, 6.0)
    mixed = fill_in(counted("a", "b", "c"), tmp_path)[0].totals
    assert (mixed.counts.accepted, mixed.counts.in_flight) == (130, None)


@pytest.mark.parametrize("data", [b"", b"{", b'{"schema": 1}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path, data: bytes) -> None:
    """A torn file, or one of another version, leaves the records alone to speak."""
    told(tmp_path, "a", age_s=5)
    dataset_folder(tmp_path, "a").progress.write_bytes(data)
    assert read_progress(tmp_path, "a") is None
    before = counted("a")
    assert fill_in(before, tmp_path) == (before, None)


def test_another_schema_is_not_understood(tmp_path: Path) -> None:
    """Numbers of another version are not shown as if they were ours."""
    told(tmp_path, "a", age_s=5)
    file = dataset_folder(tmp_path, "a").progress
    later = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode({**later, "schema": 3}))
    assert read_progress(tmp_path, "a") is None
