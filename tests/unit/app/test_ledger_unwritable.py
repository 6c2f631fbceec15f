"""A dataset folder that cannot be written, or not any more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import DiskFullError, UnwritableError
from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from tests.support.folders import fresh_picture, largest_file, mounted, pen, picture, without_rights
from tests.support.jsonl_check import check_jsonl


def test_a_write_that_fails_is_taken_back(ledger: Ledger, folder: DatasetFolder) -> None:
    """A line that does not fit leaves file and index as they were, and can be committed later."""
    ledger.commit([pen("a", content="x" * 2**20)])
    before = picture(ledger)
    with largest_file(2**20 + 5000), pytest.raises(DiskFullError, match=r"raw_responses\.jsonl cannot grow"):
        ledger.commit([pen("b", content="y" * 9000)])
    assert picture(ledger) == before
    assert ledger.commit([pen("b"), pen("a")]).new == [True, False]
    assert picture(ledger) == fresh_picture(folder)


def test_an_index_that_cannot_grow_costs_no_line(ledger: Ledger, folder: DatasetFolder) -> None:
    """A line that was written and could not be indexed is new and counts; the next use indexes it."""
    ledger.commit([pen("a")])
    log = folder.path / "index.sqlite-wal"
    with largest_file(log.stat().st_size):
        assert ledger.commit([pen("b")]).new == [True]
    assert ledger.commit([pen("b"), pen("c")]).new == [False, True]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == b"".join(pen(id_).line for id_ in "abc")
    assert picture(ledger) == fresh_picture(folder)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """On a disk that fills up every commit says whether it worked, and with space again all ids get recorded once."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "none") as done:
        if not done:
            pytest.skip("Mounting a small disk needs root.")
        ballast = tmp_path / "ballast"
        ballast.write_bytes(b"b" * 400_000)
        groups = [[pen(f"s{start + step}", content="x" * 3000) for step in range(5)] for start in range(0, 100, 5)]
        folder, refused = DatasetFolder(tmp_path / "d"), []
        with Ledger.open(folder) as ledger:
            for group in groups:
                try:
                    ledger.commit(group)
                except DiskFullError:
                    refused.append(group)
            assert 0 < len(refused) < len(groups)
            ballast.unlink()
            for group in refused:
                ledger.commit(group)
            assert picture(ledger) == fresh_picture(folder)
        found = check_jsonl(folder.lines(Kind.ACCEPTED))
        assert (sorted(found.ids), found.problems) == (sorted(f"s{number}" for number in range(100)), ())


def test_too_little_space_is_refused(ledger: Ledger, folder: DatasetFolder) -> None:
    """A disk with less space than wanted is refused before any work, with both amounts."""
    with pytest.raises(DiskFullError) as caught:
        ledger.check_writable(min_free_bytes=2**62)
    assert str(folder.path) in str(caught.value)
    assert f"at least {2**42} MiB" in str(caught.value)
    ledger.check_writable(min_free_bytes=1)


def _file_in_its_place(path: Path) -> Path:
    path.parent.mkdir()
    path.write_text("a file")
    return path


def _file_in_its_parents_place(path: Path) -> Path:
    path.parent.write_text("a file")
    return path


def _link_to_nothing(path: Path) -> Path:
    path.parent.mkdir()
    path.symlink_to(path.parent / "nothing")
    return path


def _closed_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    path.chmod(0o555)
    return path


def _closed_parent(path: Path) -> Path:
    path.parent.mkdir()
    path.parent.chmod(0o555)
    return path


def _responses_closed(path: Path) -> Path:
    path.mkdir(parents=True)
    path.chmod(0o777)
    file = path / "raw_responses.jsonl"
    file.write_bytes(pen("a").line)
    file.chmod(0o444)
    return file


def _responses_link_to_nothing(path: Path) -> Path:
    path.mkdir(parents=True)
    path.chmod(0o777)
    (path / "raw_responses.jsonl").symlink_to(path / "nothing")
    return path / "raw_responses.jsonl"


def _responses_folder(path: Path) -> Path:
    (path / "raw_responses.jsonl").mkdir(parents=True)
    path.chmod(0o777)
    return path / "raw_responses.jsonl"


def _torn_folder(path: Path) -> Path:
    (path / "torn.jsonl").mkdir(parents=True)
    path.chmod(0o777)
    return path / "torn.jsonl"


@pytest.mark.parametrize(
    "spoil",
    [
        _file_in_its_place,
        _file_in_its_parents_place,
        _link_to_nothing,
        _closed_folder,
        _closed_parent,
        _responses_closed,
        _responses_link_to_nothing,
        _responses_folder,
        _torn_folder,
    ],
)
def test_what_cannot_be_written_is_refused_at_once(spoil: Callable[[Path], Path], open_folder: Path) -> None:
    """A folder or file that cannot be written is refused before any work, in one sentence with its path."""
    folder = DatasetFolder(open_folder / "prepared" / "d")
    named = spoil(folder.path)
    with without_rights(), pytest.raises(UnwritableError) as caught:
        Ledger.open(folder)
    message = str(caught.value)
    assert str(named) in message
    assert "\n" not in message
    assert message.endswith(".")
    assert not (open_folder / "prepared" / "nothing").exists()


def test_a_read_only_disk_is_refused(tmp_path: Path, folder: DatasetFolder) -> None:
    """A disk that is mounted read-only is refused with the folder's path and the system's reason."""
    with Ledger.open(folder) as opened:
        opened.commit([pen("a")])
    with mounted(folder.path, "--bind", str(folder.path)) as bound:
        if not bound:
            pytest.skip("Mounting needs root.")
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder.path)], check=True)
        with pytest.raises(UnwritableError) as caught:
            Ledger.open(folder)
    assert str(caught.value).startswith(f"{folder.path} cannot be used: Read-only file system")


def test_a_lock_that_cannot_be_taken(ledger: Ledger, folder: DatasetFolder) -> None:
    """A folder in the lock's place is told with its path."""
    folder.lock.mkdir()
    with pytest.raises(UnwritableError, match=r"\.lock cannot be used"):
        ledger.commit([pen("a")])
