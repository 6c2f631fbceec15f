"""What `producer validate` finds in files that are sound, and in files with each kind of damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.errors import SourceError
from app.ledger import Ledger, Pen
from app.records import Kind, Turn, Usage, encode_line
from producer.export.base import FormatOptions, Reasoning
from producer.export.formats import ROW_FORMATS
from producer.export.run import export
from producer.validate.problems import Problem
from producer.validate.report import Report
from producer.validate.run import Rules, validate
from producer.validate.tokens import TokenRules
from tests.support.exports import TOOL, USER, ledger_with, many, record

RULES = Rules(tokens=TokenRules(vocab_size=10, max_length=8, min_supervised=2, end_ids=frozenset({8})))
ANSWER = {"role": "assistant", "content": "Hello."}


def _tokens(id_: str = "a", /, **fields: Any) -> dict[str, Any]:
    return {"id": id_, "input_ids": [1, 2, 7, 8], "loss_mask": [0, 0, 1, 1], **fields}


def _chat(id_: str = "a", /, **fields: Any) -> dict[str, Any]:
    return {"id": id_, "messages": [USER, ANSWER], "tools": "null", **fields}


def _check(folder: Path, rows: Sequence[Any], rules: Rules = RULES, **options: Any) -> Report:
    """Write rows (objects, or lines as they are) and validate the file."""
    path = folder / "x.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows]
    path.write_bytes(b"".join(lines))
    return validate([path], rules, **options)


def _found(report: Report) -> dict[Problem, int]:
    return dict(report.findings.counts)


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow"])
def test_every_export_is_sound(tmp_path: Path, name: str, suffix: str) -> None:
    """What an export writes passes, in every format and file, also compared with its dataset."""
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    records = [*many(3), record("t", tools=[TOOL], content=None, tool_calls=[call]), record("n", output_ids=None)]
    output = tmp_path / f"out{suffix}"
    with ledger_with(tmp_path / "d", records) as ledger:
        rows = export(ledger, format=name, output=output).exported
        report = validate([output], RULES, ledgers=[ledger])
    assert (report.is_sound, _found(report), report.rows) == (True, {}, rows)
    assert report.sentences()[-1] == "Sound."


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b'{"id": "b", "input_ids": [1], "loss_mask": [1]', Problem.NOT_JSON),
        (b'{"id": "b", "input_ids": [NaN], "loss_mask": [1]}', Problem.NOT_JSON),
        (b'{"id": "\\ud800", "input_ids": [1], "loss_mask": [1]}', Problem.NOT_JSON),
        (b'{"id": "\xff", "input_ids": [1], "loss_mask": [1]}', Problem.NOT_JSON),
        (b"\0\0\0", Problem.NOT_JSON),
        (b"", Problem.NOT_A_ROW),
        (b"[1]", Problem.NOT_A_ROW),
        (_tokens("b", more=1), Problem.COLUMNS),
        ({"id": "b", "input_ids": [1]}, Problem.COLUMNS),
        (_tokens(None), Problem.NO_ID),
        (_tokens(""), Problem.NO_ID),
        (_tokens(7), Problem.NO_ID),
        (_tokens("a"), Problem.REPEATED_ID),
        (_tokens("b", loss_mask=[0, 1, 1]), Problem.LENGTHS),
        (_tokens("b", input_ids=[], loss_mask=[]), Problem.LENGTHS),
        (_tokens("b", input_ids=[1, 2, -7, 8]), Problem.BAD_TOKEN),
        (_tokens("b", input_ids=[1, 2, 10, 8]), Problem.BAD_TOKEN),
        (_tokens("b", input_ids=[1, 2, 7.0, 8]), Problem.BAD_TOKEN),
        (_tokens("b", input_ids=[1, 2, None, 8]), Problem.BAD_TOKEN),
        (_tokens("b", loss_mask=[0, 2, 1, 1]), Problem.BAD_MASK),
        (_tokens("b", loss_mask=[0, 0, 0, 1]), Problem.UNSUPERVISED),
        (_tokens("b", loss_mask=[0, 0, 0, 0]), Problem.UNSUPERVISED),
        (_tokens("b", input_ids=[1] * 7 + [7, 8], loss_mask=[0] * 7 + [1, 1]), Problem.TOO_LONG),
    ],
)
def test_each_damage_of_token_rows(tmp_path: Path, bad: Any, problem: Problem) -> None:
    """One damaged row among many makes the file unfit, by name and row number."""
    line = bad + b"\n" if isinstance(bad, bytes) else bad
    rows = [_tokens("a"), line, *(_tokens(f"s{number}") for number in range(300))]
    report = _check(tmp_path, rows)
    assert problem in _found(report)
    assert report.findings.examples[problem][0].number == 2
    assert not report.is_sound
    assert problem in report.failures
    assert any(f"{problem}: {problem.words}" in sentence for sentence in report.sentences())
    assert report.sentences()[-1].startswith("Unfit: ")


def test_a_torn_end(tmp_path: Path) -> None:
    """A last line without its newline is no whole file, even if it happens to be JSON."""
    report = _check(tmp_path, [_tokens("a"), json.dumps(_tokens("b")).encode()])
    assert _found(report) == {Problem.TORN_END: 1}
    assert not report.is_sound


def test_a_cut_archive(tmp_path: Path) -> None:
    """A compressed file that was cut is refused in one sentence."""
    packed = gzip.compress(b"".join(json.dumps(_tokens(str(number))).encode() + b"\n" for number in range(5000)))
    (tmp_path / "x.jsonl.gz").write_bytes(packed[:-500])
    with pytest.raises(SourceError, match=r"x\.jsonl\.gz is damaged"):
        validate([tmp_path / "x.jsonl.gz"], RULES)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_cut_table(tmp_path: Path, suffix: str) -> None:
    """A table that was cut is refused in one sentence."""
    pytest.importorskip("pyarrow")
    output = tmp_path / f"out{suffix}"
    with ledger_with(tmp_path / "d", many(200)) as ledger:
        export(ledger, format="tokens", output=output)
    output.write_bytes(output.read_bytes()[: -output.stat().st_size // 3])
    with pytest.raises(SourceError, match=f"out{suffix} is damaged"):
        validate([output], RULES)


def test_answers_without_an_end(tmp_path: Path) -> None:
    """Rows whose last supervised token ends nothing are tolerated up to the threshold, not beyond."""
    rows = [_tokens(str(number)) for number in range(99)] + [_tokens("open", input_ids=[1, 2, 8, 7])]
    report = _check(tmp_path, rows)
    assert (_found(report), report.is_sound) == ({Problem.NO_END_TOKEN: 1}, True)
    assert any(sentence.startswith("ok           1    1.00 %  no_end_token") for sentence in report.sentences())
    assert not _check(tmp_path, rows[50:]).is_sound


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (_chat("b", messages=[]), Problem.MESSAGES),
        (_chat("b", messages=[USER, "Hello."]), Problem.MESSAGES),
        (_chat("b", messages=[USER, {"content": "Hello."}]), Problem.MESSAGES),
        (_chat("b", messages=[USER, {"role": "assistant", "content": None}]), Problem.MESSAGES),
        (_chat("b", messages=[USER]), Problem.NO_ANSWER),
        (_chat("b", messages=[USER, {"role": "assistant", "content": ""}]), Problem.NO_ANSWER),
        (_chat("b", tools="[{]"), Problem.TOOLS),
        (_chat("b", tools='{"a": 1}'), Problem.TOOLS),
        (_chat("b", tools=None), Problem.TYPES),
        (_chat("b", messages=[USER, {**ANSWER, "weight": 0.5}]), Problem.TYPES),
        (_chat("b", extra=1), Problem.COLUMNS),
    ],
)
def test_each_damage_of_conversations(tmp_path: Path, bad: dict[str, Any], problem: Problem) -> None:
    """A damaged conversation makes the file unfit, by name and row number."""
    first = _chat("a", messages=[USER, {**ANSWER, "weight": 1}])
    report = _check(tmp_path, [first, bad, *(_chat(f"s{number}") for number in range(300))])
    assert problem in _found(report)
    assert report.findings.examples[problem][0].number == 2
    assert not report.is_sound


def test_early_nulls_and_mixed_numbers(tmp_path: Path) -> None:
    """A column that is null first and text later, or an integer and then a number, is a change of types."""
    late = _chat("b", note="late", score=0.5)
    report = _check(tmp_path, [_chat("a", note=None, score=1), late])
    assert _found(report) == {Problem.TYPES: 1}
    assert report.findings.examples[Problem.TYPES][0].detail == "note is text, and was null"


def test_files_without_a_shape(tmp_path: Path) -> None:
    """Columns that no trainer reads, other files, and no file at all are refused in one sentence."""
    with pytest.raises(SourceError, match="are those of no training file"):
        _check(tmp_path, [{"id": "a", "text": "x"}])
    (tmp_path / "x.csv").write_text("a\n")
    for name, words in (("x.csv", "is no training file"), ("none.jsonl", "is not there")):
        with pytest.raises(SourceError, match=words):
            validate([tmp_path / name], RULES)


def test_an_empty_file_is_not_sound(tmp_path: Path) -> None:
    """A file without rows proves nothing."""
    report = _check(tmp_path, [])
    assert (report.is_sound, report.sentences()[-1]) == (False, "Unfit: there is no row.")


def test_ids_across_files(tmp_path: Path) -> None:
    """An id in two files of one export is repeated, with the second file's name and row."""
    for name, id_ in (("1.jsonl", "a"), ("2.jsonl", "b"), ("3.jsonl", "a")):
        (tmp_path / name).write_text(json.dumps(_tokens(id_)) + "\n")
    report = validate([tmp_path / name for name in ("1.jsonl", "2.jsonl", "3.jsonl")], RULES)
    assert _found(report) == {Problem.REPEATED_ID: 1}
    assert f"{'':<16}3.jsonl row 1 (a)" in report.sentences()


def test_a_file_against_its_dataset(tmp_path: Path) -> None:
    """Unknown, missing and changed rows are found; what the format rightly leaves out is explained."""
    output = tmp_path / "x.jsonl"
    records = [*many(5), record("n", output_ids=None), record("long", output_ids=[7] * 9, usage=Usage(3, 9))]
    with ledger_with(tmp_path / "d", records) as ledger:
        export(ledger, format="tokens", output=output, options=FormatOptions(max_length=8))
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        rows[1]["input_ids"][0] = 9
        rows[2]["id"] = "stranger"
        report = _check(tmp_path, rows, ledgers=[ledger])
    assert _found(report) == {Problem.DIFFERS: 1, Problem.UNKNOWN_ID: 1, Problem.MISSING_ID: 1}
    (missing,) = report.findings.examples[Problem.MISSING_ID]
    assert (missing.id, missing.number) == ("s00002", 0)
    assert report.left_out == [
        "1 left out: the server gave no exact token ids of the answer (no_exact_ids).",
        "1 left out: prompt and answer have more tokens than --max-length (too_long).",
    ]


def test_rejected_rows_are_known_too(tmp_path: Path) -> None:
    """A row of a rejected record, taken on request, has an answer behind it."""
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        cut = record("cut", verdict=Kind.REJECTED, reason="truncated")
        ledger.commit([Pen(Kind.REJECTED, "cut", encode_line(cut), reason="truncated")])
        row = {"input_ids": [1, 2, 3, 7, 8], "loss_mask": [0, 0, 0, 1, 1]}
        report = _check(tmp_path, [{"id": "a", **row}, {"id": "cut", **row}], ledgers=[ledger])
    assert (report.is_sound, _found(report)) == (True, {})


def test_reasoning_that_the_file_does_not_hold(tmp_path: Path) -> None:
    """Compared with the dataset, rows that were exported without their reasoning are counted as lost thoughts."""
    output = tmp_path / "x.jsonl"
    with ledger_with(tmp_path / "d", [record("a", reasoning="Hm."), record("b")]) as ledger:
        for options, lost in [(None, 1), (FormatOptions(reasoning=Reasoning.FIELD), 0)]:
            export(ledger, format="openai", output=output, overwrite=True, options=options)
            report = validate([output], Rules(), ledgers=[ledger])
            assert report.findings.counts[Problem.LOST_REASONING] == lost
            assert report.is_sound is not bool(lost)


@pytest.mark.parametrize(
    ("name", "reasoning", "lost"),
    [
        ("sharegpt", None, 1),
        ("sharegpt", Reasoning.INLINE, 0),
        ("openai", None, 1),
        ("openai", Reasoning.FIELD, 0),
        ("torchspec-kimi", None, 0),
        ("trl", Reasoning.DROP, 1),
    ],
)
def test_reasoning_of_earlier_turns_that_the_file_does_not_hold(
    tmp_path: Path, name: str, reasoning: Reasoning | None, lost: int
) -> None:
    """So are rows without that of an earlier turn that the model wrote; of a turn of the prompt it may be missing."""
    thoughtful = {**ANSWER, "reasoning_content": "Hm."}
    turns = [Turn(id="a#turn1", messages=1), Turn(id="a#turn2", messages=3)]
    records = [
        record("a", messages=[USER, thoughtful, USER], turns=turns),
        record("b", messages=[USER, thoughtful, USER]),
        record("c", messages=[USER, ANSWER, USER], turns=turns),
    ]
    output = tmp_path / "x.jsonl"
    with ledger_with(tmp_path / "d", records) as ledger:
        export(ledger, format=name, output=output, options=FormatOptions(reasoning=reasoning))
        report = validate([output], Rules(), ledgers=[ledger])
    assert _found(report) == ({Problem.LOST_REASONING: lost} if lost else {})


def test_what_was_not_checked_is_said(tmp_path: Path) -> None:
    """Without a vocabulary, an end token, a template or a dataset the report says what it could not prove."""
    said = "\n".join(_check(tmp_path, [_tokens()], Rules()).sentences())
    for words in ["inside the vocabulary (give --tokenizer or --vocab-size)", "answers end", "missing ids"]:
        assert words in said
    assert "lost thoughts (give --tokenizer or --chat-template)" in "\n".join(_check(tmp_path, [_chat()]).sentences())


def test_progress_grows(tmp_path: Path) -> None:
    """Progress tells rows and bytes, which never fall within a file."""
    seen = list[tuple[int, int]]()
    _check(tmp_path, [_tokens(str(number)) for number in range(50)], on_progress=lambda *now: seen.append(now))
    assert [rows for rows, _ in seen] == list(range(1, 51))
    assert seen[-1][1] == (tmp_path / "x.jsonl").stat().st_size


def test_the_ledger_is_left_as_it_was(tmp_path: Path) -> None:
    """Validating reads the dataset and changes none of its files."""
    with ledger_with(tmp_path / "d", many(3)) as ledger:
        export(ledger, format="tokens", output=tmp_path / "x.jsonl")
        before = _lines_of(ledger)
        assert validate([tmp_path / "x.jsonl"], RULES, ledgers=[ledger]).is_sound
        assert _lines_of(ledger) == before


def _lines_of(ledger: Ledger) -> bytes:
    return ledger.folder.lines(Kind.ACCEPTED).read_bytes()
