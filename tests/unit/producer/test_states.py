"""Files of hidden states that vanish or change are found, and their samples are open again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from app import manifest
from app.extraction import Extracted
from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.records import Kind, KnownSample, Source, encode_line
from producer.states import check_files, drop_temporaries, set_aside
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


def test_half_files_are_removed(folder: DatasetFolder) -> None:
    """What a killed worker had begun goes; whole files stay."""
    half = file_of(folder, "a").with_name(".a.ckpt.0123abcd.tmp")
    half.write_bytes(b"a")
    assert drop_temporaries(folder.path / "states") == 1
    assert not half.exists()
    assert file_of(folder, "a").exists()
