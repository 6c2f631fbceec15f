"""verify --repair mends files, index and Redis' books, says what it did, and deletes nothing."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app import broker as app_broker
from app import manifest
from app.errors import StoreError
from app.ledger import Ledger, Pen
from app.lock import FolderLock
from app.places import Keys, dataset_folder
from app.queue import Queue
from app.records import Kind, KnownSample, Sample, Source, encode_line
from producer.accounts import Report
from producer.export.base import Head
from producer.export.selection import select
from producer.verify import verify
from tests.conftest import Broker
from tests.support.folders import fresh_picture, largest_file, mounted, picture
from tests.support.redis_server import absent_redis
from tests.support.repairs import (
    DATASET,
    append,
    begin,
    ids,
    know,
    known_line,
    mend,
    publish,
    put,
    quarantined,
    record,
    record_line,
    tickets,
)
from tests.unit.app.test_extraction import plan
from tests.unit.producer.test_states import extracted

HIDDEN = "chat.hidden"
ABSENT = Queue(absent_redis(), Keys("x:"))
"""The queue of a Redis that does not answer."""


@pytest.fixture
def queue(broker: Broker) -> Iterator[Queue]:
    """Return the test's work list."""
    client = app_broker.connect(app_broker.parse(broker.url))
    yield Queue(client, Keys(broker.key_prefix))
    client.connection_pool.disconnect()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return an empty dataset folder with a manifest."""
    with Ledger.open(dataset_folder(tmp_path, DATASET)) as opened:
        begin(opened)
        yield opened


def check(queue: Queue, ledger: Ledger) -> Report:
    """Verify; assert that the index is true, and that a second repair finds nothing to do."""
    report = verify(queue, ledger, DATASET, look_again_s=0.0)
    assert picture(ledger) == fresh_picture(ledger.folder)
    before = {path.name: path.read_bytes() for path in ledger.folder.path.glob("*.jsonl")}
    said = mend(queue, ledger)
    assert not any(word in " ".join(said) for word in ("Moved", "Wrote", "Queued", "Gave", "Dropped", "Made")), said
    assert {path.name: path.read_bytes() for path in ledger.folder.path.glob("*.jsonl")} == before
    return report


def test_a_sound_dataset_is_left_alone(queue: Queue, ledger: Ledger) -> None:
    """Nothing is done, and no file changes, where there is nothing to mend."""
    know(ledger, 1, 2)
    record(ledger, 1, 2)
    before = {path: path.stat() for path in ledger.folder.path.glob("*.jsonl")}
    assert mend(queue, ledger) == []
    assert {path: path.stat() for path in before} == before
    assert check(queue, ledger).complete


def test_lines_that_are_no_records_are_moved(queue: Queue, ledger: Ledger) -> None:
    """Lines that are no records, or another dataset's, go to the quarantine file byte for byte; the rest stays."""
    know(ledger, 1, 2)
    record(ledger, 1)
    bad = [b"{torn and glued", b"", b"\xff\xfe\0", record_line(5, dataset="e")[:-1], record_line(2, Kind.FAILED)[:-1]]
    at = ledger.folder.lines(Kind.ACCEPTED).stat().st_size
    append(ledger, Kind.ACCEPTED, b"\n".join(bad) + b"\n" + record_line(2))
    said = mend(queue, ledger)
    assert (
        "Moved 5 pieces of raw_responses.jsonl that are no sound records of this dataset to quarantine.jsonl." in said
    )
    assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == record_line(1) + record_line(2)
    moved = quarantined(ledger.folder)
    assert [(file, data) for file, _at, data, _why in moved] == [("raw_responses.jsonl", data) for data in bad]
    assert moved[0][1] == at
    assert [why.partition(":")[0] for *_rest, why in moved[3:]] == [
        "it belongs to the dataset 'e'",
        "its verdict is 'failed'",
    ]
    assert check(queue, ledger).complete


def test_repeated_ids_are_moved_and_the_first_stays(queue: Queue, ledger: Ledger) -> None:
    """Of lines with one id the first is kept, in every file; another round of a failed sample is no repetition."""
    know(ledger, 1, 2, 3)
    record(ledger, 1, 2)
    record(ledger, 3, kind=Kind.FAILED)
    record(ledger, 3, kind=Kind.FAILED, round_=1)
    record(ledger, 3, round_=2)
    files = {kind: ledger.folder.lines(kind).read_bytes() for kind in (Kind.ACCEPTED, Kind.FAILED, Kind.PENDING)}
    append(ledger, Kind.ACCEPTED, record_line(2, content="another answer") + record_line(1))
    append(ledger, Kind.FAILED, record_line(3, Kind.FAILED, round_=1))
    append(ledger, Kind.PENDING, known_line(2))
    report = verify(queue, ledger, DATASET, look_again_s=0.0)
    assert f"1 id is on more than one line of failures.jsonl: {ids(3)[0]}." in report.problems
    assert report.duplicates == sorted(ids(1, 2))
    said = mend(queue, ledger)
    assert "Moved 2 lines of raw_responses.jsonl that repeat ids to quarantine.jsonl." in said
    assert "Moved 1 line of failures.jsonl that repeats an id to quarantine.jsonl." in said
    assert "Moved 1 line of samples.jsonl that repeats an id to quarantine.jsonl." in said
    assert {kind: ledger.folder.lines(kind).read_bytes() for kind in files} == files
    assert len(quarantined(ledger.folder)) == 4
    assert check(queue, ledger).complete


@pytest.mark.parametrize(
    ("glue", "rest"),
    [
        (b"", []),
        (b"\x0b", [b"\x0b"]),
        (b"\0" * 700, [bytes(700)]),
        (record_line(9)[:200], [record_line(9)[:200]]),
        (b'{"id":"x","dataset":"e', [b'{"id":"x","dataset":"e']),
        (b"\xff", [b"\xff"]),
    ],
)
def test_whole_records_on_a_damaged_line_are_rescued(
    queue: Queue, ledger: Ledger, glue: bytes, rest: list[bytes]
) -> None:
    """Whole records that a lost newline, NULs or torn bytes glued together get lines of their own."""
    know(ledger, 1, 2, 3)
    record(ledger, 1)
    append(ledger, Kind.ACCEPTED, record_line(2)[:-1] + glue + record_line(3))
    said = mend(queue, ledger)
    assert "Gave 2 whole records on damaged lines of raw_responses.jsonl lines of their own." in said
    assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == record_line(1) + record_line(2) + record_line(3)
    assert [data for _file, _at, data, _why in quarantined(ledger.folder)] == rest
    assert check(queue, ledger).complete


def test_recorded_samples_get_back_their_samples_line(queue: Queue, ledger: Ledger) -> None:
    """A lost samples.jsonl is made anew out of sound records and payloads; what does not fit its id is told of."""
    know(ledger, 1, 2, 3)
    record(ledger, 1)
    record(ledger, 2, kind=Kind.FAILED)
    put(queue, 3)
    ledger.folder.lines(Kind.PENDING).unlink()
    append(ledger, Kind.ACCEPTED, record_line(4, id="stranger"))
    said = mend(queue, ledger)
    assert "Wrote 3 recorded or queued ids that samples.jsonl lacked into it." in said
    assert any("1 recorded or queued ids are in no samples.jsonl and are not those" in words for words in said), said
    lines = ledger.folder.lines(Kind.PENDING).read_bytes().splitlines(keepends=True)
    assert sorted(lines) == sorted(map(known_line, (1, 2, 3)))
    assert quarantined(ledger.folder) == []
    report = verify(queue, ledger, DATASET, look_again_s=0.0)
    assert "1 recorded or queued id is in no samples.jsonl: stranger." in report.problems
    assert picture(ledger) == fresh_picture(ledger.folder)


@pytest.mark.parametrize("kind", [Kind.ACCEPTED, Kind.FAILED])
def test_a_record_with_another_id_than_its_prompts_is_moved(queue: Queue, ledger: Ledger, kind: Kind) -> None:
    """A record whose id was edited by hand goes to the quarantine file; its sample is missing, and asked again."""
    know(ledger, 1, 2)
    record(ledger, 1)
    append(ledger, kind, record_line(2, kind, id="zzz"))
    assert "1 recorded or queued id is in no samples.jsonl: zzz." in verify(queue, ledger, DATASET).problems
    would = mend(queue, ledger, dry_run=True)
    assert any(words.startswith("Would move 1 piece of ") for words in would), would
    said = mend(queue, ledger)
    assert any(words.startswith("Moved 1 piece of ") for words in said), said
    assert any("1 sample is neither done nor in Redis" in words for words in said), said
    report = check(queue, ledger)
    assert report.missing == ids(2)
    assert not any("repair" in words for words in [*report.problems, *report.notes])
    record(ledger, 2)
    assert check(queue, ledger).complete


@pytest.fixture
def states(tmp_path: Path) -> Iterator[Ledger]:
    """Return the folder of a dataset of hidden states, in which three files are recorded."""
    with Ledger.open(dataset_folder(tmp_path, HIDDEN)) as opened:
        manifest.fix_content(opened, HIDDEN, plan().content(), new=False)
        pens = [Pen(Kind.PENDING, id_, encode_line(KnownSample(id_, row=row))) for row, id_ in enumerate("zyx", 1)]
        opened.commit([*pens, *(Pen(Kind.ACCEPTED, id_, states_line(opened, id_)) for id_ in "zyx")])
        for id_ in "zyx":
            file = opened.folder.path / "states" / plan().file_of(id_, 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(id_.encode())
        yield opened


def states_line(ledger: Ledger, id_: str) -> bytes:
    """Return the line of a file of hidden states; z is number 1 of the run, y 2, x 3."""
    known = manifest.read(ledger)
    assert known is not None
    record = extracted(id_, id_.encode(), known.settings[-1].fingerprint)
    return encode_line(msgspec.structs.replace(record, source=Source(row=" zyx".index(id_), name="chat")))


@pytest.mark.parametrize("glue", [b"", b"\0" * 70, b'{"id":"q","dataset":"chat'], ids=["newline", "NULs", "torn"])
def test_whole_records_of_hidden_states_are_rescued(queue: Queue, states: Ledger, glue: bytes) -> None:
    """Records of hidden states on a damaged line get lines of their own, so that no file is made a second time."""
    lines = [states_line(states, id_) for id_ in "zyx"]
    states.folder.lines(Kind.ACCEPTED).write_bytes(lines[0] + lines[1][:-1] + glue + lines[2])
    said = mend(queue, states, dataset=HIDDEN)
    assert "Gave 2 whole records on damaged lines of raw_responses.jsonl lines of their own." in said
    assert states.folder.lines(Kind.ACCEPTED).read_bytes() == b"".join(lines)
    assert [data for _file, _at, data, _why in quarantined(states.folder)] == ([glue] if glue else [])
    report = verify(queue, states, HIDDEN, look_again_s=0.0)
    assert (report.problems, report.counts.accepted) == ([], 3)


def test_hidden_states_get_back_their_samples_line(queue: Queue, states: Ledger) -> None:
    """Recorded and queued ids of hidden states are written into a lost samples.jsonl with their numbers."""
    states.folder.lines(Kind.PENDING).unlink()
    nameless = msgspec.structs.replace(extracted("w", b"w", "0" * 16), source=Source())
    append(states, Kind.FAILED, encode_line(msgspec.structs.replace(nameless, verdict=Kind.FAILED, reason="poison")))
    queue.register(HIDDEN, "f", {})
    queue.put(HIDDEN, [Sample(id="v", messages=[], source=Source(row=4, name="chat")), Sample(id="u", messages=[])])
    publish(queue, HIDDEN, ["u", "v"])
    said = mend(queue, states, dataset=HIDDEN)
    assert "Wrote 4 recorded or queued ids that samples.jsonl lacked into it." in said
    assert any(
        "do not say which sample of which dataset they are, so they were left as they are: u, w." in words
        for words in said
    ), said
    lines = states.folder.lines(Kind.PENDING).read_bytes().splitlines()
    rows = {known.id: known.row for known in map(msgspec.json.Decoder(KnownSample).decode, lines)}
    assert rows == {"z": 1, "y": 2, "x": 3, "v": 4}


def test_a_lying_index_is_made_anew(queue: Queue, ledger: Ledger) -> None:
    """An index that counts otherwise than the files is made anew."""
    know(ledger, 1, 2)
    record(ledger, 1, 2)
    with sqlite3.connect(ledger.folder.index) as connection:
        connection.execute("UPDATE tallies SET n = 7 WHERE n = 2")
    connection.close()
    assert mend(queue, ledger) == ["Made index.sqlite anew."]
    assert check(queue, ledger).complete


def test_lost_tickets_are_given_back(queue: Queue, ledger: Ledger) -> None:
    """Samples in Redis without a ticket get one, and no other gets a second."""
    know(ledger, 1, 2, 3)
    put(queue, 1)
    put(queue, 2, 3, tickets=False)
    assert mend(queue, ledger) == ["Gave 2 samples in Redis their lost tickets."]
    assert tickets(queue) == sorted(ids(1, 2, 3))
    counts = check(queue, ledger).counts
    assert (counts.queued, counts.without_ticket, counts.missing) == (3, 0, 0)


def test_stale_books_of_recorded_samples_are_dropped(queue: Queue, ledger: Ledger) -> None:
    """Payloads and flights of recorded samples go; one that is asked again in a new round stays."""
    know(ledger, 1, 2, 3)
    put(queue, 1, 2)
    queue.take(DATASET, ids(1)[0], "dead")
    record(ledger, 1)
    record(ledger, 2, kind=Kind.FAILED)
    record(ledger, 3, kind=Kind.FAILED)
    put(queue, 3, again=Kind.FAILED, round_=1)
    queue.client.hset(queue.keys.flights(DATASET), "gone", "dead|1")
    said = mend(queue, ledger)
    assert "Dropped the payloads of 2 recorded samples from Redis." in said
    assert any(words.startswith("Dropped the note that a dead worker asks 1 sample") for words in said), said
    assert queue.waiting_ids(DATASET, ids(1, 2, 3)) == set(ids(3))
    assert queue.flights(DATASET) == {}
    counts = check(queue, ledger).counts
    assert (counts.accepted, counts.failed, counts.queued) == (1, 1, 1)


def test_a_retry_that_redis_lost_is_queued_again(queue: Queue, ledger: Ledger) -> None:
    """A failed sample that was to be asked again is missing without its payload, and is queued from its record."""
    know(ledger, 1, 2)
    record(ledger, 1, kind=Kind.FAILED)
    record(ledger, 2)
    put(queue, 1, again=Kind.FAILED, round_=1)
    queue.client.delete(queue.keys.prompts(DATASET), queue.keys.queue(DATASET))
    counts = verify(queue, ledger, DATASET, look_again_s=0.0).counts
    assert (counts.failed, counts.missing) == (0, 1)
    assert mend(queue, ledger) == ["Queued 1 sample again that was to be asked again and that Redis had lost."]
    (payload,) = queue.payloads(DATASET, ids(1)).values()
    assert (payload.round, payload.messages) == (1, [{"role": "user", "content": "Prompt 1."}])
    assert tickets(queue) == ids(1)
    assert check(queue, ledger).counts.queued == 1


def test_what_only_its_source_holds_is_named_with_its_command(queue: Queue, ledger: Ledger) -> None:
    """Missing samples whose prompt is nowhere but in the source come with the command that reads it."""
    manifest.begin_source(ledger, DATASET, "/data/my rows.jsonl", "auto")
    know(ledger, 1)
    (said,) = mend(queue, ledger)
    assert said.startswith("1 sample is neither done nor in Redis")
    assert "run producer enqueue '/data/my rows.jsonl' --dataset d," in said
    assert check(queue, ledger).counts.missing == 1


def test_a_sample_that_was_rescued_is_not_called_missing(queue: Queue, ledger: Ledger) -> None:
    """What is said to be missing is what still is after the mending, not before it."""
    know(ledger, 1, 2)
    append(ledger, Kind.ACCEPTED, b"\0\0" + record_line(1) + record_line(2))
    said = mend(queue, ledger)
    assert "Gave 1 whole record on a damaged line of raw_responses.jsonl a line of its own." in said
    assert not any("neither done nor" in words for words in said), said
    assert check(queue, ledger).complete


def test_without_redis_the_files_are_mended(ledger: Ledger) -> None:
    """A repair without Redis mends the files and says what Redis could not be asked for."""
    know(ledger, 1)
    record(ledger, 1)
    append(ledger, Kind.ACCEPTED, b"{\n")
    said = mend(ABSENT, ledger)
    assert "Moved 1 piece of raw_responses.jsonl that is no sound record of this dataset to quarantine.jsonl." in said
    assert any(words.startswith("Redis could not be asked for payloads and tickets") for words in said)
    assert verify(ABSENT, ledger, DATASET).complete


def test_a_dry_run_changes_nothing(queue: Queue, ledger: Ledger) -> None:
    """A dry run says what a repair would do, and then the repair does as much."""
    know(ledger, 1, 2, 3)
    record(ledger, 1)
    append(ledger, Kind.ACCEPTED, b"{\n" + record_line(1) + record_line(4))
    put(queue, 1)
    put(queue, 2, tickets=False)
    ledger.catch_up()
    files = {path: path.read_bytes() for path in ledger.folder.path.glob("*.jsonl")}
    said = mend(queue, ledger, dry_run=True)
    assert {path: path.read_bytes() for path in ledger.folder.path.glob("*.jsonl")} == files
    assert tickets(queue) == ids(1)
    assert queue.waiting_ids(DATASET, ids(1)) == set(ids(1))
    planned = [words.split(" ", 2)[2] for words in said if words.startswith("Would ")]
    assert len(planned) == 6
    assert planned == [words.split(" ", 1)[1] for words in mend(queue, ledger) if words[0].isalpha()]


def test_a_folder_of_another_dataset_is_left_alone(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """A copied folder, or one without a sound manifest, is not repaired: every line would look foreign."""
    know(ledger, 1)
    record(ledger, 1)
    append(ledger, Kind.ACCEPTED, b"{\n")
    files = {path: path.read_bytes() for path in ledger.folder.path.glob("*.jsonl")}
    (said,) = mend(queue, ledger, dataset="e")
    assert said.startswith("Nothing was repaired: ")
    assert "is a copy of the dataset 'd'" in said
    ledger.folder.manifest.write_text("{")
    assert "cannot be understood" in mend(queue, ledger)[0]
    ledger.folder.manifest.unlink()
    assert "without it nobody can tell" in mend(queue, ledger)[0]
    assert {path: path.read_bytes() for path in files} == files


def test_two_repairs_do_not_meet(queue: Queue, ledger: Ledger) -> None:
    """A second repair of a folder says that another one is at work, and does nothing."""
    know(ledger, 1)
    append(ledger, Kind.PENDING, b"{\n")
    with FolderLock(ledger.folder.repair_lock).held():
        (said,) = mend(queue, ledger)
    assert said.startswith("Nothing was repaired: another repair is at work; ")
    assert not quarantined(ledger.folder)


def test_a_disk_that_refuses_leaves_the_file_whole(queue: Queue, ledger: Ledger) -> None:
    """A repair that cannot write its copy says so, leaves the file as it was, and still does the rest."""
    know(ledger, 1)
    record(ledger, 1)
    append(ledger, Kind.ACCEPTED, b"x" * 5000 + b"\n" + record_line(2, content="long" * 20_000))
    ledger.catch_up()
    before = ledger.folder.lines(Kind.ACCEPTED).read_bytes()
    put(queue, 1, tickets=False)
    with largest_file(60_000):
        said = mend(queue, ledger)
    assert any("raw_responses.jsonl cannot grow" in words for words in said), said
    assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == before
    assert not list(ledger.folder.path.glob(".*.tmp"))


def test_a_disk_with_too_little_room_is_seen_beforehand(queue: Queue, tmp_path: Path) -> None:
    """Where a copy of the file would not fit, nothing is begun, and the sentence says how much is needed."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=16m", "none") as done:
        if not done:
            pytest.skip("Mounting a small disk needs root.")
        with Ledger.open(dataset_folder(tmp_path, DATASET)) as ledger:
            begin(ledger)
            know(ledger, 1)
            append(ledger, Kind.PENDING, b"{\n")
            (said,) = mend(queue, ledger)[:1]
            assert "samples.jsonl cannot be written anew: 64 MiB are needed beside it" in said
            assert ledger.folder.lines(Kind.PENDING).read_bytes() == known_line(1) + b"{\n"
            assert not ledger.folder.quarantine.exists()


def test_a_file_behind_a_link_stays_there(queue: Queue, ledger: Ledger, tmp_path: Path) -> None:
    """A file that lies elsewhere, behind a link, is mended there, and its rights stay."""
    know(ledger, 1)
    record(ledger, 1)
    path, elsewhere = ledger.folder.lines(Kind.ACCEPTED), tmp_path / "elsewhere"
    elsewhere.mkdir()
    path.rename(elsewhere / "answers.jsonl")
    path.symlink_to(elsewhere / "answers.jsonl")
    (elsewhere / "answers.jsonl").chmod(0o640)
    append(ledger, Kind.ACCEPTED, b"{\n")
    mend(queue, ledger)
    assert path.is_symlink()
    assert (elsewhere / "answers.jsonl").read_bytes() == record_line(1)
    assert (elsewhere / "answers.jsonl").stat().st_mode & 0o777 == 0o640
    assert [file.name for file in elsewhere.iterdir()] == ["answers.jsonl"]


def test_a_reader_follows_a_repaired_file(queue: Queue, ledger: Ledger) -> None:
    """Whoever looked a record up before a repair reads the same record after it."""
    know(ledger, 1, 2)
    append(ledger, Kind.ACCEPTED, b"{a line that is none}\n" + record_line(1) + record_line(2))
    ledger.catch_up()
    before = ledger.look_up(ids(1, 2))
    with Ledger.open(ledger.folder) as other:
        mend(queue, other)
    assert [ledger.read(before[id_], id_) + b"\n" for id_ in ids(1, 2)] == [record_line(1), record_line(2)]


def test_an_export_that_reads_a_replaced_file_says_so(queue: Queue, ledger: Ledger) -> None:
    """An export whose file a repair replaces meanwhile ends in an error, instead of leaving records out."""
    know(ledger, 1, 2)
    append(ledger, Kind.ACCEPTED, b"{\n" + record_line(1) + record_line(2))

    def read(data: bytes) -> Head:
        with Ledger.open(ledger.folder) as other:
            mend(queue, other)
        return msgspec.json.decode(data, type=Head)

    with pytest.raises(StoreError, match=r"raw_responses\.jsonl was replaced .* export again"):
        list(select([ledger], read))
    exported = [one.id for batch in select([ledger], read) for one in batch.records]
    assert exported == ids(1, 2)


def test_the_half_copy_of_a_killed_repair_is_removed(queue: Queue, ledger: Ledger) -> None:
    """What a killed repair had begun to copy is removed by the next one."""
    know(ledger, 1)
    record(ledger, 1)
    left = ledger.folder.path / ".raw_responses.jsonl.tmp"
    left.write_bytes(record_line(1)[:50])
    os.utime(left, (0, 0))
    assert mend(queue, ledger) == ["Removed 1 half copy of a killed command."]
    assert not left.exists()
