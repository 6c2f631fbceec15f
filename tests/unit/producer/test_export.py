"""Which records an export holds, and what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import IncompleteError, UsageError
from app.ledger import Ledger, Pen
from app.records import Kind, encode_line
from producer.export.base import FormatOptions, LeftOut, Reasoning
from producer.export.run import export
from tests.support.exports import USER, ids_of, ledger_with, many, record, rows_of

SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\rg\nh\0i\ufeff"


def _append(ledger: Ledger, *lines: bytes) -> None:
    """Append lines past the ledger, as another program would."""
    with ledger.folder.lines(Kind.ACCEPTED).open("ab") as file:
        file.write(b"".join(lines))


def test_file_order_and_whole_counts(tmp_path: Path) -> None:
    """Every accepted record is exported once, in the order of the file, and the report says so."""
    output = tmp_path / "new" / "folders" / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("b"), record("c"), record("a")]) as ledger:
        report = export(ledger, format="tokens", output=output)
    assert ids_of(output) == ["b", "c", "a"]
    assert (report.exported, report.left_out, report.supervised_tokens) == (3, {}, 6)
    assert (report.path, report.bytes) == (output, output.stat().st_size)
    assert report.sentences() == [
        f"3 records exported as tokens to {output} (0.2 kB).",
        "6 tokens are supervised.",
    ]


def test_a_repeated_id_is_exported_once(tmp_path: Path) -> None:
    """Of lines with one id, the one that the index calls its record is exported, the others are counted."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a", content="First."), record("b")]) as ledger:
        _append(ledger, encode_line(record("a", content="Second.")))
        report = export(ledger, format="sharegpt", output=output)
    assert ids_of(output) == ["a", "b"]
    assert rows_of(output)[0]["conversations"][-1]["value"] == "First."
    assert report.left_out == {LeftOut.REPEATED: 1}


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    """Lines that are no records, or none that the format can read, are skipped, counted and said."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        _append(ledger, b"\n", b"{broken\n", b"[1]\n", b'{"id": "\xff"}\n', b'{"id": "n", "round": "x"}\n', b"\0\0\0\n")
        _append(ledger, b'{"id": "m", "messages": 5}\n', b'{"id": "s", "content": "\\ud800"}\n')
        _append(ledger, encode_line(record("i")).replace(b'"round":0', b'"round":"x"'), encode_line(record("z")))
        report = export(ledger, format="openai", output=output)
    assert ids_of(output) == ["a", "z"]
    assert report.left_out == {LeftOut.UNREADABLE: 9}
    assert report.sentences()[-1] == "9 left out: the line is not a record (unreadable)."


def test_a_torn_tail_is_no_record(tmp_path: Path) -> None:
    """A line that was cut is mended away before the export, which holds whole records alone."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        _append(ledger, encode_line(record("b"))[:50])
        report = export(ledger, format="tokens", output=output)
        assert ledger.folder.torn.exists()
    assert (ids_of(output), report.left_out) == (["a"], {})


def test_an_index_is_not_needed(tmp_path: Path) -> None:
    """A deleted index is rebuilt and the export is the same."""
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with ledger_with(tmp_path / "d", many(20)) as ledger:
        export(ledger, format="openai", output=first)
        ledger.folder.index.unlink()
        export(ledger, format="openai", output=second)
    assert first.read_bytes() == second.read_bytes()


def test_an_index_lost_in_the_middle(tmp_path: Path) -> None:
    """An index that vanishes while an export runs is rebuilt, and no record is missed."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", many(30, chars=300_000)) as ledger:

        def forget(_done: int, _total: int) -> None:
            ledger.folder.index.unlink()

        report = export(ledger, format="sharegpt", output=output, on_progress=forget)
    assert (report.exported, report.left_out) == (30, {})


def test_records_that_arrive_meanwhile_wait(tmp_path: Path) -> None:
    """An export that runs beside workers holds what was on disk at its start, whole."""
    output = tmp_path / "out.jsonl"
    records = many(6000)
    with ledger_with(tmp_path / "d", records) as ledger:
        new = record("new")

        def record_more(done: int, total: int) -> None:
            assert 0 < done <= total
            ledger.commit([Pen(Kind.ACCEPTED, new.id, encode_line(new))])

        report = export(ledger, format="tokens", output=output, on_progress=record_more)
        assert (report.exported, report.left_out) == (6000, {})
        assert export(ledger, format="tokens", output=output, overwrite=True).exported == 6001


def test_line_separators_stay_inside_texts(tmp_path: Path) -> None:
    """Characters that some readers take for line ends neither split a row nor change."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a", content=SEPARATORS), record("b")]) as ledger:
        export(ledger, format="sharegpt", output=output)
    assert rows_of(output)[0]["conversations"][-1]["value"] == SEPARATORS
    assert ids_of(output) == ["a", "b"]


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    """Progress is told for every batch in bytes and ends at the file's length."""
    seen = list[tuple[int, int]]()
    with ledger_with(tmp_path / "d", many(30, chars=300_000)) as ledger:
        size = ledger.folder.lines(Kind.ACCEPTED).stat().st_size
        output = tmp_path / "out.jsonl"
        report = export(ledger, format="sharegpt", output=output, on_progress=lambda *now: seen.append(now))
    assert report.sentences() == [f"30 records exported as sharegpt to {output} (9.0 MB)."]
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_limit(tmp_path: Path) -> None:
    """The limit bounds the rows, not the lines read, and the report says when it ended the export."""
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", [record("a", output_ids=None), record("b"), record("c"), record("d")]) as ledger:
        report = export(ledger, format="tokens", output=output, limit=2)
        assert (ids_of(output), report.limited) == (["b", "c"], True)
        assert "The limit ended the export; the records after it were not read." in report.sentences()
        whole = export(ledger, format="tokens", output=output, limit=3, overwrite=True)
        assert (whole.exported, whole.limited) == (3, False)
        with pytest.raises(UsageError, match="--limit 0 would export nothing"):
            export(ledger, format="tokens", output=output, limit=0, overwrite=True)


def test_lost_reasoning_is_said(tmp_path: Path) -> None:
    """Answers whose reasoning is left behind are counted, with the choice that keeps it in this very format."""
    output = tmp_path / "out.jsonl"
    lost = "1 of the answers had reasoning that this file does not hold; --reasoning "
    with ledger_with(tmp_path / "d", [record("a", reasoning="Hm."), record("b")]) as ledger:
        for name, reasoning, said in [
            ("openai", None, [f"{lost}field or --format tokens keeps it."]),
            ("sharegpt", None, [f"{lost}inline or --format tokens keeps it."]),
            ("trl", Reasoning.DROP, [f"{lost}field or --format tokens keeps it."]),
            ("openai", Reasoning.FIELD, []),
            ("sharegpt", Reasoning.INLINE, []),
        ]:
            options = FormatOptions(reasoning=reasoning)
            report = export(ledger, format=name, output=output, overwrite=True, options=options)
            assert (report.lost_reasoning, report.lost_earlier_reasoning) == (len(said), 0)
            assert report.supervised_tokens is None
            assert report.sentences()[1:] == said


_EARLIER = "1 of the conversations had reasoning in earlier turns that this file does not hold"


@pytest.mark.parametrize(
    ("name", "reasoning", "said"),
    [
        ("openai", None, [f"{_EARLIER}; --reasoning field keeps it."]),
        ("sharegpt", None, [f"{_EARLIER}; --reasoning inline keeps it."]),
        ("torchspec-kimi", None, [f"{_EARLIER}: torchspec-kimi holds the answer's alone."]),
        ("speculators", Reasoning.DROP, [f"{_EARLIER}; --reasoning field keeps it."]),
        ("openai", Reasoning.INLINE, []),
        ("sharegpt", Reasoning.INLINE, []),
        ("trl", None, []),
    ],
)
def test_lost_reasoning_of_earlier_turns_is_said(
    tmp_path: Path, name: str, reasoning: Reasoning | None, said: list[str]
) -> None:
    """A conversation whose answer has no reasoning but an earlier turn has is counted by itself where that is lost."""
    thoughtful = {"role": "assistant", "content": "Yes?", "reasoning_content": "Hm."}
    records = [record("a", messages=[USER, thoughtful, USER]), record("b", messages=[USER])]
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", records) as ledger:
        report = export(ledger, format=name, output=output, options=FormatOptions(reasoning=reasoning))
    assert (report.lost_reasoning, report.lost_earlier_reasoning) == (0, len(said))
    assert report.sentences()[1:] == said
    assert ("Hm." in output.read_text()) is not bool(said)


def test_nothing_to_export(tmp_path: Path) -> None:
    """Without a row the command is incomplete, and an older output stays as it was."""
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")
    words = r"was not written: it has no accepted records yet\."
    with ledger_with(tmp_path / "d", []) as ledger, pytest.raises(IncompleteError, match=words):
        export(ledger, format="tokens", output=output, overwrite=True)
    assert output.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "out.jsonl"]


@pytest.mark.parametrize("name", ["out.txt", "out", "out.json", "out.csv.gz", "out.parquet.gz", "out.arrow.zst"])
def test_suffixes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """A path that does not say JSONL, Parquet or Arrow is refused, and what is possible is listed."""
    with ledger_with(tmp_path / "d", [record("a")]) as ledger, pytest.raises(UsageError, match=r"\.jsonl\.zst, \.par"):
        export(ledger, format="tokens", output=tmp_path / name)


@pytest.mark.parametrize("name", ["raw_responses.jsonl", "samples.jsonl", "torn.jsonl", "RAW_responses.jsonl"])
def test_a_datasets_own_files_are_never_replaced(tmp_path: Path, name: str) -> None:
    """No export replaces a file that holds records, in whatever folder and under whatever link."""
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "d" / name)
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        before = ledger.folder.lines(Kind.ACCEPTED).read_bytes()
        for output in (tmp_path / "d" / name, link):
            with pytest.raises(UsageError, match="a dataset's own file"):
                export(ledger, format="tokens", output=output, overwrite=True)
        assert ledger.folder.lines(Kind.ACCEPTED).read_bytes() == before
