"""Several files get new contents at once, whatever moment a process dies at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import jsonl
from app.errors import StoreError
from app.exchange import exchange, finish
from app.ledger import Ledger
from app.places import DatasetFolder, dataset_folder
from app.records import Kind
from tests.support.folders import pen


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return a dataset folder with an accepted and no rejected record, and new files prepared for both."""
    with Ledger.open(dataset_folder(tmp_path, "d")) as ledger:
        ledger.commit([pen("old")])
        for kind, data in ((Kind.ACCEPTED, b"new\n"), (Kind.REJECTED, b"other\n")):
            with jsonl.prepared(ledger.folder.lines(kind)) as file:
                file.write(data)
        return ledger.folder


def paths(folder: DatasetFolder) -> list[Path]:
    """Return the two files."""
    return [folder.lines(Kind.ACCEPTED), folder.lines(Kind.REJECTED)]


def contents(folder: DatasetFolder) -> list[bytes]:
    """Return what they hold."""
    return [path.read_bytes() for path in paths(folder)]


def left(folder: DatasetFolder) -> Iterator[str]:
    """Return the helping files that are still there."""
    return (path.name for path in folder.path.iterdir() if path.name.startswith(".") and path.name != ".lock")


def test_all_files_take_their_places(folder: DatasetFolder) -> None:
    """Afterwards every file is the new one, and nothing else is left."""
    exchange(folder, paths(folder))
    assert contents(folder) == [b"new\n", b"other\n"]
    assert not list(left(folder))


@pytest.mark.parametrize("done", [0, 1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_an_exchange_that_died_is_ended_by_whoever_comes_next(
    folder: DatasetFolder, done: int, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    """Once the journal stands, the next one who locks the folder puts the rest into place, however far it had come."""
    original, calls = Path.replace, list[Path]()

    def replace(path: Path, target: Path) -> Path:
        if len(calls) > done:
            raise KeyboardInterrupt
        calls.append(path)
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    if done < 2:
        with pytest.raises(KeyboardInterrupt):
            exchange(folder, paths(folder))
    else:
        exchange(folder, paths(folder))
    monkeypatch.undo()

    monkeypatch.setattr("app.ledger.is_shared", lambda _path: shared)
    with Ledger(folder) as ledger, ledger.locked():
        assert contents(folder) == [b"new\n", b"other\n"]
    assert not list(left(folder))
    assert not finish(folder)


def test_without_a_journal_nothing_is_exchanged(folder: DatasetFolder) -> None:
    """What was prepared and not begun with leaves the old files as they are."""
    before = folder.lines(Kind.ACCEPTED).read_bytes()
    with Ledger(folder) as ledger:
        ledger.catch_up()
        assert set(ledger.look_up(["old"])) == {"old"}
    assert folder.lines(Kind.ACCEPTED).read_bytes() == before
    assert not folder.lines(Kind.REJECTED).exists()


def test_a_link_is_followed(folder: DatasetFolder, tmp_path: Path) -> None:
    """A file that lies elsewhere, behind a link, is replaced there."""
    elsewhere = tmp_path / "disk" / "answers.jsonl"
    elsewhere.parent.mkdir()
    path = folder.lines(Kind.ACCEPTED)
    jsonl.temporary_of(path).unlink()
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    with jsonl.prepared(path) as file:
        file.write(b"new\n")
    exchange(folder, paths(folder))
    assert path.is_symlink()
    assert elsewhere.read_bytes() == b"new\n"
    assert [one.name for one in elsewhere.parent.iterdir()] == ["answers.jsonl"]


def test_a_journal_that_makes_no_sense_is_said(folder: DatasetFolder) -> None:
    """A damaged journal is an error that names the file; nothing is replaced."""
    folder.journal.write_bytes(b"{half")
    with Ledger(folder) as ledger, pytest.raises(StoreError, match=r"\.exchange\.json cannot be understood"):
        ledger.catch_up()
