"""What a snapshot says: the books balance, rates count this run alone, the ETA is honest, the files are whole."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import manifest
from app.errors import UsageError
from app.histogram import collect, merge
from app.history import read_points
from app.index import Tally, Totals
from app.ledger import Ledger, Pen
from app.outlook import Scene
from app.places import Keys, dataset_folder
from app.progress import read_totals, scan_totals, take_snapshot, write_progress
from app.queue import Queue, Waiting
from app.reckoning import Findings, combine, count, dataset_part
from app.records import Kind
from app.settings import GenerationSettings
from app.snapshot import Counts, Endpoint, Eta, Latency, Rate, Rates, State
from app.surroundings import clock_time, find_obstacle
from app.tally import Counted, Run, Stats
from tests.support.jsonl_check import parse_strict
from tests.support.redis_server import absent_redis

NOW = 1_700_000_000.0
WORKER = {"owner": "w1", "node": "w1@host", "state": "running", "slots": 8, "busy": 5}
ABSENT = Queue(absent_redis(), Keys("x:"))
"""The queue of a Redis that does not answer."""

small = st.integers(0, 50)


def totals(**kinds: int) -> Totals:
    """Return what the files say; an accepted sample has 100 tokens."""
    return Totals({Kind(kind): Tally(n, 100 * n if kind == "accepted" else 0) for kind, n in kinds.items()}, {})


def counted(
    *, begin: float, start: float | None = None, seconds: int = 0, latency_s: float = 1.0, **per_second: int
) -> Counted:
    """Return what is counted of a run since `begin` whose seconds from `start` on are all alike."""
    first = int(begin if start is None else start)
    tallies = {first + second: dict(per_second) for second in range(seconds)}
    accepted, rejected, failed = (seconds * per_second.get(kind, 0) for kind in ("accepted", "rejected", "failed"))
    stats = Stats(
        accepted=accepted,
        rejected=rejected,
        failed=failed,
        tokens=seconds * per_second.get("tokens", 0),
        latency=collect([latency_s] * (accepted + rejected)),
    )
    return Counted(seconds=tallies, stats=stats, run=Run(began=begin))


def part_of(found: Totals, waiting: Waiting | None = None, *, done: Counted | None = None, **scene: Any) -> Any:
    """Return a dataset's numbers, with one worker running."""
    setting = {"now": NOW, "workers": [WORKER], **scene}
    return dataset_part(Findings(found, waiting, done or Counted(run=Run(began=NOW - 10))), Scene(**setting))


@given(small, small, small, small, small, small, small, small, small, small)
def test_the_books_balance_whatever_was_read(  # noqa: PLR0917 one argument per number
    refused: int,
    pending: int,
    failed: int,
    rejected: int,
    accepted: int,
    prompts: int,
    in_flight: int,
    orphaned: int,
    again_failed: int,
    again_rejected: int,
) -> None:
    """Counts add up and none is negative, even if Redis and the files were read at different moments."""
    found = totals(refused=refused, pending=pending, failed=failed, rejected=rejected, accepted=accepted)
    waiting = Waiting(
        prompts=prompts,
        in_flight=in_flight,
        orphaned=orphaned,
        again_failed=again_failed,
        again_rejected=again_rejected,
    )
    counts = count(found, waiting)
    assert counts.queued is not None
    assert counts.in_flight is not None
    assert counts.missing is not None
    assert counts.orphaned is not None
    assert counts.read == counts.refused + counts.samples
    assert counts.samples == counts.accepted + counts.rejected + counts.failed + counts.left
    assert counts.left == counts.queued + counts.in_flight + counts.missing
    assert min(getattr(counts, field) for field in counts.__struct_fields__) >= 0
    assert counts.orphaned <= counts.queued


def test_a_sample_asked_again_is_queued_and_not_failed() -> None:
    """Failed and rejected samples that wait again leave their old count."""
    counts = count(
        totals(accepted=5, failed=3, rejected=2), Waiting(prompts=4, in_flight=1, again_failed=3, again_rejected=1)
    )
    assert (counts.samples, counts.failed, counts.rejected, counts.queued, counts.in_flight) == (10, 0, 1, 3, 1)


def test_a_sample_that_finishes_between_the_reads_is_counted_once() -> None:
    """What Redis still held when it was read, and the files know as recorded, is not queued."""
    counts = count(totals(accepted=9, pending=1), Waiting(prompts=3, in_flight=2))
    assert (counts.samples, counts.queued, counts.in_flight, counts.missing) == (10, 0, 1, 0)


def test_without_redis_what_waits_is_unknown() -> None:
    """Nothing is guessed: the counts that only Redis knows are null, the rest still adds up."""
    counts = count(totals(accepted=4, pending=6), None)
    assert (counts.samples, counts.left) == (10, 6)
    assert (counts.queued, counts.in_flight, counts.missing, counts.orphaned) == (None, None, None, None)


def test_a_resumed_run_has_no_eta_before_its_first_sample() -> None:
    """900 samples of an earlier run give neither a rate nor an ETA."""
    before = counted(begin=NOW - 60, start=NOW - 40, seconds=30, accepted=30, tokens=3000)
    resumed = Counted(seconds=before.seconds, stats=before.stats, run=Run(began=NOW, before=before.stats))
    part = part_of(totals(accepted=900, pending=100), Waiting(prompts=100), done=resumed)
    assert (part.rates, part.eta) == (Rates(), Eta(reason="no finished sample yet in this run"))
    assert (part.percent, part.state) == (90.0, State.RUNNING)


def test_rate_and_eta_count_this_run_alone() -> None:
    """Five seconds into a resume at 10 samples/s, rate and ETA are those of the five seconds."""
    before = counted(begin=NOW - 60, start=NOW - 40, seconds=30, accepted=30, tokens=3000)
    new = counted(begin=NOW - 5, seconds=5, accepted=10, tokens=1234, latency_s=0.5)
    both = Stats(accepted=950, tokens=96_170, latency=merge([before.stats.latency, new.stats.latency]))
    was = dataclasses.replace(before.stats, accepted=900, tokens=90_000)
    done = Counted(seconds={**before.seconds, **new.seconds}, stats=both, run=Run(began=NOW - 5, before=was))
    part = part_of(totals(accepted=950, pending=50), Waiting(prompts=50, in_flight=5, ages=[0.2] * 5), done=done)
    expected = Rate(samples_per_s=10.0, tokens_per_s=1234.0, rejected_per_s=0.0, failed_per_s=0.0, window_s=5.0)
    assert (part.rates.now, part.rates.five_minutes, part.rates.run) == (expected, expected, expected)
    assert part.eta.seconds == pytest.approx(5.0, abs=0.7)
    assert part.eta.low_s < 5.0 < part.eta.high_s < 7
    assert part.eta.at == pytest.approx(NOW + part.eta.seconds, abs=0.1)


def test_failed_samples_are_no_good_rate_but_shorten_the_wait() -> None:
    """The rate of good samples leaves failures out, while the ETA knows that they are settled too."""
    done = counted(begin=NOW - 100, seconds=100, accepted=4, failed=1, tokens=40)
    waiting = Waiting(prompts=500, in_flight=5, ages=[0.5] * 5)
    part = part_of(totals(accepted=400, failed=100, pending=500), waiting, done=done)
    assert (part.rates.now.samples_per_s, part.rates.now.failed_per_s) == (4.0, 1.0)
    assert part.eta.seconds == pytest.approx(100, rel=0.1)


def test_a_run_in_which_all_fails_has_an_eta() -> None:
    """Failures without an answer have no latency; their number alone says how fast the work shrinks."""
    done = counted(begin=NOW - 100, seconds=100, failed=5)
    part = part_of(totals(failed=500, pending=500), Waiting(prompts=500, in_flight=5, ages=[0.5] * 5), done=done)
    assert part.eta.seconds == pytest.approx(100, rel=0.15)
    assert part.latency == Latency()


def test_without_a_worker_the_rate_is_zero_and_the_eta_unknown() -> None:
    """A queue that nobody works on says so."""
    done = counted(begin=NOW - 10, seconds=10, accepted=10)
    part = part_of(totals(accepted=100, pending=50), Waiting(prompts=50), done=done, workers=[])
    assert (part.state, part.rates.now.samples_per_s, part.eta.seconds) == (State.WAITING, 0.0, None)
    assert part.eta.reason == "no worker is running"
    assert any("No worker is running" in note for note in part.notes)


def test_a_dead_server_stalls_the_run_instead_of_slowing_it() -> None:
    """While the only model server is down there is no ETA, and the state says since when."""
    down = Endpoint(name="e", url="http://h:1", state="down", since=NOW - 60, reason="Connection refused")
    obstacle = find_obstacle([WORKER], [down], now=NOW)
    assert obstacle is not None
    assert obstacle.startswith(f"the model server is unreachable since {clock_time(NOW - 60, now=NOW)}: http://h:1")
    done = counted(begin=NOW - 120, seconds=50, accepted=10)
    waiting = Waiting(prompts=80, in_flight=16, ages=[65.0] * 16)
    found = totals(accepted=40, pending=80)
    part = part_of(found, waiting, done=done, obstacle=obstacle, obstacle_since=NOW - 60)
    assert (part.state, part.eta) == (State.STALLED, Eta(reason=obstacle))
    assert part.stalled_since == NOW - 60


def test_one_dead_server_of_two_is_no_obstacle() -> None:
    """Work goes on through the healthy one."""
    down = Endpoint(name="a", url="http://h:1", state="down")
    assert find_obstacle([WORKER], [down, Endpoint(name="b", url="http://h:2", state="up")], now=NOW) is None


def test_workers_that_wait_for_disk_stall_the_run() -> None:
    """When every worker waits for the disk, its note is the reason."""
    full = {**WORKER, "state": "waiting for disk", "note": "prepared is full."}
    assert find_obstacle([full], [], now=NOW) == "every worker is waiting for disk (prepared is full)"
    assert find_obstacle([full, WORKER], [], now=NOW) is None


def test_orphans_alone_have_no_eta() -> None:
    """Samples of a dead worker come back after its lease, which the rate knows nothing of."""
    done = counted(begin=NOW - 10, seconds=10, accepted=10)
    part = part_of(totals(accepted=100, pending=8), Waiting(prompts=8, orphaned=8), done=done)
    assert (part.counts.queued, part.counts.orphaned, part.eta.seconds) == (8, 8, None)
    assert any("8 samples are with a worker that died" in note for note in part.notes)


def test_lost_work_says_what_to_do() -> None:
    """After Redis came back empty, what is neither done nor queued is missing."""
    part = part_of(totals(accepted=100, pending=50), Waiting())
    assert (part.state, part.counts.missing, part.eta.seconds) == (State.INCOMPLETE, 50, None)
    assert "50 samples are neither done nor queued; run producer enqueue again." in part.notes


def test_nothing_to_do_divides_by_nothing() -> None:
    """An empty dataset has no percentage, no mean and no ETA."""
    part = part_of(totals(refused=7), Waiting())
    assert (part.state, part.percent, part.tokens.mean) == (State.EMPTY, None, None)
    assert (part.counts.read, part.eta) == (7, Eta(reason="nothing to do"))


def test_only_a_finished_dataset_has_100_percent() -> None:
    """Percentages are rounded down."""
    assert part_of(totals(accepted=99_999, pending=1), Waiting(prompts=1)).percent == 99.9
    done = part_of(totals(accepted=100_000), Waiting())
    assert (done.percent, done.state, done.tokens.mean) == (100.0, State.DONE, 100.0)


def test_a_paused_dataset_does_not_hold_up_the_eta_of_all() -> None:
    """The total's ETA is over what moves; its counts are over everything."""
    scene = Scene(now=NOW, workers=[WORKER])
    done = counted(begin=NOW - 100, seconds=100, accepted=5)
    moving = Findings(totals(accepted=500, pending=500), Waiting(prompts=500, in_flight=5, ages=[0.5] * 5), done)
    paused = Findings(totals(pending=90), Waiting(prompts=90, paused="by hand"))
    parts = [dataset_part(one, scene) for one in (moving, paused)]
    assert (parts[1].state, parts[1].eta) == (State.PAUSED, Eta(reason="paused"))
    everything = combine(parts, [moving, paused], scene, [])
    assert (everything.counts.samples, everything.counts.left, everything.eta) == (1090, 590, parts[0].eta)
    assert everything.eta.seconds == pytest.approx(100, rel=0.1)
    assert (everything.state, everything.rates.now.samples_per_s) == (State.RUNNING, 5.0)
    assert combine(parts[1:], [paused], scene, []).eta.reason == "paused"


def test_rates_of_several_datasets_share_their_window() -> None:
    """600 samples in the last minute and 10 in the last two seconds are 610 a minute together, not 10 + 5 a second."""
    scene = Scene(now=NOW, workers=[WORKER])
    old = Findings(totals(pending=9), Waiting(prompts=9), counted(begin=NOW - 900, seconds=900, accepted=10))
    new = Findings(totals(pending=9), Waiting(prompts=9), counted(begin=NOW - 2, seconds=2, accepted=5))
    parts = [dataset_part(one, scene) for one in (old, new)]
    assert [part.rates.now.samples_per_s for part in parts] == [10.0, 5.0]
    together = combine(parts, [old, new], scene, []).rates
    assert (together.now.samples_per_s, together.now.window_s) == (pytest.approx(610 / 60, abs=0.001), 60.0)
    assert together.run.samples_per_s == pytest.approx(9010 / 900, abs=0.001)


def test_distributions_of_several_datasets_are_those_of_all_their_samples() -> None:
    """Mean and p95 of all are over every call, not the mean of means; nothing is guessed where nothing is known."""
    scene = Scene(now=NOW, workers=[WORKER])
    quick = Findings(totals(accepted=900), Waiting(), counted(begin=NOW - 90, seconds=90, accepted=10, latency_s=1.0))
    slow = Findings(totals(accepted=100), Waiting(), counted(begin=NOW - 90, seconds=100, accepted=1, latency_s=11.0))
    parts = [dataset_part(one, scene) for one in (quick, slow)]
    assert parts[1].latency.p95_s == pytest.approx(11, rel=0.15)
    together = combine(parts, [quick, slow], scene, []).latency
    assert (together.mean_s, together.count) == (2.0, 1000)
    assert together.p95_s == pytest.approx(11, rel=0.2)
    assert combine([], [], scene, []).latency == Latency()


def test_no_dataset_at_all_sums_to_nothing() -> None:
    """An empty folder is an empty snapshot."""
    assert combine([], [], Scene(now=NOW), []).counts == Counts()
    assert combine([], [], Scene(now=NOW), []).state is State.EMPTY


# Files


def fill(prepared: Path, dataset: str = "Ünï/set", *, accepted: int = 3, pending: int = 2) -> Ledger:
    """Make a dataset folder with that many samples."""
    ledger = Ledger.open(dataset_folder(prepared, dataset))
    manifest.fix_settings(ledger, dataset, GenerationSettings(), {}, new=False)
    ids = [f"s{n}" for n in range(accepted + pending)]
    ledger.commit([Pen(Kind.PENDING, id_, line({"id": id_})) for id_ in ids])
    usage = {"completion_tokens": 10}
    ledger.commit([Pen(Kind.ACCEPTED, i, line({"id": i, "usage": usage}), tokens=10) for i in ids[:accepted]])
    return ledger


def line(value: object) -> bytes:
    """Return one line of JSON."""
    return json.dumps(value).encode() + b"\n"


def test_files_alone_tell_what_is_recorded(tmp_path: Path) -> None:
    """Without Redis, the datasets are found by their manifests under their true names."""
    fill(tmp_path).close()
    snapshot = take_snapshot(ABSENT, tmp_path)
    part = snapshot.datasets["Ünï/set"]
    assert (part.counts.accepted, part.counts.left, part.counts.queued) == (3, 2, None)
    assert part.tokens.total == 30
    assert (part.state, part.eta.reason) == (State.UNKNOWN, "without Redis nobody can tell what is queued")
    assert not snapshot.broker.reachable


def test_a_record_that_a_killed_worker_did_not_index_counts(tmp_path: Path) -> None:
    """A snapshot indexes what was written and mends a torn tail, and says so."""
    with fill(tmp_path) as ledger:
        with ledger.folder.lines(Kind.ACCEPTED).open("ab") as file:
            file.write(line({"id": "s3"}) + b'{"id": "s4", "mess')
        part = take_snapshot(ABSENT, tmp_path).datasets["Ünï/set"]
    assert (part.counts.accepted, part.counts.left) == (4, 1)
    assert any("was torn" in note for note in part.notes)


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """Where the lock cannot be had, every line is read, the folder stays as it is, and a note says why."""
    with fill(tmp_path) as ledger:
        folder = ledger.folder
    with folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(line({"id": "s3"}) + b'{"id": "s4", "mess')
    folder.lock.unlink()
    folder.lock.mkdir()  # nobody, not even root, can open a folder as a lock
    before = folder.lines(Kind.ACCEPTED).read_bytes()
    found, notes = read_totals(folder)
    assert (found.count(Kind.ACCEPTED), found.count(Kind.PENDING)) == (4, 1)
    assert ".lock" in notes[0]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == before


def test_scanning_and_indexing_agree(tmp_path: Path) -> None:
    """The counts by reading equal the counts of the index, with a line that holds a number no answer can have, too."""
    with fill(tmp_path, accepted=40, pending=5) as ledger:
        failed = [Pen(Kind.FAILED, "s40", line({"id": "s40", "reason": "timeout"}), "timeout")]
        ledger.commit(failed)
        foreign = [
            {"id": "s41", "usage": {"completion_tokens": -7}},
            {"id": "s42", "usage": {"completion_tokens": "x"}},
        ]
        with ledger.folder.lines(Kind.ACCEPTED).open("ab") as file:
            file.writelines(map(line, foreign))
        ledger.catch_up()
        scanned = scan_totals(ledger.folder)
        assert scanned == ledger.totals()
        assert scanned.by_kind[Kind.ACCEPTED] == (41, 400)


def test_progress_files_are_whole_and_strict(tmp_path: Path) -> None:
    """progress.json is the dataset's snapshot, progress.jsonl gains one line each time, after a torn one is cut."""
    with fill(tmp_path) as ledger:
        fill(tmp_path, "other").close()
        snapshot = take_snapshot(ABSENT, tmp_path)
        write_progress(ledger, snapshot, at=snapshot.at)
        with ledger.folder.progress_log.open("ab") as file:
            file.write(b'{"schema": 1, "at": 17')
        write_progress(ledger, snapshot, at=snapshot.at)
        latest = parse_strict(ledger.folder.progress.read_bytes())
        lines = ledger.folder.progress_log.read_bytes().splitlines(keepends=True)
    assert list(latest["datasets"]) == ["Ünï/set"]
    assert latest["totals"]["counts"]["samples"] == 5
    points = [parse_strict(each.rstrip(b"\n")) for each in lines]
    assert [(point["schema"], point["accepted"], point["left"], point["tokens"]) for point in points] == 2 * [
        (2, 3, 2, 30)
    ]
    assert math.isclose(points[0]["at"], snapshot.at, abs_tol=0.001)
    assert [point.accepted for point in read_points(ledger.folder)] == [3, 3]


def test_points_of_machines_with_other_clocks_are_in_order(tmp_path: Path) -> None:
    """A point stands at the time that it is given, by Redis, not by its writer, and never before the last one."""
    with fill(tmp_path) as ledger:
        ahead = take_snapshot(ABSENT, tmp_path, now=lambda: NOW + 7200)
        behind = take_snapshot(ABSENT, tmp_path, now=lambda: NOW - 7200)
        for number in range(200):
            write_progress(ledger, behind if number % 2 else ahead, at=NOW + number)
        write_progress(ledger, ahead, at=NOW + 100)
        write_progress(ledger, ahead, at=NOW + 200)
    points = [point.at - NOW for point in read_points(ledger.folder, most=2000)]
    assert points == [*range(200), 199, 200]
    found = read_points(ledger.folder, since=NOW + 30, until=NOW + 39.5)
    assert [point.at - NOW for point in found] == list(range(30, 40))


def test_a_copied_folder_is_not_counted_twice(tmp_path: Path) -> None:
    """A folder whose manifest names another dataset is left out, with a note."""
    fill(tmp_path, "a").close()
    (tmp_path / "a").rename(tmp_path / "b")
    snapshot = take_snapshot(ABSENT, tmp_path)
    assert snapshot.datasets == {}
    assert any("copy of the dataset 'a'" in note for note in snapshot.totals.notes)


def test_an_unknown_dataset_is_wrong_usage(tmp_path: Path) -> None:
    """The message names those that exist, and no folder is made."""
    fill(tmp_path, "a").close()
    with pytest.raises(UsageError, match=r"no dataset 'x' in .*known are: a"):
        take_snapshot(ABSENT, tmp_path, ["x"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
