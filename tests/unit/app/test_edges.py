"""The first and the newest record's time, out of the ends of the files."""

from __future__ import annotations

from pathlib import Path

from app.edges import first_and_last
from app.places import DatasetFolder
from app.records import Kind


def test_times_of_the_first_and_the_newest_record(tmp_path: Path) -> None:
    """Over all three files, whatever was finished first or last; torn and strange ends are passed over."""
    folder = DatasetFolder(tmp_path)
    assert first_and_last(folder) == (None, None)
    folder.lines(Kind.REJECTED).write_bytes(b'{"id": "a", "finished_at": 50.5}\n')
    assert first_and_last(folder) == (50.5, 50.5)
    long = b'{"content": "' + b"x" * 200_000 + b'", "finished_at": 70}\n'
    folder.lines(Kind.ACCEPTED).write_bytes(b'{"finished_at": 20}\n{"finished_at": 30}\n' + long + b'{"finished_at": 9')
    assert first_and_last(folder) == (20.0, 70.0)
    folder.lines(Kind.FAILED).write_bytes(b"no record\n")
    assert first_and_last(folder) == (20.0, 70.0)
    folder.lines(Kind.ACCEPTED).write_bytes(b"torn")
    assert first_and_last(folder) == (50.5, 50.5)
