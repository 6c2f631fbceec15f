"""Judging anew moves exactly the records whose verdict changes, all at once, and loses none."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import jsonl, manifest
from app.errors import DiskFullError, StoreError, UsageError
from app.ledger import Ledger, Pen
from app.lock import FolderLock
from app.places import Keys, dataset_folder
from app.queue import Queue
from app.records import Completion, Kind, KnownSample, Record, Source, Usage, encode_line
from app.settings import GenerationSettings
from app.verdict import Rules, judge
from producer import reclassify as module
from producer.reclassify import Reclassified, reclassify
from producer.verify import verify
from tests.support.folders import fresh_picture, picture
from tests.support.redis_server import absent_redis

_D = "d"
NONE = Rules()
LOOP = "and so on, " * 500


def answer(id_: str, tokens: int, *, round_: int = 0, at: float = 0.0, rules: Rules = NONE, **fields: Any) -> Pen:
    """Return a worker's line of an answer that was judged by those rules."""
    said = {"content": f"Answer of {id_}.", "finish_reason": "stop", "usage": Usage(completion_tokens=tokens), **fields}
    verdict = judge(Completion(**said), rules)
    record = Record(
        id=id_,
        dataset=_D,
        verdict=verdict.kind,
        reason=verdict.reason,
        source=Source(row=1),
        messages=[{"role": "user", "content": id_}],
        sampling={},
        settings="0" * 16,
        round=round_,
        finished_at=at or float(tokens),
        **said,
    )
    return Pen(verdict.kind, id_, encode_line(record), verdict.reason or "", round_, tokens)


def failure(id_: str, *, round_: int = 0) -> Pen:
    """Return the line of a sample that was given up."""
    record = Record(
        id=id_,
        dataset=_D,
        verdict=Kind.FAILED,
        reason="timeout",
        source=Source(row=1),
        messages=[],
        sampling={},
        settings="0" * 16,
        round=round_,
    )
    return Pen(Kind.FAILED, id_, encode_line(record), "timeout", round_)


def know(ledger: Ledger, *ids: str) -> None:
    """Write samples down as enqueue does."""
    ledger.commit([Pen(Kind.PENDING, id_, encode_line(KnownSample(id=id_))) for id_ in ids])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return a dataset folder with settings."""
    with Ledger.open(dataset_folder(tmp_path, _D)) as opened:
        manifest.fix_settings(opened, _D, GenerationSettings(), {}, new=False)
        yield opened


def kinds(ledger: Ledger) -> dict[str, str]:
    """Return what each id is, and why."""
    return {id_: f"{entry.kind} {entry.reason}".strip() for id_, entry in ledger.entries()}


def ids_of(ledger: Ledger, kind: Kind) -> list[str]:
    """Return the ids of a file's lines in their order."""
    path = ledger.folder.lines(kind)
    return [json.loads(line)["id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def check(ledger: Ledger) -> None:
    """Assert that the index is true, that no half file is left, and that verify finds nothing wrong."""
    assert picture(ledger) == fresh_picture(ledger.folder)
    assert not [path for path in ledger.folder.path.iterdir() if path.name.endswith((".tmp", "exchange.json"))]
    report = verify(Queue(absent_redis(), Keys("x:")), ledger, _D, look_again_s=0.0)
    problems = [one for one in report.problems if "without Redis nobody can tell" not in one]
    assert not problems


def changes(found: Reclassified) -> dict[tuple[str, str], int]:
    """Return the verdicts that are others now."""
    return {pair: n for pair, n in found.changes.items() if pair[0] != pair[1]}


def test_records_move_to_where_the_new_rules_want_them(ledger: Ledger) -> None:
    """Short answers are rejected and come back with weaker rules, in the order in which they were finished."""
    know(ledger, *"abcde")
    ledger.commit([answer("a", 10), answer("b", 20), answer("c", 30), answer("d", 40)])
    before = ledger.folder.lines(Kind.ACCEPTED).read_bytes()

    found = reclassify(ledger, _D, {"min_completion_tokens": 25})
    assert changes(found) == {("accepted", "rejected: too_short"): 2}
    assert (found.changed, found.unsound, found.same_settings) == (2, 0, False)
    assert kinds(ledger) == {
        **dict.fromkeys("ab", "rejected too_short"),
        **dict.fromkeys("cd", "accepted"),
        "e": "pending",
    }
    record = json.loads(ledger.folder.lines(Kind.REJECTED).read_bytes().splitlines()[0])
    assert (record["verdict"], record["reason"], record["content"]) == ("rejected", "too_short", "Answer of a.")
    check(ledger)

    back = reclassify(ledger, _D, {"min_completion_tokens": 0})
    assert changes(back) == {("rejected: too_short", "accepted"): 2}
    assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == before
    assert ids_of(ledger, Kind.REJECTED) == []
    check(ledger)


def test_a_reason_may_change_in_its_place(ledger: Ledger) -> None:
    """A record that another rule rejects stays rejected and names that rule."""
    know(ledger, "a", "b")
    ledger.commit([answer("a", 10, finish_reason="length"), answer("b", 90, finish_reason="length")])
    found = reclassify(ledger, _D, {"keep_truncated": True, "min_completion_tokens": 50})
    assert changes(found) == {
        ("rejected: truncated", "rejected: too_short"): 1,
        ("rejected: truncated", "accepted"): 1,
    }
    assert kinds(ledger) == {"a": "rejected too_short", "b": "accepted"}
    check(ledger)


def test_loops_and_think_leaks(ledger: Ledger) -> None:
    """The rules for repetition and think tags work on records, too."""
    know(ledger, "loop", "leak", "fine")
    ledger.commit(
        [answer("loop", 900, reasoning=LOOP), answer("leak", 9, content="<think>x</think>y"), answer("fine", 9)]
    )
    reclassify(ledger, _D, {"max_repetition": 0.5, "allow_think_leak": True})
    assert kinds(ledger) == {"loop": "rejected repetition", "leak": "accepted", "fine": "accepted"}
    reclassify(ledger, _D, {"max_repetition": None, "allow_think_leak": False})
    assert kinds(ledger) == {"loop": "accepted", "leak": "rejected think_leak", "fine": "accepted"}
    check(ledger)


def test_of_several_rounds_the_best_and_newest_counts(ledger: Ledger) -> None:
    """An accepted record stays; else the newest round that passes is accepted; lines of other rounds are history."""
    strict = Rules(min_completion_tokens=100)
    know(ledger, *"abcd")
    ledger.commit([answer(id_, 60, rules=strict, at=1.0) for id_ in "abcd"])
    ledger.commit([answer("a", 150, round_=1, rules=strict, at=2.0), answer("b", 40, round_=1, rules=strict, at=2.0)])
    ledger.commit([answer("c", 70, round_=1, rules=strict, at=2.0), failure("d", round_=1)])
    assert kinds(ledger) == {
        "a": "accepted",
        "b": "rejected too_short",
        "c": "rejected too_short",
        "d": "rejected too_short",
    }

    reclassify(ledger, _D, {"min_completion_tokens": 50})
    assert kinds(ledger) == dict.fromkeys("abcd", "accepted")
    accepted = [json.loads(line) for line in ledger.folder.lines(Kind.ACCEPTED).read_bytes().splitlines()]
    assert {one["id"]: one["usage"]["completion_tokens"] for one in accepted} == {"a": 150, "b": 60, "c": 70, "d": 60}
    assert sorted(ids_of(ledger, Kind.REJECTED)) == ["a", "b", "c"]
    check(ledger)

    found = reclassify(ledger, _D, {"min_completion_tokens": 100})
    assert changes(found) == {("accepted", "rejected: too_short"): 3}
    assert kinds(ledger)["a"] == "accepted"
    check(ledger)

    found = reclassify(ledger, _D, {"min_completion_tokens": 200})
    assert changes(found) == {("accepted", "rejected: too_short"): 1}
    assert set(kinds(ledger).values()) == {"rejected too_short"}
    found = reclassify(ledger, _D, {"min_completion_tokens": 65})
    assert changes(found) == {("rejected: too_short", "accepted"): 2}
    check(ledger)


def test_an_accepted_record_may_be_replaced_by_an_earlier_one(ledger: Ledger) -> None:
    """Where the rules turn around, an id stays accepted by its other record, and is counted so."""
    know(ledger, "a")
    ledger.commit([answer("a", 90, content="<think>x</think>y", at=1.0), answer("a", 10, round_=1, at=2.0)])
    found = reclassify(ledger, _D, {"min_completion_tokens": 50, "allow_think_leak": True})
    assert dict(found.changes) == {("accepted", "accepted"): 1}
    assert kinds(ledger) == {"a": "accepted"}
    assert ids_of(ledger, Kind.ACCEPTED) == ids_of(ledger, Kind.REJECTED) == ["a"]
    check(ledger)


def test_what_is_no_sound_record_stays_where_it_is(ledger: Ledger) -> None:
    """Lines that cannot be read, or belong elsewhere, are counted and kept byte for byte."""
    know(ledger, "a")
    ledger.commit([answer("a", 10)])
    path = ledger.folder.lines(Kind.ACCEPTED)
    odd = b'\xff\xfe\n\n{"id":"z","verdict":"rejected","dataset":"d"}\n{"id":"y","verdict":"accepted","dataset":"e"}\n'
    path.write_bytes(odd + path.read_bytes())
    found = reclassify(ledger, _D, {"min_completion_tokens": 99})
    assert found.unsound == 4
    assert path.read_bytes() == odd
    assert kinds(ledger)["a"] == "rejected too_short"


def test_a_dry_run_changes_nothing(ledger: Ledger) -> None:
    """With dry_run the same is told, and no file is another afterwards."""
    know(ledger, *"ab")
    ledger.commit([answer("a", 10), answer("b", 99)])
    before = {path.name: path.read_bytes() for path in ledger.folder.path.glob("*.json*")}
    told = reclassify(ledger, _D, {"min_completion_tokens": 50}, dry_run=True)
    assert {path.name: path.read_bytes() for path in ledger.folder.path.glob("*.json*")} == before
    assert reclassify(ledger, _D, {"min_completion_tokens": 50}).changes == told.changes


def test_rules_that_change_no_record_are_written_down(ledger: Ledger) -> None:
    """The manifest gets the rules although no file is written anew; the same rules once more add nothing."""
    know(ledger, "a")
    ledger.commit([answer("a", 99)])
    inode = ledger.folder.lines(Kind.ACCEPTED).stat().st_ino
    for same in (False, True):
        assert reclassify(ledger, _D, {"min_completion_tokens": 50}).same_settings is same
    known = manifest.read(ledger)
    assert known is not None
    assert [entry.content["min_completion_tokens"] for entry in known.settings] == [0, 50]
    assert ledger.folder.lines(Kind.ACCEPTED).stat().st_ino == inode


def test_half_files_of_one_that_was_killed_are_removed(ledger: Ledger) -> None:
    """The next reclassify removes them, also where no record changes; a dry run leaves them."""
    know(ledger, "a")
    ledger.commit([answer("a", 99)])
    left = [jsonl.temporary_of(ledger.folder.lines(kind)) for kind in (Kind.ACCEPTED, Kind.REJECTED)]
    for path in left:
        path.write_bytes(b"half")
    reclassify(ledger, _D, {}, dry_run=True)
    assert all(path.exists() for path in left)
    reclassify(ledger, _D, {})
    check(ledger)


def test_nothing_is_left_of_a_dataset_without_records(ledger: Ledger) -> None:
    """A dataset that has no answer yet takes new rules, and no file is made."""
    know(ledger, "a")
    assert reclassify(ledger, _D, {"min_completion_tokens": 50}).changed == 0
    assert not ledger.folder.lines(Kind.ACCEPTED).exists()
    assert not ledger.folder.lines(Kind.REJECTED).exists()


def _after_judging(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Do something each time when the records are judged and not written yet: workers go on meanwhile."""
    original, calls = module._Job._rewrite, [0]

    def rewrite(job: Any, *words: Any, waits: bool) -> None:
        calls[0] += 1
        if not waits:
            act(calls[0])
        original(job, *words, waits=waits)

    monkeypatch.setattr(module._Job, "_rewrite", rewrite)


def test_records_that_come_in_meanwhile_are_judged_too(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers write while the files are copied is in the new files, judged by the new rules."""
    know(ledger, *"abcdef")
    ledger.commit([answer("a", 10), answer("b", 99), answer("f", 20, rules=Rules(min_completion_tokens=50))])

    def write(_number: int) -> None:
        with Ledger.open(ledger.folder) as worker:
            worker.commit([answer("c", 11), answer("d", 98), answer("e", 5, finish_reason="length")])
            worker.commit([answer("f", 20, round_=1, rules=Rules(min_completion_tokens=50))])

    _after_judging(monkeypatch, write)
    found = reclassify(ledger, _D, {"min_completion_tokens": 50})
    assert sum(found.changes.values()) == 6
    assert kinds(ledger) == {
        **dict.fromkeys("acf", "rejected too_short"),
        **dict.fromkeys("bd", "accepted"),
        "e": "rejected truncated",
    }
    check(ledger)


def test_a_retry_that_comes_in_meanwhile_gives_no_second_accepted_record(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that is about to be accepted, and is accepted by a worker at that moment, has one accepted line."""
    strict = Rules(min_completion_tokens=50)
    know(ledger, *"abcdef")
    ledger.commit([answer(id_, 20, rules=strict, at=1.0) for id_ in "abcdef"])

    def write(number: int) -> None:
        with Ledger.open(ledger.folder) as worker:
            worker.commit([answer("abcdef"[number - 1], 99, round_=1, rules=strict, at=2.0)])

    _after_judging(monkeypatch, write)
    reclassify(ledger, _D, {"min_completion_tokens": 10})
    assert kinds(ledger) == dict.fromkeys("abcdef", "accepted")
    assert sorted(ids_of(ledger, Kind.ACCEPTED)) == list("abcdef")
    check(ledger)


def test_a_file_that_is_replaced_meanwhile_is_judged_again(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody put into the place of a file while it was copied is what counts."""
    know(ledger, *"ab")
    ledger.commit([answer("a", 10)])
    other = answer("b", 10).line

    def replace(number: int) -> None:
        if number == 1:
            new = ledger.folder.path / "new"
            new.write_bytes(other)
            new.replace(ledger.folder.lines(Kind.ACCEPTED))

    _after_judging(monkeypatch, replace)
    reclassify(ledger, _D, {"min_completion_tokens": 50})
    assert kinds(ledger) == {"a": "pending", "b": "rejected too_short"}
    check(ledger)


def test_what_cannot_be_done_is_said_and_nothing_is_touched(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated ids, a repair at work, hidden states, too little space: one sentence each, files as they were."""
    know(ledger, *"ab")
    line = answer("a", 10).line
    ledger.commit([answer("a", 10)])
    rules = {"min_completion_tokens": 50}
    with FolderLock(ledger.folder.repair_lock).held(), pytest.raises(StoreError, match="repair or another reclassify"):
        reclassify(ledger, _D, rules)
    with pytest.raises(UsageError, match="hidden states"):
        reclassify(ledger, "d.hidden", rules)
    with pytest.raises(StoreError, match="copy of the dataset 'd'"):
        reclassify(ledger, "e", rules)
    monkeypatch.setattr("producer.rewrite.MIN_FREE_DISK_BYTES", 2**60)
    with pytest.raises(DiskFullError, match=r"free some space and run producer reclassify again"):
        reclassify(ledger, _D, rules)
    with ledger.folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(line)
    with pytest.raises(StoreError, match=r"repeat an id; run producer verify d --repair first"):
        reclassify(ledger, _D, rules)
    assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == 2 * line
    assert not list(ledger.folder.path.glob(".*.tmp"))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 9), st.sampled_from(["stop", "length"]), st.booleans()), max_size=14
    ),
    st.lists(st.tuples(st.integers(0, 10), st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_any_sequence_keeps_every_id_once(
    answers: list[tuple[int, int, str, bool]], sequence: list[tuple[int, bool, bool]]
) -> None:
    """Whatever is recorded in whatever rounds, and however often it is judged anew, no line is lost and none doubled.

    An id is accepted exactly if one of its records passes the last rules.
    """
    folder = Path(tempfile.mkdtemp())
    try:
        with Ledger.open(dataset_folder(folder, _D)) as ledger:
            manifest.fix_settings(ledger, _D, GenerationSettings(), {}, new=False)
            know(ledger, *(f"s{number}" for number in range(8)))
            for number, (who, tokens, ending, leak) in enumerate(answers):
                said = {"finish_reason": ending, "content": "<think>" if leak else "text"}
                made = answer(
                    f"s{who}", tokens, round_=number, at=float(number + 1), rules=Rules(min_completion_tokens=5), **said
                )
                ledger.commit([made])
            lines = _lines(ledger)
            for least, cut, leaks in sequence:
                wanted = {"min_completion_tokens": least, "keep_truncated": cut, "allow_think_leak": leaks}
                found = reclassify(ledger, _D, wanted)
                assert _lines(ledger) == lines
                answered = [id_ for id_, entry in ledger.entries(Kind.ACCEPTED, Kind.REJECTED)]
                assert sum(found.changes.values()) == len(answered)
                assert all(n > 0 for n in found.changes.values())
                good = {id_ for id_, said in _answers(ledger) if judge(said, Rules(**wanted)).kind is Kind.ACCEPTED}
                assert {id_ for id_, _entry in ledger.entries(Kind.ACCEPTED)} == good
                assert sorted(ids_of(ledger, Kind.ACCEPTED)) == sorted(good)
                check(ledger)
    finally:
        shutil.rmtree(folder)


def _answers(ledger: Ledger) -> Iterator[tuple[str, Completion]]:
    for kind in (Kind.ACCEPTED, Kind.REJECTED):
        path = ledger.folder.lines(kind)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            record = json.loads(line)
            usage = Usage(completion_tokens=record["usage"]["completion_tokens"])
            yield (
                record["id"],
                Completion(content=record["content"], finish_reason=record["finish_reason"], usage=usage),
            )


def _lines(ledger: Ledger) -> Counter[str]:
    """Return every answer's line without what may change."""
    lines = Counter[str]()
    for kind in (Kind.ACCEPTED, Kind.REJECTED):
        path = ledger.folder.lines(kind)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            record = json.loads(line)
            assert record.pop("verdict") == kind
            assert (record.pop("reason") is None) == (kind is Kind.ACCEPTED)
            lines[json.dumps(record)] += 1
    return lines


def test_memory_does_not_grow_with_the_records(ledger: Ledger) -> None:
    """A file of 8,000 records is judged and written with less memory than it is long."""
    import tracemalloc  # noqa: PLC0415 slows everything down while it is on

    shuffled = random.Random(1)
    know(ledger, *(f"s{number}" for number in range(8_000)))
    ledger.commit([answer(f"s{number}", shuffled.randrange(1, 99), content="x" * 2800) for number in range(8_000)])
    assert ledger.folder.lines(Kind.ACCEPTED).stat().st_size > 25_000_000
    tracemalloc.start()
    reclassify(ledger, _D, {"min_completion_tokens": 50})
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16_000_000
