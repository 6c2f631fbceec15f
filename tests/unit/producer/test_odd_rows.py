"""Odd rows: each has the one rule that docs/inputs.md gives, from the file to the sample."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from producer.reading import Reading, open_reading

MIB = 1024 * 1024
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "inputs.md"
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}
OPENAI = [{"type": "function", "function": TOOL}]


def outcome(path: pathlib.Path, max_row_bytes: int = MIB) -> list[Any]:
    """Return for each row its prompt's last text, or the reason why it is refused."""
    found: dict[int, Any] = {}
    for batch in open_reading(Reading(source=str(path)), max_row_bytes=max_row_bytes).batches:
        found |= {sample.source.row: sample.messages[-1]["content"] for sample in batch.samples}
        found |= {row.row: f"! {row.reason}" for row in batch.refused}
    return [found[row] for row in sorted(found)]


def lines(path: pathlib.Path, *rows: bytes | dict[str, Any]) -> pathlib.Path:
    """Write lines, objects as JSON."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def _schema_drift(folder: pathlib.Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "x": 1}, {"prompt": 3}, {"x": "one", "question": "c"}, {"messages": "no"}]
    assert outcome(lines(folder / "x.jsonl", *rows)) == ["a", "b", "! not_a_string", "c", "! bad_messages"]


def _null_filled_columns(folder: pathlib.Path) -> None:
    rows = [
        {"messages": None, "prompt": "a", "system": None, "id": None, "uuid": "u"},
        {"messages": None, "prompt": None},
    ]
    assert outcome(lines(folder / "x.jsonl", *rows)) == ["a", "! bad_messages"]


def _nan_in_json(folder: pathlib.Path) -> None:
    rows = (b'{"prompt": "a", "s": NaN}', b'{"prompt": "b", "s": -Infinity}', b'{"prompt": "c", "s": 1e999}')
    assert outcome(lines(folder / "x.jsonl", {"prompt": "ok"}, *rows)) == ["ok", *["! non_finite"] * 3]


def _nan_in_a_table(folder: pathlib.Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    nan = float("nan")
    pq.write_table(pa.table({"prompt": ["a", "b"], "s": [nan, 1.0], "l": [[1.0], [nan]]}), folder / "x.parquet")
    assert outcome(folder / "x.parquet") == ["a", "! non_finite"]


def _lone_surrogate(folder: pathlib.Path) -> None:
    rows = (b'{"prompt": "a\\ud83d"}', b'{"prompt": "b\\ud83d\\ude00"}', b'{"prompt": "c", "\\udc00": 1}')
    assert outcome(lines(folder / "x.jsonl", *rows)) == ["! lone_surrogate", "b\U0001f600", "! lone_surrogate"]


def _byte_order_mark(folder: pathlib.Path) -> None:
    path = lines(
        folder / "x.jsonl", b'\xef\xbb\xbf{"prompt": "a"}', {"prompt": "\ufeffb"}, b'\xef\xbb\xbf{"prompt": "c"}'
    )
    assert outcome(path) == ["a", "\ufeffb", "! not_json"]
    (folder / "x.csv").write_bytes(b"\xef\xbb\xbfprompt\na\n")
    assert outcome(folder / "x.csv") == ["a"]


def _crlf(folder: pathlib.Path) -> None:
    path = folder / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b\\r\\n"}\r\n{"prompt": "c"}\r{"prompt": "d"}\n')
    assert outcome(path) == ["a", "b\r\n", "! not_json"]


def _line_separator(folder: pathlib.Path) -> None:
    texts = [f"one{char}two" for char in "\u2028\u2029\u0085\x0c\x0b"]
    raw = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    assert outcome(lines(folder / "x.jsonl", *raw)) == texts


def _nul(folder: pathlib.Path) -> None:
    rows = (b'{"prompt": "a\\u0000b"}', b'{"prompt": "a\0b"}', b"\0\0\0\0")
    assert outcome(lines(folder / "x.jsonl", *rows)) == ["a\0b", "! not_json", "! not_json"]


def _duplicate_ids(folder: pathlib.Path) -> None:
    path = lines(folder / "x.jsonl", {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "a", "prompt": "x"})
    opened = open_reading(Reading(source=str(path)), max_row_bytes=MIB)
    (batch,) = opened.batches
    assert len({sample.id for sample in batch.samples}) == 2
    assert [row.reason for row in batch.refused] == ["duplicate"]
    assert [(one.first_row, one.row) for one in opened.rows.conflicts] == [("row 1", "row 2")]


def _trap_ids(folder: pathlib.Path) -> None:
    ids = ["../../etc/passwd", "a/b", "a b", "\U0001f600", "x" * 10_000, "..", ".", "-rf", "nul\0", "a\nb", "CON"]
    path = lines(folder / "x.jsonl", *({"id": one, "prompt": "p"} for one in ids))
    (batch,) = open_reading(Reading(source=str(path)), max_row_bytes=MIB).batches
    assert [sample.source.id for sample in batch.samples] == ids
    assert len({sample.id for sample in batch.samples}) == len(ids)
    for sample in batch.samples:
        assert re.fullmatch(r"[\w.-]{1,64}-[0-9a-f]{12}", sample.id, re.ASCII)


def _number_ids(folder: pathlib.Path) -> None:
    rows = [
        {"id": 7, "prompt": "p"},
        {"id": "7", "prompt": "p"},
        {"id": True, "prompt": "p"},
        {"id": [1], "prompt": "p"},
    ]
    path = lines(folder / "x.jsonl", *rows)
    (batch,) = open_reading(Reading(source=str(path)), max_row_bytes=MIB).batches
    assert [(sample.source.row, sample.source.id) for sample in batch.samples] == [(1, "7"), (3, None)]
    assert [row.row for row in batch.refused] == [2, 4]


def tools_of(folder: pathlib.Path, tools: Any) -> Any:
    """Return the tools that a sample gets of a row's, or the reason why it is refused."""
    path = lines(folder / "x.jsonl", {"prompt": "p", "tools": tools})
    (batch,) = open_reading(Reading(source=str(path)), max_row_bytes=MIB).batches
    return batch.samples[0].tools if batch.samples else batch.refused[0].reason


def _tools_as_a_list(folder: pathlib.Path) -> None:
    assert tools_of(folder, OPENAI) == tools_of(folder, [TOOL]) == OPENAI


def _tools_as_json_text(folder: pathlib.Path) -> None:
    assert tools_of(folder, json.dumps([TOOL])) == tools_of(folder, [json.dumps(TOOL)]) == OPENAI
    assert tools_of(folder, "f(x)") == "bad_tools"


def _tools_as_one_object(folder: pathlib.Path) -> None:
    assert tools_of(folder, TOOL) == tools_of(folder, OPENAI[0]) == OPENAI


def _tools_with_nulls(folder: pathlib.Path) -> None:
    filled = {"type": "function", "function": {**TOOL, "strict": None, "parameters": {"type": "object", "x": None}}}
    assert tools_of(folder, [filled]) == OPENAI


def _no_tools(folder: pathlib.Path) -> None:
    assert [tools_of(folder, tools) for tools in (None, [], "", "  ", "[]", "null")] == [None] * 6


def _huge_row(folder: pathlib.Path) -> None:
    path = lines(folder / "x.jsonl", {"prompt": "a" * 2000}, {"prompt": "b"})
    assert outcome(path, max_row_bytes=1000) == ["! too_large", "b"]


def _deep_nesting(folder: pathlib.Path) -> None:
    deep = b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert outcome(lines(folder / "x.jsonl", deep, {"prompt": "b"})) == ["! not_json", "b"]


RULES: dict[str, Callable[[pathlib.Path], None]] = {
    "schema drift": _schema_drift,
    "null-filled columns": _null_filled_columns,
    "NaN in JSON": _nan_in_json,
    "NaN in a table": _nan_in_a_table,
    "lone surrogate": _lone_surrogate,
    "byte order mark": _byte_order_mark,
    "CRLF": _crlf,
    "U+2028": _line_separator,
    "NUL": _nul,
    "duplicate ids": _duplicate_ids,
    "trap ids": _trap_ids,
    "number ids": _number_ids,
    "tools as a list": _tools_as_a_list,
    "tools as JSON text": _tools_as_json_text,
    "tools as one object": _tools_as_one_object,
    "tools with nulls": _tools_with_nulls,
    "no tools": _no_tools,
    "huge row": _huge_row,
    "deep nesting": _deep_nesting,
}


@pytest.mark.parametrize("what", RULES)
def test_the_rule(what: str, tmp_path: pathlib.Path) -> None:
    """An odd row becomes what the page says."""
    RULES[what](tmp_path)


def test_every_rule_of_the_page_is_tested() -> None:
    """The page's table of odd rows and the rules tested here are the same."""
    table = PAGE.read_text(encoding="utf-8").partition("## Odd rows")[2].partition("\n## ")[0]

    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(RULES)
