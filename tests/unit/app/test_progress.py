"""What a snapshot says: the books balance, rates count this run alone, the ETA is honest, the files are whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import manifest
from app.errors import UsageError
from app.index import Tally, Totals
from app.ledger import Ledger, Pen
from app.places import Keys, dataset_folder
from app.progress import read_totals, scan_totals, take_snapshot, write_progress
from app.queue import Queue, Waiting
from app.reckoning import Findings, Scene, combine, count, dataset_part, measure
from app.records import Kind
from app.settings import GenerationSettings
from app.snapshot import Counts, Endpoint, Rate, State
from app.surroundings import clock_time, find_obstacle
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


def tallies(*, start: float, seconds: int, **per_second: int) -> dict[int, dict[str, int]]:
    """Return the same tally for each second."""
    return {int(start) + second: dict(per_second) for second in range(seconds)}


def part_of(
    found: Totals, waiting: Waiting | None = None, *, tally: dict[int, dict[str, int]] | None = None, **scene: Any
) -> Any:
    """Return a dataset's numbers, with one worker running."""
    setting = {"now": NOW, "workers": [WORKER], **scene}
    return dataset_part(Findings(found, waiting, tally or {}), Scene(**setting))


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
    earlier = tallies(start=NOW - 40, seconds=30, accepted=30, tokens=3000)
    part = part_of(totals(accepted=900, pending=100), Waiting(prompts=100, session=NOW), tally=earlier)
    assert (part.rate.samples_per_s, part.eta_s) == (None, None)
    assert part.eta_reason == "no finished sample yet in this run"
    assert (part.percent, part.state) == (90.0, State.RUNNING)


def test_rate_and_eta_count_this_session_alone() -> None:
    """Five seconds into a resume at 10 samples/s, the ETA is the rest over that rate, not over the old one."""
    tally = tallies(start=NOW - 40, seconds=30, accepted=30, tokens=3000)
    tally |= tallies(start=NOW - 5, seconds=5, accepted=10, tokens=1234)
    part = part_of(
        totals(accepted=950, pending=50), Waiting(prompts=50, in_flight=5, session=NOW - 5.4), tally=tally, now=NOW
    )
    assert part.rate == Rate(
        samples_per_s=10.0, tokens_per_s=1234.0, rejected_per_s=0.0, failed_per_s=0.0, window_s=5.0
    )
    assert part.eta_s == 5.0
    assert part.eta_reason is None


def test_failed_samples_are_no_good_rate_but_shorten_the_wait() -> None:
    """The rate of good samples leaves failures out, while the ETA knows that they are settled too."""
    tally = tallies(start=NOW - 10, seconds=10, accepted=4, failed=1, tokens=40)
    part = part_of(totals(accepted=40, failed=10, pending=50), Waiting(prompts=50, session=NOW - 10), tally=tally)
    assert (part.rate.samples_per_s, part.rate.failed_per_s, part.eta_s) == (4.0, 1.0, 10.0)


def test_the_window_is_a_minute_and_grows_for_slow_samples() -> None:
    """A minute with too few finished samples is widened, so that slow answers have a rate too."""
    fast = measure(tallies(start=NOW - 600, seconds=600, accepted=2), session=NOW - 3600, now=NOW)
    slow = measure({int(NOW) - 30 * n: {"accepted": 1} for n in range(1, 20)}, session=NOW - 3600, now=NOW)
    assert (fast.samples_per_s, fast.window_s) == (2.0, 60.0)
    assert (slow.samples_per_s, slow.window_s) == (0.033, 300.0)


def test_a_run_that_has_just_begun_has_no_rate() -> None:
    """One sample in the first half second is not 2 samples per second."""
    assert measure({int(NOW): {"accepted": 1}}, session=NOW, now=NOW + 0.5) == Rate()


def test_without_a_worker_the_rate_is_zero_and_the_eta_unknown() -> None:
    """A queue that nobody works on says so."""
    tally = tallies(start=NOW - 10, seconds=10, accepted=10)
    part = part_of(totals(accepted=100, pending=50), Waiting(prompts=50, session=NOW - 10), tally=tally, workers=[])
    assert (part.state, part.rate.samples_per_s, part.eta_s) == (State.WAITING, 0.0, None)
    assert part.eta_reason == "no worker is running"
    assert any("No worker is running" in note for note in part.notes)


def test_a_dead_server_stalls_the_run_instead_of_slowing_it() -> None:
    """While the only model server is down there is no ETA, and the state says since when."""
    down = Endpoint(name="e", url="http://h:1", state="down", since=NOW - 60, reason="Connection refused")
    obstacle = find_obstacle([WORKER], [down], now=NOW)
    assert obstacle is not None
    assert obstacle.startswith(f"the model server is unreachable since {clock_time(NOW - 60, now=NOW)}: http://h:1")
    tally = tallies(start=NOW - 120, seconds=50, accepted=10)
    waiting = Waiting(prompts=80, in_flight=16, session=NOW - 120)
    part = part_of(totals(accepted=40, pending=80), waiting, tally=tally, obstacle=obstacle)
    assert (part.state, part.eta_s, part.eta_reason) == (State.STALLED, None, obstacle)


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
    tally = tallies(start=NOW - 10, seconds=10, accepted=10)
    part = part_of(totals(accepted=100, pending=8), Waiting(prompts=8, orphaned=8, session=NOW - 10), tally=tally)
    assert (part.counts.queued, part.counts.orphaned, part.eta_s) == (8, 8, None)
    assert any("8 samples are with a worker that died" in note for note in part.notes)


def test_lost_work_says_what_to_do() -> None:
    """After Redis came back empty, what is neither done nor queued is missing."""
    part = part_of(totals(accepted=100, pending=50), Waiting())
    assert (part.state, part.counts.missing, part.eta_s) == (State.INCOMPLETE, 50, None)
    assert "50 samples are neither done nor queued; run producer enqueue again." in part.notes


def test_nothing_to_do_divides_by_nothing() -> None:
    """An empty dataset has no percentage, no mean and no ETA."""
    part = part_of(totals(refused=7), Waiting())
    assert (part.state, part.percent, part.completion_tokens.mean) == (State.EMPTY, None, None)
    assert (part.counts.read, part.eta_s, part.eta_reason) == (7, None, "nothing to do")


def test_only_a_finished_dataset_has_100_percent() -> None:
    """Percentages are rounded down."""
    assert part_of(totals(accepted=99_999, pending=1), Waiting(prompts=1)).percent == 99.9
    done = part_of(totals(accepted=100_000), Waiting())
    assert (done.percent, done.state, done.completion_tokens.mean) == (100.0, State.DONE, 100.0)


def test_a_paused_dataset_does_not_hold_up_the_eta_of_all() -> None:
    """The total's ETA is over what moves; its counts are over everything."""
    scene = Scene(now=NOW, workers=[WORKER])
    tally = tallies(start=NOW - 10, seconds=10, accepted=5)
    moving = dataset_part(
        Findings(totals(accepted=50, pending=50), Waiting(prompts=50, session=NOW - 10), tally), scene
    )
    paused = dataset_part(Findings(totals(pending=90), Waiting(prompts=90, paused="by hand")), scene)
    assert (paused.state, paused.eta_reason) == (State.PAUSED, "paused")
    everything = combine([moving, paused], scene, [])
    assert (everything.counts.samples, everything.counts.left, everything.eta_s) == (190, 140, 10.0)
    assert (everything.state, everything.rate.samples_per_s) == (State.RUNNING, 5.0)
    assert combine([paused], scene, []).eta_reason == "paused"


def test_no_dataset_at_all_sums_to_nothing() -> None:
    """An empty folder is an empty snapshot."""
    assert combine([], Scene(now=NOW), []).counts == Counts()
    assert combine([], Scene(now=NOW), []).state is State.EMPTY


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
    assert part.completion_tokens.total == 30
    assert (part.state, part.eta_reason) == (State.UNKNOWN, "without Redis nobody can tell what is queued")
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
    """The counts by reading equal the counts of the index."""
    with fill(tmp_path, accepted=40, pending=5) as ledger:
        failed = [Pen(Kind.FAILED, "s40", line({"id": "s40", "reason": "timeout"}), "timeout")]
        ledger.commit(failed)
        assert scan_totals(ledger.folder) == ledger.totals()


def test_progress_files_are_whole_and_strict(tmp_path: Path) -> None:
    """progress.json is the dataset's snapshot, progress.jsonl gains one line each time, after a torn one is cut."""
    with fill(tmp_path) as ledger:
        fill(tmp_path, "other").close()
        snapshot = take_snapshot(ABSENT, tmp_path)
        write_progress(ledger, snapshot)
        with ledger.folder.progress_log.open("ab") as file:
            file.write(b'{"schema": 1, "at": 17')
        write_progress(ledger, snapshot)
        latest = parse_strict(ledger.folder.progress.read_bytes())
        lines = ledger.folder.progress_log.read_bytes().splitlines(keepends=True)
    assert list(latest["datasets"]) == ["Ünï/set"]
    assert latest["totals"]["counts"]["samples"] == 5
    assert [parse_strict(each)["counts"]["accepted"] for each in (part.rstrip(b"\n") for part in lines)] == [3, 3]
    assert parse_strict(lines[0].rstrip(b"\n"))["dataset"] == "Ünï/set"
    assert math.isclose(parse_strict(lines[0].rstrip(b"\n"))["at"], snapshot.at)


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
