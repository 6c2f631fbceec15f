"""Selection: which rows are read and in which order, the same every time, with nothing lost from the books."""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import Iterator

import pytest

from app.errors import DiskFullError, SourceError, UsageError
from producer.adapters.registry import choose
from producer.filters import parse
from producer.formats.rows import Row, json_row
from producer.refusals import Reason
from producer.samples import Pass
from producer.selection import Selection
from producer.shuffle import shuffled
from producer.sources import RowSource


def source_of(lines: list[object]) -> RowSource:
    """Return a source of these values, each written as a line of JSON; bytes are lines already."""
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return RowSource("test", lambda: iter([json_row(text, number=n) for n, text in enumerate(texts, start=1)]))


def prompts(count: int) -> list[object]:
    """Return rows with a prompt and a number."""
    return [{"prompt": f"p{number}", "n": number} for number in range(count)]


def numbers(selection: Selection) -> list[int]:
    """Return the `n` of the chosen rows, in order."""
    return [row.value["n"] for row in selection.rows() if row.value is not None]


def test_all_conditions_must_hold_and_each_counts_what_it_left_out() -> None:
    """A row is left out by the first condition that does not hold; the limit counts what is left."""
    selection = Selection(source_of(prompts(100)), filters=[parse("n>=10"), parse("n~[05]$")], limit=3)

    assert numbers(selection) == [10, 15, 20]
    assert selection.left_out == {"n>=10": 10, "n~[05]$": 8}
    assert selection.left_out_rows == 18


def test_rows_that_cannot_be_read_are_not_left_out_in_silence() -> None:
    """A condition cannot judge a broken row, so that it is refused with its own reason."""
    selection = Selection(
        source_of([{"prompt": "a", "n": 1}, b"{broken", {"prompt": "b", "n": 2}]), filters=[parse("n=2")]
    )
    made = Pass(selection, adapter=choose("auto"))
    batches = list(made.batches())

    assert [row.reason for batch in batches for row in batch.refused] == [Reason.NOT_JSON]
    assert [sample.messages[0]["content"] for batch in batches for sample in batch.samples] == ["b"]
    assert (made.read, made.refused, selection.left_out_rows) == (2, 1, 1)


@pytest.mark.parametrize("limit", [None, 1])
def test_a_column_that_no_row_has_is_a_typing_mistake(limit: int | None) -> None:
    """A condition on an unknown column ends the command and names the columns that are there."""
    selection = Selection(source_of([*prompts(3), {"text": "a"}]), filters=[parse("nn!=1")], limit=limit)

    with pytest.raises(UsageError, match=r"no row has the column 'nn'; the columns are prompt, n, text\."):
        list(selection.rows())


def test_rows_before_a_broken_end_are_kept() -> None:
    """What was read before the source broke off is judged and given, then the error comes."""

    def rows() -> Iterator[Row]:
        yield json_row(b'{"n": 1}', number=1)
        yield json_row(b'{"n": 2}', number=2)
        raise SourceError("gone.")

    found = Selection(RowSource("test", rows), filters=[parse("n=2")]).rows()

    assert next(found).number == 2
    with pytest.raises(SourceError, match="gone"):
        next(found)


def test_a_seed_gives_one_order_whatever_the_order_of_the_rows() -> None:
    """The order is made of seed and content: moved rows, keys in another order and other rows change nothing."""
    rows = prompts(300)
    moved = [{"n": row["n"], "prompt": row["prompt"]} for row in reversed(rows)]  # type: ignore[index]
    first = numbers(Selection(source_of(rows), shuffle=7))

    assert first != sorted(first)
    assert sorted(first) == list(range(300))
    assert numbers(Selection(source_of(moved), shuffle=7)) == first
    assert numbers(Selection(source_of(rows), shuffle=8)) != first
    assert numbers(Selection(source_of(rows[:200]), shuffle=7)) == [n for n in first if n < 200]


def test_a_limit_with_a_seed_is_the_beginning_of_the_whole_order() -> None:
    """A larger limit keeps what a smaller one chose, so that a run can be made longer."""
    whole = numbers(Selection(source_of(prompts(1000)), shuffle=3))

    for limit in (1, 10, 999, 5000):
        assert numbers(Selection(source_of(prompts(1000)), shuffle=3, limit=limit)) == whole[:limit]


def test_a_shuffle_tells_how_far_it_is() -> None:
    """While a long source is read before the first row comes, the rows so far are told."""
    told: list[int] = []
    rows = Selection(source_of(prompts(1200)), shuffle=1, limit=5, on_wait=told.append).rows()

    assert next(rows).value is not None
    assert told == [500, 1000]


def test_an_even_choice() -> None:
    """Every part of a source has its share in what a seed and a limit choose."""
    chosen = numbers(Selection(source_of(prompts(2000)), shuffle=1, limit=400))

    parts = [sum(part <= n < part + 500 for n in chosen) for part in range(0, 2000, 500)]
    assert all(70 <= part <= 130 for part in parts), parts


def test_shuffled_rows_are_whole_and_broken_ones_too() -> None:
    """Rows come out of the temporary file as they went in, equal ones as often as they are there."""
    rows = [
        json_row(json.dumps({"t": "\u2028 \x00 ü", "x": [1.5, None, 2**70]}).encode(), number=1, name="a.jsonl"),
        json_row(b'{"t": "x"}', number=2),
        json_row(b'{"t": "x"}', number=3),
        json_row(b"\xff\xfe", number=4),
        json_row(b'{"t": NaN}', number=5),
    ]
    found = sorted(shuffled(rows, 1, None), key=lambda row: row.number)

    assert [(row.value, row.problem, row.name, row.size, row.content()) for row in found] == [
        (row.value, row.problem, row.name, row.size, row.content()) for row in rows
    ]
    assert [row.start for row in found] == [row.start for row in rows]


def test_a_shuffle_holds_no_rows_in_memory() -> None:
    """Twenty megabytes of rows are shuffled with a few in memory."""

    def rows() -> Iterator[Row]:
        for number in range(2000):
            yield json_row(json.dumps({"prompt": f"{number}" + "x" * 10_000}).encode(), number=number)

    tracemalloc.start()
    assert sum(1 for _ in shuffled(rows(), 5, None)) == 2000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14_000_000


def test_a_full_temporary_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary file that cannot grow ends the command with what to do."""

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("producer.shuffle._write", full)
    with pytest.raises(DiskFullError, match=r"--shuffle cannot grow .* SQLITE_TMPDIR"):
        list(shuffled([json_row(b"{}", number=1)], 1, None))
