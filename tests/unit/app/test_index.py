"""The SQLite index: a cache of what the lines say."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UnwritableError
from app.file_state import FileState
from app.index import CHUNK, Entry, Index, Tally, merged
from app.records import Kind


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Return an empty index."""
    made = Index(tmp_path / "index.sqlite")
    yield made
    made.close()


def _entry(kind: Kind = Kind.ACCEPTED, *, reason: str = "", round_: int = 0, tokens: int = 0) -> Entry:
    return Entry(kind, reason, round_, 0, 1, tokens)


def _merge(index: Index, *rows: tuple[str, Entry]) -> int:
    index.make()
    with index.transaction() as change:
        return change.merge(rows)


def test_new_index_is_empty(index: Index) -> None:
    """An index without lines knows nobody; one that was never written cannot be read."""
    with pytest.raises(sqlite3.OperationalError):
        index.look_up(["a"])
    index.make()
    assert index.look_up(["a"]) == {}
    assert index.page("") == []
    assert (index.totals().samples, index.duplicates(), index.bad_lines(), index.files()) == (0, 0, [], {})


def test_look_up_of_many_ids(index: Index) -> None:
    """More ids than fit into one statement are all found; unknown ones are left out."""
    rows = [(f"id{number:05}", _entry(tokens=number)) for number in range(2 * CHUNK + 1)]
    _merge(index, *rows)
    assert index.look_up(["nobody", *(id_ for id_, _entry in rows)]) == dict(rows)


def test_pages_are_in_id_order(index: Index) -> None:
    """Pages walk through all ids of the wanted kinds, each once, in order."""
    kinds = itertools.cycle([Kind.ACCEPTED, Kind.FAILED, Kind.PENDING])
    rows = [(f"id{number * 7919 % 2503:05}", _entry(next(kinds))) for number in range(2503)]
    _merge(index, *rows)
    found, last = list[str](), ""
    while page := index.page(last, Kind.ACCEPTED, Kind.FAILED):
        assert len(page) <= 1000
        found += [id_ for id_, _entry in page]
        last = found[-1]
    assert found == sorted(id_ for id_, entry in rows if entry.kind is not Kind.PENDING)


def test_totals_count_each_id_once(index: Index) -> None:
    """An id counts as what it is now, with the tokens and the reason of its winning line."""
    _merge(index, ("a", _entry(Kind.PENDING)), ("b", _entry(Kind.PENDING)), ("c", _entry(Kind.PENDING)))
    _merge(index, ("a", _entry(Kind.FAILED, reason="timeout")), ("b", _entry(Kind.REJECTED, reason="empty", tokens=3)))
    _merge(index, ("a", _entry(Kind.ACCEPTED, round_=1, tokens=10)), ("row", _entry(Kind.REFUSED, reason="no_prompt")))
    totals = index.totals()
    assert dict(totals.by_kind) == {
        Kind.PENDING: Tally(1, 0),
        Kind.REJECTED: Tally(1, 3),
        Kind.ACCEPTED: Tally(1, 10),
        Kind.REFUSED: Tally(1, 0),
    }
    assert totals.by_reason == {(Kind.REJECTED, "empty"): 1, (Kind.REFUSED, "no_prompt"): 1}
    assert (totals.samples, totals.recorded, totals.count(Kind.FAILED)) == (3, 2, 0)


def test_several_reasons_add_up(index: Index) -> None:
    """Ids of one kind with different reasons count together by kind and apart by reason."""
    rejected = [_entry(Kind.REJECTED, reason=reason, tokens=1) for reason in ("empty", "truncated", "empty")]
    _merge(index, *zip("abc", rejected, strict=True))
    assert index.totals().by_kind == {Kind.REJECTED: Tally(3, 3)}
    assert index.totals().by_reason == {(Kind.REJECTED, "empty"): 2, (Kind.REJECTED, "truncated"): 1}


def test_duplicates_are_told(index: Index) -> None:
    """A second accepted line of an id is counted as a duplicate, in the same group or later; the first one stays."""
    assert _merge(index, ("a", _entry(tokens=1)), ("a", _entry(tokens=2)), ("b", _entry())) == 1
    assert _merge(index, ("a", _entry(tokens=3)), ("b", _entry(Kind.FAILED))) == 1
    assert index.look_up(["a"])["a"].tokens == 1


def test_a_broken_transaction_changes_nothing(index: Index) -> None:
    """A change that fails halfway leaves the index as it was."""
    _merge(index, ("a", _entry()))

    def fail_halfway() -> None:
        with index.transaction() as change:
            change.merge([("b", _entry())])
            raise KeyError("halfway")

    with pytest.raises(KeyError):
        fail_halfway()
    assert set(index.look_up(["a", "b"])) == {"a"}
    assert index.totals().samples == 1


def test_files_and_bad_lines_are_remembered(index: Index) -> None:
    """How a file looked, its duplicates and its bad lines are kept until the index is cleared."""
    state = FileState(10, 20, 30, b"tail\n")
    index.make()
    with index.transaction() as change:
        change.set_file(Kind.ACCEPTED, state, duplicates=2)
        change.set_file(Kind.ACCEPTED, state._replace(size=11), duplicates=1)
        change.add_bad_line(Kind.FAILED, 5, 6)
    assert index.files() == {Kind.ACCEPTED: state._replace(size=11)}
    assert index.duplicates() == 3
    assert index.bad_lines() == [(Kind.FAILED, 5, 6)]
    with index.transaction() as change:
        change.clear()
    assert (index.files(), index.duplicates(), index.bad_lines()) == ({}, 0, [])


def test_a_deleted_index_is_noticed(index: Index) -> None:
    """An index file that somebody deletes is made anew, and no leftover log brings old rows back."""
    _merge(index, ("a", _entry()))
    index.path.unlink()
    index.make()
    assert index.look_up(["a"]) == {}
    _merge(index, ("b", _entry()))
    assert set(index.look_up(["a", "b"])) == {"b"}


def test_two_processes_see_each_other(index: Index) -> None:
    """What one connection has committed another one reads at once."""
    other = Index(index.path)
    other.make()
    assert other.look_up(["a"]) == {}
    _merge(index, ("a", _entry()))
    assert set(other.look_up(["a"])) == {"a"}
    other.close()


def test_forgetting_leaves_no_file(index: Index) -> None:
    """A forgotten index is gone with its logs."""
    _merge(index, ("a", _entry()))
    index.forget()
    assert list(index.path.parent.iterdir()) == []


def test_an_index_of_another_version_is_not_read(index: Index) -> None:
    """An index that another version wrote is refused as damaged, which makes the ledger rebuild it."""
    other = sqlite3.connect(index.path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        index.totals()


def test_an_index_that_cannot_be_opened(tmp_path: Path) -> None:
    """A folder that does not exist is told in one sentence with the index's path."""
    index = Index(tmp_path / "nowhere" / "index.sqlite")
    with pytest.raises(UnwritableError, match=r"nowhere/index\.sqlite cannot be used"):
        index.make()


_entries = st.builds(
    Entry,
    st.sampled_from(Kind),
    st.sampled_from(["", "timeout"]),
    st.integers(0, 3),
    st.integers(0, 9),
    st.just(1),
    st.just(0),
)


def _fold(entries: list[Entry]) -> Entry:
    result = None
    for entry in entries:
        result = merged(result, entry)
    assert result is not None
    return result


@given(entries=st.lists(_entries, min_size=1, max_size=6), data=st.data())
def test_the_order_of_files_does_not_matter(entries: list[Entry], data: st.DataObject) -> None:
    """Lines of different files merge to the same entry whichever file is read first, if each keeps its own order."""
    by_file = {kind: [entry for entry in entries if entry.kind is kind] for kind in Kind}
    order = data.draw(st.permutations(list(Kind)))
    assert _fold([entry for kind in order for entry in by_file[kind]]) == _fold(entries)


def test_precedence() -> None:
    """Accepted beats rejected, rejected beats failed, failed beats pending, and the newest round is kept."""
    ranked = [_entry(kind, round_=3 - number) for number, kind in enumerate(list(Kind))]
    for low, high in itertools.combinations(ranked, 2):
        assert merged(low, high).kind is merged(high, low).kind is high.kind
        assert merged(low, high).round == low.round


def test_of_equal_kinds_the_newer_counts_but_accepted_stays() -> None:
    """A later failure replaces an earlier one; an accepted answer is never replaced."""
    first, later = _entry(Kind.FAILED, reason="timeout"), _entry(Kind.FAILED, reason="reset", round_=1)
    assert merged(first, later) == later
    assert merged(_entry(tokens=1), _entry(tokens=2)).tokens == 1
