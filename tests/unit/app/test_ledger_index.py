"""A dataset folder's memory: lost indexes, files changed by hand, torn tails."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from app import jsonl
from app.errors import StoreError
from app.ledger import Ledger
from app.places import DatasetFolder
from app.records import Kind
from tests.support.folders import Picture, fill, fresh_picture, pen, picture

Damage = Callable[[DatasetFolder], object]


def _delete_index(folder: DatasetFolder) -> None:
    folder.index.unlink()


def _delete_index_and_logs(folder: DatasetFolder) -> None:
    for path in folder.path.glob("index.sqlite*"):
        path.unlink()


def _random_index(folder: DatasetFolder) -> None:
    folder.index.write_bytes(random.Random(1).randbytes(20_000))


def _random_pages(folder: DatasetFolder) -> None:
    size = folder.index.stat().st_size
    folder.index.write_bytes(folder.index.read_bytes()[:4096] + random.Random(2).randbytes(size - 4096))


def _short_index(folder: DatasetFolder) -> None:
    os.truncate(folder.index, 5000)


def _empty_index(folder: DatasetFolder) -> None:
    os.truncate(folder.index, 0)


def _foreign_index(folder: DatasetFolder) -> None:
    _delete_index_and_logs(folder)
    folder.index.write_text("this is a text file, and long enough to be taken for something else\n" * 20)


INDEX_DAMAGE = [
    _delete_index,
    _delete_index_and_logs,
    _random_index,
    _random_pages,
    _short_index,
    _empty_index,
    _foreign_index,
]


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_a_lost_index_is_rebuilt(damage: Damage, folder: DatasetFolder) -> None:
    """Whatever happens to the index while nobody has it open, the next one says what it said before."""
    with Ledger.open(folder) as opened:
        fill(opened)
        before = picture(opened)
    damage(folder)
    with Ledger.open(folder) as opened:
        opened.catch_up()
        assert picture(opened) == before == fresh_picture(folder)


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_lost_under_an_open_ledger_is_rebuilt(damage: Damage, ledger: Ledger, folder: DatasetFolder) -> None:
    """An open ledger survives the loss of its index: at the latest the call after the one that tells of it succeeds."""
    fill(ledger)
    before = picture(ledger)
    damage(folder)
    with contextlib.suppress(StoreError):
        ledger.catch_up()
    ledger.catch_up()
    assert picture(ledger) == before
    assert ledger.commit([pen("s6"), pen("s0")]).new == [True, False]
    assert picture(ledger) == fresh_picture(folder)


def _spoil_rows(folder: DatasetFolder) -> None:
    """Overwrite the index's pages that hold ids, and no others."""
    raw = folder.index.read_bytes()
    with folder.index.open("r+b") as file:
        for page in range(4096, len(raw), 4096):
            if b"id0" in raw[page : page + 4096]:
                file.seek(page)
                file.write(b"\xff" * 4096)


@pytest.fixture
def spoilt(folder: DatasetFolder) -> Picture:
    """Leave a folder whose index has a sound head and spoilt rows; return what it said before."""
    with Ledger.open(folder) as opened:
        opened.commit([pen(f"id{number:05}") for number in range(2000)])
        before = picture(opened)
    _spoil_rows(folder)
    return before


def test_spoilt_rows_are_noticed_by_readers(spoilt: Picture, folder: DatasetFolder) -> None:
    """An index whose head is sound and whose rows are not is rebuilt by the first read that meets them."""
    with Ledger.open(folder) as opened:
        assert opened.look_up(spoilt.entries) == spoilt.entries
        assert picture(opened) == spoilt
    _spoil_rows(folder)
    with Ledger.open(folder) as opened:
        assert dict(opened.entries()) == spoilt.entries


def test_spoilt_rows_are_noticed_by_writers(spoilt: Picture, folder: DatasetFolder) -> None:
    """A commit that meets spoilt rows writes nothing and says so; the next one works as if nothing had been."""
    with Ledger.open(folder) as opened:
        with pytest.raises(StoreError, match=r"index\.sqlite was damaged .* rebuilt at the next use"):
            opened.commit([pen("id00001"), pen("new")])
        assert opened.commit([pen("id00001"), pen("new")]).new == [False, True]
        assert picture(opened).entries.keys() == {*spoilt.entries, "new"}


def _cut_last_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    os.truncate(path, sum(map(len, lines[:-1])))


def _cut_in_a_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def _reverse(path: Path) -> None:
    path.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))


def _drop_first_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))


def _edit_in_place_and_append(path: Path) -> None:
    """Change a byte far from the end through an editor, which makes a new file, and let a line follow."""
    changed = path.read_bytes().replace(b'"id":"s0"', b'"id":"S0"')
    other = path.with_suffix(".new")
    other.write_bytes(changed + pen("s6").line)
    other.replace(path)


def _replace_by_longer(path: Path) -> None:
    path.write_bytes(b"".join(pen(f"n{number}", tokens=1).line for number in range(20)))


def _empty(path: Path) -> None:
    os.truncate(path, 0)


FILE_DAMAGE = [
    _cut_last_line,
    _cut_in_a_line,
    _reverse,
    _drop_first_line,
    _edit_in_place_and_append,
    _replace_by_longer,
    _empty,
    Path.unlink,
]


@pytest.mark.parametrize("change", FILE_DAMAGE)
def test_files_changed_by_hand_are_believed(
    change: Callable[[Path], object], ledger: Ledger, folder: DatasetFolder
) -> None:
    """The index follows whatever a person does to the files: it equals a new index of what is there now."""
    fill(ledger)
    before = picture(ledger)
    change(folder.lines(Kind.ACCEPTED))
    ledger.catch_up()
    assert picture(ledger) == fresh_picture(folder)
    assert picture(ledger) != before
    assert all(ledger.read(entry)[:1] == b"{" for _id, entry in ledger.entries())


def test_lines_of_others_are_found(ledger: Ledger, folder: DatasetFolder) -> None:
    """Lines that another process appended without indexing them count from the next commit on."""
    ledger.commit([pen("a")])
    with folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(pen("b", tokens=4).line)
    assert ledger.commit([pen("b"), pen("c")]).new == [False, True]
    assert picture(ledger) == fresh_picture(folder)


def test_a_touched_file_says_the_same(ledger: Ledger, folder: DatasetFolder) -> None:
    """A file that only got another time, as a copy does, changes nothing."""
    fill(ledger)
    before = picture(ledger)
    os.utime(folder.lines(Kind.ACCEPTED), (1, 1))
    assert ledger.catch_up() == []
    assert picture(ledger) == before


def test_bad_lines_are_told_and_stepped_over(ledger: Ledger, folder: DatasetFolder) -> None:
    """A whole line that is no record is told with its place, and the lines behind it count."""
    path, bad = folder.lines(Kind.ACCEPTED), b'{"id": 7}\n\xff\xfe\n\n{"no": "id"}\n'
    path.write_bytes(pen("a").line + bad + pen("b").line)
    ledger.catch_up()
    assert set(ledger.look_up(["a", "b"])) == {"a", "b"}
    assert [(line.path, line.length) for line in ledger.bad_lines()] == [(path, 9), (path, 2), (path, 0), (path, 12)]
    assert ledger.bad_lines()[0].offset == len(pen("a").line)


def test_duplicates_in_a_file_are_counted(ledger: Ledger, folder: DatasetFolder) -> None:
    """Accepted lines that repeat an id are counted, however often the index is built."""
    path = folder.lines(Kind.ACCEPTED)
    path.write_bytes(pen("a", content="1").line * 3 + pen("b").line)
    ledger.catch_up()
    ledger.commit([pen("c")])
    assert ledger.duplicates() == 2
    assert ledger.totals().samples == 3


@pytest.mark.parametrize("count", [10**30, 2**63, -7])
def test_an_absurd_token_count_is_none(ledger: Ledger, folder: DatasetFolder, count: int) -> None:
    """A line whose token count is beyond all reason is a record like any other, with no tokens to count."""
    whole = json.loads(pen("big").line)
    whole["usage"]["completion_tokens"] = count
    folder.lines(Kind.ACCEPTED).write_text(json.dumps(whole) + "\n")
    assert ledger.commit([pen("big"), pen("b", tokens=4)]).new == [False, True]
    assert ledger.totals().by_kind[Kind.ACCEPTED].tokens == 4
    assert picture(ledger) == fresh_picture(folder)


def test_an_index_that_is_deleted_within_a_commit(
    ledger: Ledger, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that goes away between the look at the files and the write is made anew with all lines, not with one."""
    fill(ledger)
    append = jsonl.append

    def append_and_delete(path: Path, data: bytes) -> jsonl.Appended:
        folder.index.unlink()
        return append(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "append", append_and_delete)
        assert ledger.commit([pen("s6", tokens=3)]).new == [True]
    assert ledger.commit([pen("s0"), pen("s6"), pen("s7")]).new == [False, False, True]
    assert picture(ledger) == fresh_picture(folder)


def test_a_line_that_is_edited_right_after_a_commit(
    ledger: Ledger, folder: DatasetFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand edit between the write and the look at the file is no part of the commit: it is found at the next look."""
    ledger.commit([pen("a")])
    append = jsonl.append

    def append_and_edit(path: Path, data: bytes) -> jsonl.Appended:
        appended = append(path, data)
        path.write_bytes(path.read_bytes().removeprefix(pen("a").line))
        return appended

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "append", append_and_edit)
        ledger.commit([pen("b")])
    ledger.catch_up()
    assert picture(ledger) == fresh_picture(folder)
    assert ledger.look_up(["a"]) == {}


def test_many_lines_are_indexed_in_pieces(ledger: Ledger, folder: DatasetFolder) -> None:
    """A file with more lines than are merged at once is indexed as a whole."""
    with folder.lines(Kind.PENDING).open("wb") as file:
        file.writelines(pen(f"id{number:05}", Kind.PENDING).line for number in range(5001))
    ledger.catch_up()
    assert ledger.totals().count(Kind.PENDING) == 5001
    assert [id_ for id_, _entry in ledger.entries()] == [f"id{number:05}" for number in range(5001)]


@pytest.mark.parametrize(
    ("kind", "is_turn", "follows"),
    [
        (Kind.ACCEPTED, False, "the sample is asked again"),
        (Kind.FAILED, False, "the sample is asked again"),
        (Kind.PENDING, False, "the next producer enqueue of the same input writes it again"),
        (Kind.REFUSED, False, "the next producer enqueue of the same input writes it again"),
        (Kind.ACCEPTED, True, "that turn is asked again if its conversation is not recorded yet"),
    ],
)
def test_what_follows_from_a_torn_line_depends_on_its_file(
    folder: DatasetFolder, kind: Kind, is_turn: bool, follows: str
) -> None:
    """The sentence about a torn line says what becomes of that line, be it a sample's, a row's or a turn's."""
    place = folder.turns("f" * 16) if is_turn else folder
    with Ledger.open(place) as ledger:
        place.lines(kind).write_bytes(b'{"id": "torn')
        (mending,) = ledger.catch_up()
    assert str(mending).endswith(f"12 bytes from byte 0 on were moved to {place.torn}; {follows}.")


def test_a_torn_tail_is_mended_before_the_next_line(ledger: Ledger, folder: DatasetFolder) -> None:
    """A commit after a crash cuts the torn line off, tells of it, and writes on a line of its own."""
    path = folder.lines(Kind.ACCEPTED)
    ledger.commit([pen("a")])
    with path.open("ab") as file:
        file.write(pen("b").line[:70])
    committed = ledger.commit([pen("b"), pen("c")])
    assert committed.new == [True, True]
    assert [mending.cut for mending in committed.mended] == [70]
    assert path.read_bytes() == pen("a").line + pen("b").line + pen("c").line
    assert json.loads(folder.torn.read_bytes())["offset"] == len(pen("a").line)


def test_a_lost_newline_costs_no_call(ledger: Ledger, folder: DatasetFolder) -> None:
    """A record that lost only its newline is recorded: it is not asked again."""
    ledger.commit([pen("a")])
    folder.lines(Kind.ACCEPTED).write_bytes(pen("a").line + pen("b").line[:-1])
    committed = ledger.commit([pen("b")])
    assert (committed.new, [mending.cut for mending in committed.mended]) == ([False], [0])
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("a").line + pen("b").line
