"""A dataset folder's memory: what is recorded, once, whatever happens to files and index."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from app.errors import DiskFullError, StoreError, UnwritableError
from app.index import Tally
from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.records import Kind
from tests.support.folders import fresh_picture, largest_file, mounted, pen, picture, without_rights
from tests.support.jsonl_check import check_jsonl

Damage = Callable[[DatasetFolder], object]


@pytest.fixture
def folder(tmp_path: Path) -> DatasetFolder:
    """Return a dataset folder that does not exist yet."""
    return DatasetFolder(tmp_path / "prepared" / "d")


@pytest.fixture
def ledger(folder: DatasetFolder) -> Iterator[Ledger]:
    """Return an open ledger."""
    with Ledger.open(folder) as opened:
        yield opened


def _fill(ledger: Ledger) -> None:
    """Write lines of every kind, in several rounds."""
    ledger.commit([pen(f"s{number}", Kind.PENDING) for number in range(8)] + [pen("row9", Kind.REFUSED)])
    ledger.commit([pen("s0", tokens=5), pen("s1", tokens=7, content="x" * 300)])
    ledger.commit([pen("s2", Kind.FAILED, reason="timeout"), pen("s3", Kind.REJECTED, reason="empty", tokens=2)])
    ledger.commit([pen("s4", Kind.FAILED, reason="reset"), pen("s5", tokens=11, content="last")])
    ledger.commit([pen("s2", round_=1, tokens=1), pen("s4", Kind.FAILED, reason="timeout", round_=1)])


# What is written


def test_open_makes_the_folder(folder: DatasetFolder) -> None:
    """A folder that is missing, with its parents, is made, and holds nothing but what is needed."""
    with Ledger.open(folder) as opened:
        assert opened.totals().samples == 0
        assert {path.name.partition("-")[0] for path in folder.path.iterdir()} <= {"index.sqlite", ".lock"}


def test_a_committed_line_is_there_as_it_was(ledger: Ledger, folder: DatasetFolder) -> None:
    """A line is found in its file, byte by byte, and through its entry."""
    lines = [pen("a", content="é\u2028"), pen("b", Kind.REJECTED, reason="empty"), pen("c", Kind.FAILED, reason="x")]
    assert ledger.commit(lines).new == [True] * 3
    for line in lines:
        assert folder.lines(line.kind).read_bytes() == line.line
        assert ledger.read(ledger.look_up([line.id])[line.id]) + b"\n" == line.line


def test_an_id_is_recorded_once(ledger: Ledger, folder: DatasetFolder) -> None:
    """Committing an id again, later or in the same group, writes nothing."""
    assert ledger.commit([pen("a", content="1"), pen("a", content="2")]).new == [True, False]
    assert ledger.commit([pen("b"), pen("a", content="3"), pen("a", Kind.FAILED, reason="x")]).new == [
        True,
        False,
        False,
    ]
    assert folder.lines(Kind.ACCEPTED).read_bytes() == pen("a", content="1").line + pen("b").line
    assert not folder.lines(Kind.FAILED).exists()


def test_pending_and_refused_are_written_once(ledger: Ledger) -> None:
    """An id that enqueue knows already, in whatever state, is not written as pending again."""
    lines = [pen("a", Kind.PENDING), pen("row1", Kind.REFUSED)]
    assert ledger.commit(lines).new == [True, True]
    assert ledger.commit(lines).new == [False, False]
    ledger.commit([pen("a")])
    assert ledger.commit([pen("a", Kind.PENDING)]).new == [False]


def test_a_retry_counts_by_its_round(ledger: Ledger) -> None:
    """A failed or rejected sample takes one more line per round, whatever its outcome; a redelivery takes none."""
    first = pen("a", Kind.FAILED, reason="timeout")
    second = pen("a", Kind.REJECTED, reason="empty", round_=1)
    third = pen("a", round_=2, tokens=9)
    assert [ledger.commit([line, line]).new for line in (first, second, third)] == [[True, False]] * 3
    assert [ledger.commit([line]).new for line in (first, second, third)] == [[False]] * 3
    assert ledger.look_up(["a"])["a"][:3] == (Kind.ACCEPTED, "", 2)
    assert ledger.totals().by_kind == {Kind.ACCEPTED: Tally(1, 9)}


def test_a_failed_retry_of_a_rejected_sample_leaves_it_rejected(ledger: Ledger) -> None:
    """A text that was kept counts more than a later failure to get another, and the round moves on."""
    ledger.commit([pen("a", Kind.REJECTED, reason="empty", tokens=3)])
    assert ledger.commit([pen("a", Kind.FAILED, reason="timeout", round_=1)]).new == [True]
    assert ledger.look_up(["a"])["a"][:3] == (Kind.REJECTED, "empty", 1)
    assert ledger.commit([pen("a", Kind.FAILED, reason="timeout", round_=1)]).new == [False]


def test_totals_are_exact(ledger: Ledger) -> None:
    """Counts, tokens and reasons are those of the lines that count."""
    _fill(ledger)
    totals = ledger.totals()
    assert totals.by_kind == {
        Kind.REFUSED: Tally(1, 0),
        Kind.PENDING: Tally(2, 0),
        Kind.FAILED: Tally(1, 0),
        Kind.REJECTED: Tally(1, 2),
        Kind.ACCEPTED: Tally(4, 24),
    }
    assert totals.by_reason == {
        (Kind.REFUSED, "no_prompt"): 1,
        (Kind.FAILED, "timeout"): 1,
        (Kind.REJECTED, "empty"): 1,
    }
    assert (totals.samples, totals.recorded) == (8, 6)
    assert [id_ for id_, _entry in ledger.entries(Kind.PENDING)] == ["s6", "s7"]


def test_threads_share_a_ledger(ledger: Ledger, folder: DatasetFolder) -> None:
    """Threads that commit overlapping ids through one ledger write each id exactly once."""
    won: list[str] = []

    def write(seed: int) -> None:
        ids = random.Random(seed).sample(range(60), 60)
        for start in range(0, 60, 7):
            lines = [pen(f"s{number}") for number in ids[start : start + 7]]
            new = ledger.commit(lines).new
            won.extend(line.id for line, fresh in zip(lines, new, strict=True) if fresh)
            ledger.look_up([line.id for line in lines])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == sorted(check_jsonl(folder.lines(Kind.ACCEPTED)).ids) == sorted(f"s{n}" for n in range(60))


# What is read again


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
        _fill(opened)
        before = picture(opened)
    damage(folder)
    with Ledger.open(folder) as opened:
        opened.catch_up()
        assert picture(opened) == before == fresh_picture(folder)


@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_an_index_lost_under_an_open_ledger_is_rebuilt(damage: Damage, ledger: Ledger, folder: DatasetFolder) -> None:
    """An open ledger survives the loss of its index: at the latest the call after the one that tells of it succeeds."""
    _fill(ledger)
    before = picture(ledger)
    damage(folder)
    with contextlib.suppress(StoreError):
        ledger.catch_up()
    ledger.catch_up()
    assert picture(ledger) == before
    assert ledger.commit([pen("s6"), pen("s0")]).new == [True, False]
    assert picture(ledger) == fresh_picture(folder)


def test_damage_in_the_middle_is_noticed_by_readers(folder: DatasetFolder) -> None:
    """An index whose head is sound and whose rows are not is rebuilt by the first read that meets them."""
    with Ledger.open(folder) as opened:
        opened.commit([pen(f"id{number:05}") for number in range(2000)])
        before = picture(opened)
    raw = folder.index.read_bytes()
    with folder.index.open("r+b") as file:
        for page in range(6 * 4096, len(raw), 4096):
            if b"id0" in raw[page : page + 4096]:
                file.seek(page)
                file.write(b"\xff" * 4096)
    with Ledger.open(folder) as opened:
        assert len(opened.look_up(before.entries)) == 2000
        assert picture(opened) == before
    with Ledger.open(folder) as opened:
        assert dict(opened.entries()) == before.entries


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
    _fill(ledger)
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
    _fill(ledger)
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


def test_many_lines_are_indexed_in_pieces(ledger: Ledger, folder: DatasetFolder) -> None:
    """A file with more lines than are merged at once is indexed as a whole."""
    with folder.lines(Kind.PENDING).open("wb") as file:
        file.writelines(pen(f"id{number:05}", Kind.PENDING).line for number in range(5001))
    ledger.catch_up()
    assert ledger.totals().count(Kind.PENDING) == 5001
    assert [id_ for id_, _entry in ledger.entries()] == [f"id{number:05}" for number in range(5001)]


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


# What cannot be written


def test_a_write_that_fails_is_taken_back(ledger: Ledger, folder: DatasetFolder) -> None:
    """A line that does not fit leaves file and index as they were, and can be committed later."""
    ledger.commit([pen("a", content="x" * 2**20)])
    before = picture(ledger)
    with largest_file(2**20 + 5000), pytest.raises(DiskFullError, match=r"raw_responses\.jsonl cannot grow"):
        ledger.commit([pen("b", content="y" * 9000)])
    assert picture(ledger) == before
    assert ledger.commit([pen("b"), pen("a")]).new == [True, False]
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


# Anything, in any order

_ids = st.sampled_from(["a", "b", "c", "d", "e"])
_pens = st.builds(
    pen,
    _ids,
    st.sampled_from([Kind.ACCEPTED, Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED, Kind.PENDING]),
    reason=st.sampled_from(["timeout", "empty"]),
    round_=st.integers(0, 2),
    tokens=st.integers(0, 5),
)


class LedgerMachine(RuleBasedStateMachine):
    """Commits, crashes, damage and repairs in any order leave an index that equals a new one."""

    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  spares the disk thousands of fsyncs
        self.path = Path(tempfile.mkdtemp(dir=base))
        self.folder = DatasetFolder(self.path)
        self.ledger = Ledger.open(self.folder)
        self.recorded: set[str] = set()
        """Ids with an accepted line that nobody has cut since."""

    @rule(pens=st.lists(_pens, max_size=4))
    def commit(self, pens: list[Pen]) -> None:
        """Write lines as the recorder does."""
        new = self.ledger.commit(pens).new
        known = self.ledger.look_up([line.id for line in pens])
        assert set(known) == {line.id for line in pens}
        accepted = {line.id for line, written in zip(pens, new, strict=True) if written and line.kind is Kind.ACCEPTED}
        assert not accepted & self.recorded
        self.recorded |= accepted
        assert all(known[line.id].kind is Kind.ACCEPTED for line in pens if line.id in self.recorded)

    @rule(line=_pens)
    def crash_before_the_index(self, line: Pen) -> None:
        """Append a line and die before it is indexed."""
        self.ledger.catch_up()
        with self.folder.lines(line.kind).open("ab") as file:
            file.write(line.line)

    @rule(line=_pens, data=st.data(), nuls=st.integers(0, 3))
    def crash_inside_the_write(self, line: Pen, data: st.DataObject, nuls: int) -> None:
        """Append a piece of a line and die."""
        self.ledger.catch_up()
        with self.folder.lines(line.kind).open("ab") as file:
            file.write(line.line[: data.draw(st.integers(1, len(line.line) - 1))] + b"\0" * nuls)

    @rule(kind=st.sampled_from(Kind))
    def spoil_a_line(self, kind: Kind) -> None:
        """Append a whole line that is no record."""
        self.ledger.catch_up()
        with self.folder.lines(kind).open("ab") as file:
            file.write(b"{torn and glued}\n")

    @precondition(lambda self: self.folder.lines(Kind.ACCEPTED).exists())
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        """Cut the file of accepted records at any byte."""
        path = self.folder.lines(Kind.ACCEPTED)
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
        self.recorded.clear()

    @rule(all_of_it=st.booleans())
    def lose_the_index(self, all_of_it: bool) -> None:
        """Delete the index, with or without its logs."""
        for path in self.path.glob("index.sqlite*" if all_of_it else "index.sqlite"):
            path.unlink()

    @rule()
    def restart(self) -> None:
        """Go on in a new process."""
        self.ledger.close()
        self.ledger = Ledger.open(self.folder)

    @rule()
    def catch_up(self) -> None:
        """Find an index that equals a new one, and files without a torn tail."""
        self.ledger.catch_up()
        assert picture(self.ledger) == fresh_picture(self.folder)
        for kind in Kind:
            path = self.folder.lines(kind)
            assert not path.exists() or path.read_bytes()[-1:] in {b"", b"\n"}

    def teardown(self) -> None:
        """Check once more and clean up."""
        self.catch_up()
        self.ledger.close()
        shutil.rmtree(self.path)


TestAnyOrder = LedgerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
