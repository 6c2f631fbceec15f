"""Samples: the cut, the ids, and an account in which no row is lost."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import DiskFullError, SourceError, UsageError
from app.records import sample_id
from producer.adapters.registry import choose
from producer.formats.rows import Row, json_row
from producer.refusals import Reason
from producer.samples import MAX_CONFLICTS, Batch, Pass
from producer.seen import Before, Meeting, Seen
from producer.sources import RowSource, open_source

AUTO = choose("auto")
MIB = 1024 * 1024

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map("x".__add__)
json_values = st.recursive(st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3))
roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), max_size=5)
rows_of_any_shape = st.one_of(
    st.fixed_dictionaries({"messages": conversations}, optional={"id": texts | st.integers() | st.none()}),
    st.fixed_dictionaries({"prompt": texts}, optional={"id": texts, "system": texts}),
    st.fixed_dictionaries({"prompt": json_values}),
)


def source_of(rows: list[object]) -> RowSource:
    """Return a source of these values, each written as a line of JSON."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return RowSource("test", lambda: iter([json_row(line, number=n) for n, line in enumerate(lines, start=1)]))


def run(rows: list[object], *, size: int = 500, **options: object) -> tuple[Batch, Pass]:
    """Make one pass and return all batches as one, with the pass."""
    made = Pass(source_of(rows), adapter=AUTO, **options)  # type: ignore[arg-type]
    batches = list(made.batches(size))
    whole = Batch(
        [sample for batch in batches for sample in batch.samples],
        [row for batch in batches for row in batch.refused],
        sum(batch.read for batch in batches),
    )
    return whole, made


def turns(spec: str) -> list[dict[str, str]]:
    """Return messages from a word such as `sua`: system, user, assistant; each content is its position."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": str(place)} for place, letter in enumerate(spec)]


@pytest.mark.parametrize(
    ("spec", "prompt", "reference"),
    [
        ("u", "u", None),
        ("ua", "u", "1"),
        ("uaua", "uau", "3"),
        ("suaa", "su", "3"),
        ("au", "au", None),
        ("uu", "uu", None),
        ("usu", "usu", None),
        ("ssu", "ssu", None),
        ("uaau", "uaau", None),
    ],
)
def test_the_cut(spec: str, prompt: str, reference: str | None) -> None:
    """All assistant turns at the end are cut, the last is the reference, and everything else stays as it is."""
    (sample,) = run([{"id": "c", "messages": turns(spec)}])[0].samples

    assert sample.messages == turns(spec)[: len(prompt)]
    assert (sample.reference or {}).get("content") == reference


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": turns("s")}, Reason.NO_USER_TURN),
        ({"messages": turns("a")}, Reason.NO_USER_TURN),
        ({"messages": turns("sa")}, Reason.NO_USER_TURN),
        ({"messages": turns("us")}, Reason.BAD_MESSAGES),
        ({"messages": turns("usa")}, Reason.BAD_MESSAGES),
        ({"messages": []}, Reason.BAD_MESSAGES),
        ({"messages": [{"role": "user", "content": ""}]}, Reason.EMPTY_PROMPT),
        ({"messages": [{"role": "user", "content": "   \n\t "}]}, Reason.EMPTY_PROMPT),
        ({"messages": [{"role": "user", "content": "\u200b\u2060 "}]}, Reason.EMPTY_PROMPT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, Reason.EMPTY_PROMPT),
        ({"messages": [*turns("ua"), {"role": "user", "content": ""}]}, Reason.EMPTY_PROMPT),
        ({"prompt": ""}, Reason.EMPTY_PROMPT),
        ({"prompt": None}, Reason.NOT_A_STRING),
        ({"messages": [*turns("u"), {"role": "assistant"}, *turns("u")]}, Reason.MISSING_FIELD),
    ],
)
def test_what_cannot_be_asked_is_refused(row: dict[str, object], reason: Reason) -> None:
    """Conversations without anything to answer never become samples."""
    whole, made = run([{"prompt": "good"}, row])

    assert [(refused.row, refused.reason) for refused in whole.refused] == [(2, reason)]
    assert (made.read, made.refused, len(whole.samples)) == (2, 1, 1)


def test_an_unusable_answer_at_the_end_does_not_refuse_the_prompt() -> None:
    """An assistant turn without text is cut like any other, and is no reference."""
    whole, _ = run([{"messages": [*turns("u"), {"role": "assistant", "content": None}]}])

    assert whole.samples[0].messages == turns("u")
    assert whole.samples[0].reference is None


def test_a_conversation_may_end_on_a_tool_turn() -> None:
    """After a call and its answer the model goes on."""
    call = {"from": "function_call", "value": '{"name":"add","arguments":{}}'}
    row = {"conversations": [{"from": "human", "value": "2+2?"}, call, {"from": "observation", "value": "4"}]}

    (sample,) = run([row])[0].samples

    assert [message["role"] for message in sample.messages] == ["user", "assistant", "tool"]


def test_a_sample_carries_where_it_came_from() -> None:
    """Row, source id and settings go along; the text is sent unchanged."""
    (sample,) = run([{"id": 7, "prompt": "   keep my spaces   "}], settings="f00")[0].samples

    messages = [{"role": "user", "content": "   keep my spaces   "}]
    assert sample.id == sample_id(messages, source_id="7") == "7-" + sample.id.removeprefix("7-")
    assert sample.messages == messages
    assert (sample.source.row, sample.source.id, sample.source.name, sample.settings) == (1, "7", None, "f00")


def test_a_system_prompt_for_samples_without_one() -> None:
    """The run's system prompt is put first, is part of the id, and never stands beside another."""
    rows = [
        {"messages": turns("u")},
        {"messages": turns("su")},
        {"messages": [{"role": "system", "content": ""}, *turns("u")]},
    ]
    whole, _ = run(rows, system="be brief")

    assert whole.samples[0].messages == [{"role": "system", "content": "be brief"}, *turns("u")]
    assert [sample.messages for sample in whole.samples[1:]] == [row["messages"] for row in rows[1:]]
    assert whole.samples[0].id != run(rows)[0].samples[0].id


def test_several_samples_per_prompt() -> None:
    """Copies differ only in their ids, and the first copy's id is the same without copies."""
    three, made = run([{"prompt": "Roll a die."}], samples_per_prompt=3)
    one, _ = run([{"prompt": "Roll a die."}])

    first = one.samples[0].id
    assert [sample.id for sample in three.samples] == [first, f"{first}.2", f"{first}.3"]
    assert (made.read, made.refused) == (1, 0)


def test_equal_prompts_without_ids_are_one_sample() -> None:
    """Equal rows are asked once, whatever their shape; rows that differ in a byte are different prompts."""
    rows = [
        {"messages": [{"role": "user", "content": "Roll a die."}]},
        {"messages": [{"role": "user", "content": "Roll a die."}]},
        {"messages": [{"role": "user", "content": "Flip a coin."}]},
        {"prompt": "Flip a coin."},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Flip a coin."}]},
        {"messages": [{"role": "user", "content": "Flip a coin. "}]},
    ]
    for size in (1, 2, 500):
        whole, made = run(list(rows), size=size)

        assert [sample.source.row for sample in whole.samples] == [1, 3, 5, 6]
        assert [(row.row, row.reason, row.detail) for row in whole.refused] == [
            (2, "duplicate", "the same prompt as row 1"),
            (4, "duplicate", "the same prompt as row 3"),
        ]
        assert whole.refused[0].id == f"!dup-{whole.samples[0].id}"
        assert (made.read, made.refused, made.duplicates) == (6, 2, 2)


def test_one_source_id_with_two_prompts() -> None:
    """Both prompts are kept under distinct ids and told of with both rows; an exact copy is a duplicate."""
    rows = [{"id": "p1", "prompt": "river"}, {"id": "p2", "prompt": "hill"}, {"id": "p1", "prompt": "desert"}]
    for size in (1, 500):
        whole, made = run([*rows, rows[1], rows[2]], size=size)

        assert [sample.source.row for sample in whole.samples] == [1, 2, 3]
        assert len({sample.id for sample in whole.samples}) == 3
        assert [(row.row, row.detail) for row in whole.refused] == [
            (4, "the same prompt as row 2"),
            (5, "the same prompt as row 3"),
        ]
        assert [(note.id, note.first_row, note.row) for note in made.conflicts] == [("p1", "row 1", "row 3")]
        assert made.conflict_count == 1


def test_conflicts_are_counted_beyond_those_kept() -> None:
    """A source whose ids are all one gives a short list and the whole count."""
    _, made = run([{"id": "same", "prompt": f"prompt {number}"} for number in range(100)])

    assert len(made.conflicts) == MAX_CONFLICTS
    assert made.conflict_count == 99


def test_rows_of_a_folder_are_named_with_their_file(tmp_path: pathlib.Path) -> None:
    """Equal prompts in two files are told apart by file and row."""
    (tmp_path / "a.jsonl").write_text('\n{"prompt":"x"}\n{"id":"1","prompt":"y"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt":"x"}\n{"id":"1","prompt":"z"}\n')
    made = Pass(open_source(str(tmp_path), max_row_bytes=MIB), adapter=AUTO)

    (batch,) = made.batches()

    assert [(sample.source.name, sample.source.row) for sample in batch.samples] == [
        ("a.jsonl", 2),
        ("a.jsonl", 3),
        ("b.jsonl", 2),
    ]
    assert [(row.name, row.row, row.detail) for row in batch.refused] == [
        ("b.jsonl", 1, "the same prompt as row 2 of a.jsonl")
    ]
    assert batch.refused[0].source == str(tmp_path.resolve())
    assert (made.conflicts[0].first_row, made.conflicts[0].row) == ("row 3 of a.jsonl", "row 2 of b.jsonl")


def test_equal_refused_rows_are_told_apart_by_their_occurrence() -> None:
    """The k-th equal refused row has `#k` behind its id, over batches too."""
    for size in (1, 2, 500):
        whole, _ = run([{"prompt": "x"}, b"{torn", {"prompt": ""}, b"{torn", {"prompt": ""}, b"{torn"], size=size)

        torn = [row.id for row in whole.refused if row.reason == "not_json"]
        empty = [row.id for row in whole.refused if row.reason == "empty_prompt"]
        assert torn == [torn[0], f"{torn[0]}#2", f"{torn[0]}#3"]
        assert empty == [empty[0], f"{empty[0]}#2"]
        assert len(torn[0]) == 17
        assert torn[0].startswith("!")


def test_a_refused_row_shows_its_beginning() -> None:
    """refused.jsonl gets row, reason, words and a short start."""
    (row,) = run([{"prompt": "x"}, b'{"prompt": "a\tb"'])[0].refused

    assert (row.row, row.reason, row.start) == (2, "not_json", '{"prompt": "a\\tb"')


def shuffled_keys(value: object, rng: random.Random) -> object:
    """Return a JSON value with the keys of every object in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled_keys(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled_keys(item, rng) for item in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(rows_of_any_shape, max_size=6),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.booleans(),
)
def test_ids_do_not_depend_on_order(rows: list[dict[str, object]], rng: random.Random, size: int, more: bool) -> None:
    """Rows and keys in another order, in other batches, with a column more, give the same ids."""
    rows = [{"prompt": "first"}, *rows, *rows[:2]]
    moved = [shuffled_keys({**row, "note": "extra"} if more else row, rng) for row in rows]
    rng.shuffle(moved)

    whole, made = run(list(rows))
    again, made_again = run(moved, size=size)

    assert {sample.id for sample in whole.samples} == {sample.id for sample in again.samples}
    assert made.read == len(whole.refused) + len(whole.samples) == made_again.read
    assert made.refused == made_again.refused == len(again.refused)
    if not more:
        assert sorted(row.id for row in whole.refused) == sorted(row.id for row in again.refused)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of_any_shape | st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")), max_size=8))
def test_every_row_is_accounted_for(rows: list[object]) -> None:
    """Whatever comes in: read = refused + rows that became samples, and no two samples or refused rows share an id."""
    whole, made = run([{"prompt": "first"}, *rows])

    assert made.read == whole.read == len(rows) + 1
    assert made.read == made.refused + len({sample.source.row for sample in whole.samples})
    ids = [sample.id for sample in whole.samples] + [row.id for row in whole.refused]
    assert len(ids) == len(set(ids))
    assert all(sample.messages[-1]["role"] in {"user", "tool"} for sample in whole.samples)


def test_limit_bounds_the_rows_read() -> None:
    """A limit counts rows, refused ones too."""
    rows = source_of([{"prompt": "a"}, b"{", {"prompt": "b"}, {"prompt": "c"}])
    made = Pass(dataclasses.replace(rows, limit=3), adapter=AUTO)
    samples = [sample for batch in made.batches() for sample in batch.samples]

    assert (made.read, made.refused, len(samples)) == (3, 1, 2)


def test_a_source_without_rows_has_no_batches() -> None:
    """Nothing in, nothing out."""
    whole, made = run([])

    assert (whole.read, made.read, made.refused, whole.samples) == (0, 0, 0, [])


def test_a_source_of_unknown_shape_is_refused_at_its_first_batch() -> None:
    """When no row of the first batch has a known column, the error lists the columns there are."""
    with pytest.raises(UsageError, match=r"their columns are id, frage, note\."):
        Pass(source_of([b"{torn", {"id": 1, "frage": "x"}, {"id": 2, "note": "y"}]), adapter=AUTO).batches()
    with pytest.raises(UsageError, match="--adapter messages reads"):
        Pass(source_of([{"prompt": "x"}]), adapter=choose("messages")).batches()
    whole, _ = run([{"id": 1, "frage": "x"}, {"prompt": "y"}])
    assert [row.reason for row in whole.refused] == ["missing_field"]
    whole, _ = run([{"id": 1, "messages": None}])
    assert [row.reason for row in whole.refused] == ["bad_messages"]
    whole, _ = run([b"{torn"])
    assert [row.reason for row in whole.refused] == ["not_json"]


def test_rows_before_a_broken_end_are_kept() -> None:
    """When the source breaks off, what was read before is yielded, then the error comes."""

    def rows():
        yield json_row(b'{"prompt":"a"}', number=1)
        raise SourceError("It is cut short.")

    made = Pass(RowSource("test", rows), adapter=AUTO)
    batches = made.batches()

    assert len(next(batches).samples) == 1
    with pytest.raises(SourceError, match="cut short"):
        next(batches)
    assert made.read == 1


def test_huge_rows_make_small_batches(tmp_path: pathlib.Path) -> None:
    """A batch is closed by its weight, so that memory follows the largest row and not the batch size."""
    row = json.dumps({"prompt": "x" * (9 * MIB)}).encode()
    (tmp_path / "x.jsonl").write_bytes((row + b"\n") * 5)
    made = Pass(open_source(str(tmp_path / "x.jsonl"), max_row_bytes=32 * MIB), adapter=AUTO)

    assert [batch.read for batch in made.batches()] == [2, 2, 1]


def test_a_row_needs_a_value_or_a_problem() -> None:
    """A row with neither is refused rather than lost."""
    made = Pass(RowSource("test", lambda: iter([Row(number=1)])), adapter=AUTO)
    (batch,) = made.batches()
    assert [(row.row, row.reason) for row in batch.refused] == [(1, "not_json")]


def test_seen_tells_what_was_met() -> None:
    """Same ids and source ids with another prompt are told, within a batch and over batches."""
    with Seen() as seen:
        first = seen.meet([Meeting("a", "1", 1), Meeting("b", "1", 2), Meeting("a", "1", 3)])
        second = seen.meet([Meeting("c", "1", 4), Meeting("b", "1", 5), Meeting("1", None, 6), Meeting("d", "2", 7)])

        assert first == [Before(None, None), Before(None, 1), Before(1, None)]
        assert second == [Before(None, 1), Before(2, None), Before(None, None), Before(None, None)]
        assert seen.count_refused(["x", "y", "x"]) == [1, 1, 2]
        assert seen.count_refused(["x", "a"]) == [3, 1]


def test_a_full_temporary_disk_is_one_sentence() -> None:
    """When the temporary file cannot grow, the user learns which folder is full."""
    with Seen() as seen:
        seen._db.execute("PRAGMA max_page_count = 4")
        with pytest.raises(DiskFullError, match="SQLITE_TMPDIR"):
            seen.meet([Meeting(f"sample-{number}", None, number) for number in range(10_000)])


def test_seen_keeps_nothing_in_python() -> None:
    """What is remembered lies in the temporary file: Python's memory is the same after ten times the rows."""
    with Seen() as seen:
        tracemalloc.start()

        def meet(start: int, stop: int) -> int:
            for low in range(start, stop, 500):
                seen.meet([Meeting(f"sample-{n}", f"source-{n}", n) for n in range(low, low + 500)])
            return tracemalloc.get_traced_memory()[0]

        few = meet(0, 2_000)
        many = meet(2_000, 20_000)
        tracemalloc.stop()

        assert many - few < 100_000
        assert seen.meet([Meeting("sample-19999", None, 1)]) == [Before(19_999, None)]
