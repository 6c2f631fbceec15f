"""Failures and rejections are grouped by class out of files that grow, and are sometimes cut or replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.failures import KEPT_IDS, FailureBook, Group
from app.places import DatasetFolder
from app.records import Kind, Record, Source, encode_line


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return an empty dataset folder."""
    return DatasetFolder(tmp_path)


def write(folder: DatasetFolder, *records: Record) -> None:
    """Append records as a worker does."""
    for record in records:
        with folder.lines(record.verdict).open("ab") as file:
            file.write(encode_line(record))


def record(
    id_: str, reason: str | None = "timeout", *, kind: Kind = Kind.FAILED, at: float | None = 100.0, error: str = ""
) -> Record:
    """Return one record."""
    return Record(
        id=id_,
        dataset="d",
        verdict=kind,
        reason=reason,
        error=error or None,
        source=Source(row=1),
        messages=[{"role": "user", "content": "Hi"}],
        sampling={},
        settings="0" * 16,
        finished_at=at,
    )


def by_reason(groups: list[Group]) -> dict[str, Group]:
    """Return the groups by their reason."""
    return {group.reason: group for group in groups}


def test_lines_are_grouped_by_kind_and_reason(folder: DatasetFolder) -> None:
    """A class has its count, its first and last time, the newest one's words and its ids, newest last."""
    write(
        folder,
        record("a", at=20.0, error="no answer within 5 s"),
        record("b", at=10.0, error="no answer within 9 s"),
        record("c", "bad_request", at=15.0, error="unknown field"),
        record("d", "timeout", kind=Kind.REJECTED, at=16.0),
    )
    book = FailureBook(folder)
    groups = {(group.kind, group.reason): group for group in book.look()}
    assert book.complete
    timeouts = groups[Kind.FAILED, "timeout"]
    assert (timeouts.lines, timeouts.first_at, timeouts.last_at) == (2, 10.0, 20.0)
    assert (timeouts.error, list(timeouts.ids)) == ("no answer within 9 s", ["a", "b"])
    assert groups[Kind.FAILED, "bad_request"].error == "unknown field"
    assert groups[Kind.REJECTED, "timeout"].lines == 1


def test_the_most_recent_class_comes_first(folder: DatasetFolder) -> None:
    """What fails now is what a person looks for."""
    write(folder, record("a", "old", at=1.0), record("b", "new", at=9.0), record("c", "middle", at=5.0))
    assert [group.reason for group in FailureBook(folder).look()] == ["new", "middle", "old"]


def test_a_second_look_reads_only_what_came_since(folder: DatasetFolder) -> None:
    """Lines are counted once, however often one looks, and a torn line only when it is whole."""
    write(folder, record("a"))
    book = FailureBook(folder)
    assert by_reason(book.look())["timeout"].lines == 1
    assert by_reason(book.look())["timeout"].lines == 1
    line = encode_line(record("b"))
    path = folder.lines(Kind.FAILED)
    with path.open("ab") as file:
        file.write(line[:30])
    assert by_reason(book.look())["timeout"].lines == 1
    with path.open("ab") as file:
        file.write(line[30:])
    assert list(by_reason(book.look())["timeout"].ids) == ["a", "b"]


def test_a_file_that_was_cut_or_replaced_is_read_anew(folder: DatasetFolder) -> None:
    """After a repair the classes are those of the new file, whether it is shorter, longer or of the same size."""
    path = folder.lines(Kind.FAILED)
    write(folder, record("a"), record("b"))
    book = FailureBook(folder)
    assert by_reason(book.look())["timeout"].lines == 2

    path.write_bytes(encode_line(record("a")))
    assert list(by_reason(book.look())["timeout"].ids) == ["a"]

    other = path.with_name("other")
    other.write_bytes(encode_line(record("x", "bad_request")) * 3)
    other.replace(path)
    assert {reason: group.lines for reason, group in by_reason(book.look()).items()} == {"bad_request": 3}

    edited = path.read_bytes().replace(b"bad_request", b"bad_bequest")
    with path.open("r+b") as file:
        file.write(edited)
    assert set(by_reason(book.look())) == {"bad_bequest"}
    path.unlink()
    assert book.look() == []


def test_a_cut_that_grew_again_is_noticed(folder: DatasetFolder) -> None:
    """A file that was cut and then grew beyond its old size does not end where it did: it is read anew."""
    path = folder.lines(Kind.FAILED)
    write(folder, record("a"), record("b"))
    book = FailureBook(folder)
    book.look()
    with path.open("r+b") as file:
        file.truncate(len(encode_line(record("a"))))
    write(folder, record("longer-id", "server_error"), record("c", "server_error"))
    assert {reason: group.lines for reason, group in by_reason(book.look()).items()} == {
        "timeout": 1,
        "server_error": 2,
    }


def test_lines_that_are_no_records_are_passed_over(folder: DatasetFolder) -> None:
    """A damaged line costs that line alone."""
    write(folder, record("a"))
    with folder.lines(Kind.FAILED).open("ab") as file:
        file.write(b'{"id": 3}\n\xff\xfe\nnonsense\n')
    write(folder, record("b"))
    assert list(by_reason(FailureBook(folder).look())["timeout"].ids) == ["a", "b"]


def test_a_look_is_bounded_and_the_next_goes_on(folder: DatasetFolder) -> None:
    """A long file is read in pieces, so that the page appears at once; nothing is missed or counted twice."""
    write(folder, *(record(f"s{n}") for n in range(50)))
    book = FailureBook(folder, look_bytes=2000)
    looks = 0
    while not book.complete:
        lines = by_reason(book.look())["timeout"].lines
        looks += 1
        assert looks < 60
    assert looks > 3
    assert lines == 50


def test_memory_is_bounded(folder: DatasetFolder) -> None:
    """Of many samples only the newest ids are kept, each once."""
    write(folder, *(record(f"s{n}") for n in range(3 * KEPT_IDS)), record("s59"))
    ids = list(by_reason(FailureBook(folder).look())["timeout"].ids)
    assert ids == [f"s{n}" for n in range(2 * KEPT_IDS, 3 * KEPT_IDS)]


def test_a_record_without_a_time_or_reason_is_counted(folder: DatasetFolder) -> None:
    """What is unknown stays unknown, and the sample still counts."""
    write(folder, record("a", None, at=None))
    (group,) = FailureBook(folder).look()
    assert (group.reason, group.lines, group.first_at, group.last_at) == ("unknown", 1, None, None)
