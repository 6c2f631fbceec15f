"""A dataset folder's memory: what is written, once."""

from __future__ import annotations

import random
import threading

from app.index import Tally
from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from tests.support.folders import fill, pen
from tests.support.jsonl_check import check_jsonl


def test_open_makes_the_folder(folder: DatasetFolder) -> None:
    """A folder that is missing, with its parents, is made, and holds nothing but what is needed."""
    with Ledger.open(folder) as opened:
        assert opened.totals().samples == 0
        assert {path.name.partition("-")[0] for path in folder.path.iterdir()} <= {"index.sqlite", ".lock"}


def test_a_committed_line_is_there_as_it_was(ledger: Ledger, folder: DatasetFolder) -> None:
    """A line is found in its file, byte by byte, and through its entry."""
    lines = [pen("a", content="é\u2028"), pen("b", Kind.REJECTED, reason="empty"), pen("c", Kind.FAILED, reason="x")]
    assert ledger.commit(lines).new == [True] * 3
    for line in lines:
        assert folder.lines(line.kind).read_bytes() == line.line
        assert ledger.read(ledger.look_up([line.id])[line.id]) + b"\n" == line.line


def test_an_id_is_recorded_once(ledger: Ledger, folder: DatasetFolder) -> None:
    """Committing an id again, later or in the same group, writes nothing."""
    assert ledger.commit([pen("a", content="1"), pen("a", content="2")]).new == [True, False]
    assert ledger.commit([pen("b"), pen("a", content="3"), pen("a", Kind.FAILED, reason="x")]).new == [
        True,
        False,
        False,
    ]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("a", content="1").line + pen("b").line
    assert not folder.lines(Kind.FAILED).exists()


def test_pending_and_refused_are_written_once(ledger: Ledger) -> None:
    """An id that enqueue knows already, in whatever state, is not written as pending again."""
    lines = [pen("a", Kind.PENDING), pen("row1", Kind.REFUSED)]
    assert ledger.commit(lines).new == [True, True]
    assert ledger.commit(lines).new == [False, False]
    ledger.commit([pen("a")])
    assert ledger.commit([pen("a", Kind.PENDING)]).new == [False]


def test_a_retry_counts_by_its_round(ledger: Ledger) -> None:
    """A failed or rejected sample takes one more line per round, whatever its outcome; a redelivery takes none."""
    first = pen("a", Kind.FAILED, reason="timeout")
    second = pen("a", Kind.REJECTED, reason="empty", round_=1)
    third = pen("a", round_=2, tokens=9)
    assert [ledger.commit([line, line]).new for line in (first, second, third)] == [[True, False]] * 3
    assert [ledger.commit([line]).new for line in (first, second, third)] == [[False]] * 3
    assert ledger.look_up(["a"])["a"][:3] == (Kind.ACCEPTED, "", 2)
    assert ledger.totals().by_kind == {Kind.ACCEPTED: Tally(1, 9)}


def test_a_failed_retry_of_a_rejected_sample_leaves_it_rejected(ledger: Ledger) -> None:
    """A text that was kept counts more than a later failure to get another, and the round moves on."""
    ledger.commit([pen("a", Kind.REJECTED, reason="empty", tokens=3)])
    assert ledger.commit([pen("a", Kind.FAILED, reason="timeout", round_=1)]).new == [True]
    assert ledger.look_up(["a"])["a"][:3] == (Kind.REJECTED, "empty", 1)
    assert ledger.commit([pen("a", Kind.FAILED, reason="timeout", round_=1)]).new == [False]


def test_totals_are_exact(ledger: Ledger) -> None:
    """Counts, tokens and reasons are those of the lines that count."""
    fill(ledger)
    totals = ledger.totals()
    assert totals.by_kind == {
        Kind.REFUSED: Tally(1, 0),
        Kind.PENDING: Tally(2, 0),
        Kind.FAILED: Tally(1, 0),
        Kind.REJECTED: Tally(1, 2),
        Kind.ACCEPTED: Tally(4, 24),
    }
    assert totals.by_reason == {
        (Kind.REFUSED, "no_prompt"): 1,
        (Kind.FAILED, "timeout"): 1,
        (Kind.REJECTED, "empty"): 1,
    }
    assert (totals.samples, totals.recorded) == (8, 6)
    assert [id_ for id_, _entry in ledger.entries(Kind.PENDING)] == ["s6", "s7"]


def test_threads_share_a_ledger(ledger: Ledger, folder: DatasetFolder) -> None:
    """Threads that commit overlapping ids through one ledger write each id exactly once."""
    won: list[str] = []

    def write(seed: int) -> None:
        ids = random.Random(seed).sample(range(60), 60)
        for start in range(0, 60, 7):
            lines = [pen(f"s{number}") for number in ids[start : start + 7]]
            new = ledger.commit(lines).new
            won.extend(line.id for line, fresh in zip(lines, new, strict=True) if fresh)
            ledger.look_up([line.id for line in lines])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(check_jsonl(folder.lines(Kind.ACCEPTED)).ids) == sorted(f"s{n}" for n in range(60))
