"""Group commit: one fsync for many slots, nothing told before it is durable, and no trouble loses a record."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import cast

import pytest

from app.errors import DiskFullError, StoreError, UnwritableError
from app.ledger import Ledger, Pen
from app.lock import FolderLock
from app.places import DatasetFolder, Keys, dataset_folder
from app.queue import Queue
from app.records import Kind, Sample
from tests.conftest import RedisFactory
from tests.support.folders import fresh_picture, largest_file, pen, picture
from tests.support.processes import wait_until
from workers import recorder as module
from workers.recorder import Entry, Recorder

DATASET = "d"
_WAIT_S = 20.0


class Desk:
    """A recorder at work, and what it said of the disk."""

    def __init__(self, books: Queue) -> None:
        self.said: list[str | None] = []
        self.recorder = Recorder(books, on_stall=self.said.append)

    def put(self, ledger: Ledger, *pens: Pen, dataset: str = DATASET) -> list[Future[bool]]:
        """Hand records over."""
        entries = [Entry(dataset, ledger, one, Future()) for one in pens]
        for entry in entries:
            self.recorder.put(entry)
        return [entry.recorded for entry in entries]

    def record(self, ledger: Ledger, *pens: Pen) -> list[bool]:
        """Hand records over and wait until they are durable."""
        return [future.result(_WAIT_S) for future in self.put(ledger, *pens)]


@pytest.fixture
def desk(books: Queue, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Return a recorder that tries again quickly."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    made = Desk(books)
    yield made
    made.recorder.stop()


def _put(books: Queue, *ids: str, dataset: str = DATASET) -> None:
    books.put(dataset, [Sample(id=id_, messages=[{"role": "user", "content": id_}]) for id_ in ids])


def _count_fsyncs(monkeypatch: pytest.MonkeyPatch, also: Callable[[], None] = lambda: None) -> list[int]:
    """Return a list that grows by one with every fsync of lines; `also` is called after each."""
    fsyncs: list[int] = []
    original = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        original(descriptor)
        fsyncs.append(descriptor)
        also()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return fsyncs


# Durable


def test_a_record_is_written_indexed_and_its_payload_dropped(
    desk: Desk, books: Queue, ledger: Ledger, folder: DatasetFolder
) -> None:
    """A record that is told as durable is in the file and the index, gone from the work list, and in the rates."""
    _put(books, "a", "b", "c")
    assert desk.record(ledger, pen("a", tokens=7), pen("b", Kind.FAILED, reason="timeout")) == [True, True]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("a", tokens=7).line
    assert picture(ledger) == fresh_picture(folder)
    assert books.waiting_ids(DATASET, ["a", "b", "c"]) == {"c"}
    (second,) = books.tally.look(DATASET).seconds.values()
    assert second == {"accepted": 1, "failed": 1, "tokens": 7}


def test_many_slots_share_one_fsync(
    desk: Desk, ledger: Ledger, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty records that come while the folder is busy are made durable by two fsyncs at most."""
    fsyncs = _count_fsyncs(monkeypatch)
    with ledger.locked():
        futures = desk.put(ledger, *(pen(f"s{number}") for number in range(50)))
        inbox = desk.recorder._writers[ledger].inbox
        wait_until(lambda: inbox.qsize() < 50, _WAIT_S, "a writer that has begun with the first")
        assert not any(future.done() for future in futures)
    assert all(future.result(_WAIT_S) for future in futures)
    assert 1 <= len(fsyncs) <= 2
    assert folder.lines(Kind.ACCEPTED).read_bytes().count(b"\n") == 50


def test_nothing_is_told_before_it_is_on_disk(
    desk: Desk, ledger: Ledger, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a task hears that its record is durable, its whole line has been in the file at the last fsync."""
    synced = [0]

    def note() -> None:
        synced[0] = folder.lines(Kind.ACCEPTED).stat().st_size

    _count_fsyncs(monkeypatch, also=note)
    seen: list[tuple[bytes, int]] = []
    heard = threading.Semaphore(0)

    def look(line: bytes) -> Callable[[Future[bool]], None]:
        def hear(_future: Future[bool]) -> None:
            seen.append((line, folder.lines(Kind.ACCEPTED).read_bytes()[: synced[0]].find(line)))
            heard.release()

        return hear

    for number in range(20):
        one = pen(f"s{number}")
        entry = Entry(DATASET, ledger, one, Future())
        entry.recorded.add_done_callback(look(one.line))
        desk.recorder.put(entry)
    for _ in range(20):
        assert heard.acquire(timeout=_WAIT_S)
    assert len(seen) == 20
    assert all(offset >= 0 for _line, offset in seen)


def test_a_sample_is_recorded_once(desk: Desk, books: Queue, ledger: Ledger, folder: DatasetFolder) -> None:
    """A second record of an id is not written, whether in the same group or later, and its payload is dropped too."""
    _put(books, "a")
    with ledger.locked():
        futures = desk.put(ledger, pen("z"), pen("a"), pen("a", content="Another."))
    assert [future.result(_WAIT_S) for future in futures] == [True, True, False]
    _put(books, "a")
    assert desk.record(ledger, pen("a")) == [False]
    assert books.waiting_ids(DATASET, ["a"]) == set()
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("z").line + pen("a").line


def test_datasets_do_not_mix(desk: Desk, books: Queue, ledger: Ledger, prepared: Path) -> None:
    """Records of several datasets in one group go to their own folders and leave their own work lists."""
    books.register("e", "f" * 16, {})
    for dataset in ("d", "e"):
        _put(books, "a", "b", dataset=dataset)
    with Ledger.open(dataset_folder(prepared, "e")) as other:
        with ledger.locked():
            futures = desk.put(ledger, pen("x"))
            futures += desk.put(other, pen("a"), dataset="e") + desk.put(ledger, pen("b"))
        assert all(future.result(_WAIT_S) for future in futures)
        assert {id_ for id_, _entry in other.entries()} == {"a"}
    assert {id_ for id_, _entry in ledger.entries()} == {"b", "x"}
    assert books.waiting_ids("d", ["a", "b"]) == {"a"}
    assert books.waiting_ids("e", ["a", "b"]) == {"b"}


def test_a_torn_tail_is_mended_and_told(
    desk: Desk, ledger: Ledger, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that a dead worker left behind are moved away before the next line, and the log says so."""
    ledger.commit([pen("a")])
    with folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(b'{"id": "torn')
    assert desk.record(ledger, pen("b")) == [True]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("a").line + pen("b").line
    assert "was torn: 12 bytes" in caplog.text


# A disk that refuses


def test_a_full_disk_holds_the_records(
    desk: Desk, ledger: Ledger, folder: DatasetFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """While the disk is full finished records wait, nobody is told that they are durable, and then all are written."""
    assert desk.record(ledger, pen("a", content="x" * 2**20)) == [True]
    with largest_file(2**20 + 5000):
        futures = desk.put(ledger, pen("b", content="y" * 9000), pen("c"))
        wait_until(lambda: desk.said, what="a word on the disk")
        assert not wait(futures, timeout=0.3).done
        assert "raw_responses.jsonl cannot grow: File too large" in str(desk.recorder.stalled)
        assert "finished records of d wait in memory" in str(desk.recorder.stalled)
    assert [future.result(_WAIT_S) for future in futures] == [True, True]
    assert desk.recorder.stalled is None
    first, *_more, last = desk.said
    assert (first is not None, last, len(desk.said)) == (True, None, 2)
    assert [record.levelname for record in caplog.records if record.name == "workers.recorder"] == ["ERROR", "WARNING"]
    assert picture(ledger) == fresh_picture(folder)


def test_a_worker_that_ends_on_a_full_disk_says_so(desk: Desk, ledger: Ledger) -> None:
    """At the worker's end a record that the disk still refuses is told as an error, so that its ticket goes back."""
    desk.record(ledger, pen("a", content="x" * 2**20))
    with largest_file(2**20 + 5000):
        (future,) = desk.put(ledger, pen("b", content="y" * 9000))
        wait_until(lambda: desk.said, what="a word on the disk")
        desk.recorder.stop()
        with pytest.raises(StoreError, match="cannot grow"):
            future.result(_WAIT_S)


def test_a_folder_of_turns_that_refuses_holds_back_no_record(desk: Desk, ledger: Ledger, folder: DatasetFolder) -> None:
    """While turns of conversations cannot be written, finished records of the same dataset still are."""
    with Ledger.open(folder.turns("f" * 16)) as turns:
        turns.folder.lines(Kind.ACCEPTED).mkdir()
        turn = Entry(DATASET, turns, pen("a#turn1"), Future())
        desk.recorder.put(turn)
        wait_until(lambda: desk.recorder.stalled, what="a word on the folder of turns")
        assert "Is a directory" in str(desk.recorder.stalled)
        assert str(desk.recorder.stalled).endswith(" 1 finished turn of d waits in memory.")
        assert desk.record(ledger, pen("b")) == [True]
        assert (turn.recorded.done(), desk.recorder.holds(DATASET)) == (False, True)
        turns.folder.lines(Kind.ACCEPTED).rmdir()
        assert turn.recorded.result(_WAIT_S) is True
        assert desk.recorder.stalled is None


def test_steps_can_say_that_the_disk_is_full(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """The house is shut while any step says that the disk is full, and opens when the last one takes it back."""
    recorder = desk.recorder
    recorder.stall(DATASET, "open", DiskFullError("full."))
    recorder.stall(DATASET, "open", DiskFullError("full."))
    recorder.stall("e", "write", DiskFullError("no space."))
    assert (recorder.stalled, recorder.shut, recorder.waits({"other"})) == ("full.", True, True)
    recorder.stall(DATASET, "open", None)
    assert (recorder.stalled, recorder.shut) == ("no space.", True)
    recorder.stall("e", "write", None)
    recorder.stall("e", "write", None)
    assert desk.said == ["full.", None]
    assert [record.levelname for record in caplog.records if record.name == "workers.recorder"] == ["ERROR", "WARNING"]


def test_a_folder_that_refuses_holds_its_own_dataset_alone(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A folder's trouble is told once and holds that dataset; the house stays open for the others."""
    recorder = desk.recorder
    for step in ("open", "write", "open"):
        recorder.stall(DATASET, step, UnwritableError("no rights."))
    assert (recorder.stalled, recorder.shut, desk.said) == ("no rights.", False, [])
    assert (recorder.holds(DATASET), recorder.holds("e")) == (True, False)
    assert [recorder.waits(names) for names in ({DATASET}, {DATASET, "e"}, set[str]())] == [True, False, True]
    recorder.stall(DATASET, "write", None)
    assert (recorder.holds(DATASET), recorder.holds(DATASET, besides="open")) == (True, False)
    recorder.stall(DATASET, "open", None)
    assert (recorder.holds(DATASET), recorder.stalled) == (False, None)
    assert caplog.text.count("no rights. No new request is sent for dataset d.") == 1
    assert caplog.text.count("The folder of dataset d takes records again") == 1


def test_a_folder_that_nobody_tries_again_is_forgotten(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose tickets went elsewhere is not told of for ever."""
    monkeypatch.setattr(module, "_FORGET_S", 0.1)
    desk.recorder.stall(DATASET, "open", UnwritableError("no rights."))
    wait_until(lambda: desk.recorder.stalled is None, what="a folder that is forgotten")
    assert not desk.recorder.holds(DATASET)


def test_a_locked_folder_holds_back_no_other_datasets_records(
    desk: Desk, books: Queue, folder: DatasetFolder, prepared: Path
) -> None:
    """While one folder is locked its records wait, and those of another dataset become durable meanwhile."""
    books.register("e", "f" * 16, {})
    with Ledger.open(folder, patience_s=0.2) as one, Ledger.open(dataset_folder(prepared, "e")) as other:
        with FolderLock(folder.lock).held():
            (held,) = desk.put(one, pen("a"))
            wait_until(lambda: desk.recorder.holds(DATASET), what="a locked folder")
            for number in range(5):
                (recorded,) = desk.put(other, pen(f"s{number}"), dataset="e")
                assert recorded.result(_WAIT_S)
            assert (held.done(), desk.said, desk.recorder.shut) == (False, [], False)
            assert "1 finished record of d waits in memory" in str(desk.recorder.stalled)
        assert held.result(_WAIT_S)
    assert desk.recorder.stalled is None


def test_a_bug_fails_its_group_and_not_the_writer(desk: Desk, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error reaches the tasks that wait, and the records after it are written."""
    strange = cast("Kind", "strange")
    (future,) = desk.put(ledger, pen("a")._replace(kind=strange))
    with pytest.raises(KeyError):
        future.result(_WAIT_S)
    assert "1 records could not be written" in caplog.text
    assert desk.record(ledger, pen("b")) == [True]


# Ends


def test_what_came_in_is_written_before_the_end(desk: Desk, ledger: Ledger, folder: DatasetFolder) -> None:
    """Records that were handed over before the worker ends are durable when `stop` returns."""
    futures = desk.put(ledger, *(pen(f"s{number}") for number in range(30)))
    desk.recorder.stop()
    assert all(future.done() for future in futures)
    assert folder.lines(Kind.ACCEPTED).read_bytes().count(b"\n") == 30


# Redis


def test_redis_away_holds_nothing_back(
    new_redis: RedisFactory, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are written and told as durable without Redis, which hears of them when it is back."""
    monkeypatch.setattr(module, "_RETRY_S", 0.05)
    server = new_redis(aof=True)
    books = Queue(server.client(), Keys("t:"))
    _put(books, "a", "b", "c", "left")
    ledger.commit([pen("c")])
    desk = Desk(books)
    try:
        server.kill()
        assert desk.record(ledger, pen("a", tokens=3)) == [True]
        assert desk.record(ledger, pen("b"), pen("c")) == [True, False]
        server.start()
        wait_until(lambda: books.depth(DATASET) == 1, what="an empty work list")
        assert books.waiting_ids(DATASET, ["a", "b", "c", "left"]) == {"left"}
        tallies: Sequence[dict[str, int]] = list(books.tally.look(DATASET).seconds.values())
        assert sum(tally.get("accepted", 0) for tally in tallies) == 2
    finally:
        desk.recorder.stop()
