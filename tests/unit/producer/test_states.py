"""Files of hidden states that vanish or change are found, and their samples are open again."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import manifest
from app.errors import DiskFullError, StoreError
from app.extraction import Extracted
from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.records import Kind, KnownSample, Source, encode_line
from producer import rewrite
from producer.states import check_files, drop_temporaries, set_aside
from producer.states_rows import write_rows
from tests.unit.app.test_extraction import plan


def extracted(id_: str, data: bytes, settings: str) -> Extracted:
    """Return the record of a file."""
    one = plan()
    return Extracted(
        id=id_,
        dataset="chat.hidden",
        verdict=Kind.ACCEPTED,
        source=Source(row=1, name="chat"),
        file=one.file_of(id_, 1),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        layers=one.layers,
        hidden_size=one.hidden_size,
        dtype=one.dtype,
        layout=one.layout,
        model=one.model,
        settings=settings,
    )


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return an extraction of five files."""
    folder = DatasetFolder(tmp_path / "chat.hidden")
    with Ledger.open(folder) as ledger:
        settings = manifest.fix_content(ledger, "chat.hidden", plan().content(), new=False).fingerprint
        for id_ in "abcde":
            path = folder.path / "states" / plan().file_of(id_, 1)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(id_.encode() * 100)
            ledger.commit([Pen(Kind.PENDING, id_, encode_line(KnownSample(id_, row=1)))])
            line = encode_line(extracted(id_, id_.encode() * 100, settings))
            ledger.commit([Pen(Kind.ACCEPTED, id_, line)])
    return folder


def file_of(folder: DatasetFolder, id_: str) -> Path:
    """Return the path of a sample's file."""
    return folder.path / "states" / plan().file_of(id_, 1)


def test_sound_files_are_sound(folder: DatasetFolder) -> None:
    """Nothing is found where nothing is wrong, and nothing is moved."""
    with Ledger.open(folder) as ledger:
        found = check_files(ledger, read=True)
        assert (found.files, found.bytes, found.bad) == (5, 500, 0)
        assert set_aside(ledger, found) == 0


def test_missing_shortened_and_changed_files_are_found(folder: DatasetFolder) -> None:
    """A look finds what is gone or of another size; reading finds a single changed byte."""
    file_of(folder, "a").unlink()
    file_of(folder, "b").write_bytes(b"b" * 99)
    file_of(folder, "c").write_bytes(b"c" * 99 + b"C")
    with Ledger.open(folder) as ledger:
        look, read = check_files(ledger, read=False), check_files(ledger, read=True)
    assert (look.missing, look.damaged, look.ids) == (1, 1, {"a", "b"})
    assert (read.missing, read.damaged, read.ids) == (1, 2, {"a", "b", "c"})
    assert [example.partition(": ")[2] for example in read.examples] == [
        "it is not there",
        "it has 99 bytes and had 100",
        "its content has changed",
    ]


def test_what_is_set_aside_is_open_again(folder: DatasetFolder) -> None:
    """The records of bad files move to quarantine.jsonl; their samples are open again, the others stay as they are."""
    file_of(folder, "b").unlink()
    before = folder.lines(Kind.ACCEPTED).read_bytes().splitlines()
    with Ledger.open(folder) as ledger:
        assert set_aside(ledger, check_files(ledger, read=False)) == 1
        assert {id_: entry.kind for id_, entry in ledger.entries()} == {
            **dict.fromkeys("acde", Kind.ACCEPTED),
            "b": Kind.PENDING,
        }
    assert folder.lines(Kind.ACCEPTED).read_bytes().splitlines() == [before[0], *before[2:]]
    assert folder.quarantine.read_text().count("its file is missing or damaged") == 1


def test_a_thousand_bad_files_are_set_aside_in_few_writes(
    folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many records are moved, the quarantine file is synced once per 4 MiB; a cut-off line of it is ended."""
    folder.quarantine.write_bytes(b"{cut off")
    ids = [f"n{number:04d}" for number in range(1000)]
    with Ledger.open(folder) as ledger:
        ledger.commit([Pen(Kind.PENDING, id_, encode_line(KnownSample(id_, row=1))) for id_ in ids])
        lines = {id_: encode_line(extracted(id_, b"gone", "0" * 16)) for id_ in ids}
        ledger.commit([Pen(Kind.ACCEPTED, id_, line) for id_, line in lines.items()])
        found, synced, sync = check_files(ledger, read=False), list[int](), os.fdatasync
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: (synced.append(descriptor), sync(descriptor))[1])
        assert set_aside(ledger, found) == 1000
        assert {entry.kind for id_, entry in ledger.entries() if id_ in lines} == {Kind.PENDING}
    assert 1 <= len(synced) <= 3
    cut, *moved = folder.quarantine.read_bytes().splitlines()
    assert cut == b"{cut off"
    assert [base64.b64decode(json.loads(line)["base64"]) + b"\n" for line in moved] == list(lines.values())


def test_too_little_room_is_seen_before_anything_is_set_aside(
    folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a copy of the records would not fit nothing is begun, and the sentence says what is needed."""
    file_of(folder, "b").unlink()
    before = folder.lines(Kind.ACCEPTED).read_bytes()
    monkeypatch.setattr(rewrite, "MIN_FREE_DISK_BYTES", 2**62)
    with Ledger.open(folder) as ledger, pytest.raises(DiskFullError, match="free some space and run producer extract"):
        set_aside(ledger, check_files(ledger, read=False))
    assert folder.lines(Kind.ACCEPTED).read_bytes() == before
    assert not folder.quarantine.exists()


def test_half_files_are_removed(folder: DatasetFolder) -> None:
    """What a killed worker had begun goes; whole files stay."""
    half = file_of(folder, "a").with_name(".a.ckpt.0123abcd.tmp")
    half.write_bytes(b"a")
    assert drop_temporaries(folder.path / "states") == 1
    assert not half.exists()
    assert file_of(folder, "a").exists()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Ledger]:
    """Return the dataset whose answers a to e the states are made of; the answer of `a` is token 1, of `b` 2, ..."""
    with Ledger.open(DatasetFolder(tmp_path / "chat")) as opened:
        for number, id_ in enumerate("abcde", start=1):
            line = json.dumps({"id": id_, "prompt_token_ids": [9], "output_ids": [number]}).encode() + b"\n"
            opened.commit([Pen(Kind.PENDING, id_, encode_line(KnownSample(id_))), Pen(Kind.ACCEPTED, id_, line)])
        yield opened


def test_rows_stand_in_the_order_of_their_numbers(source: Ledger, folder: DatasetFolder, tmp_path: Path) -> None:
    """Row i is the sample with number i, also where a repair wrote samples.jsonl in another order."""
    pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow.ipc")
    numbers = {"d": 1, "b": 2, "e": 3, "a": 4, "c": 5}
    lines = [encode_line(KnownSample(id_, row=numbers[id_])) for id_ in "abcde"]
    folder.lines(Kind.PENDING).write_bytes(b"".join(lines))
    output = tmp_path / "rows"
    output.mkdir()
    with Ledger.open(folder) as target:
        assert write_rows(source, target, output) == 5
    (file,) = output.glob("data-*.arrow")
    with pyarrow.open_stream(file) as stream:
        rows = stream.read_all().column("input_ids").to_pylist()
    assert rows == [[9, 4], [9, 2], [9, 5], [9, 1], [9, 3]]


@pytest.mark.parametrize("numbers", [(1, 2, 2, 3, 4), (1, 2, 4, 5, 6), (None, 1, 2, 3, 4)])
def test_rows_whose_numbers_are_lost_are_not_written(
    source: Ledger, folder: DatasetFolder, tmp_path: Path, numbers: tuple[int | None, ...]
) -> None:
    """Where a number is missing or stands twice nothing is written: every later row would be another file's."""
    pytest.importorskip("datasets")
    lines = [encode_line(KnownSample(id_, row=number)) for id_, number in zip("abcde", numbers, strict=True)]
    folder.lines(Kind.PENDING).write_bytes(b"".join(lines))
    output = tmp_path / "rows"
    output.mkdir()
    with Ledger.open(folder) as target, pytest.raises(StoreError, match="has lost or doubled the sample number"):
        write_rows(source, target, output)
    assert not list(output.iterdir())
