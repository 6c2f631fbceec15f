"""Exports as their users load them: compressed JSONL, Parquet, Arrow, and Hugging Face datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Record, Usage
from producer.export.base import FormatOptions, Reasoning
from producer.export.formats import ROW_FORMATS
from producer.export.run import export
from tests.support.exports import TOOL, USER, ledger_with, record, rows_of

CASES = {
    "tokens": FormatOptions(),
    "specforge": FormatOptions(),
    "specforge inline": FormatOptions(reasoning=Reasoning.INLINE, status=True),
    "speculators": FormatOptions(),
    "speculators drop": FormatOptions(reasoning=Reasoning.DROP),
    "torchspec-kimi": FormatOptions(),
    "modelopt": FormatOptions(),
    "openai": FormatOptions(),
    "openai field": FormatOptions(reasoning=Reasoning.FIELD),
    "sharegpt": FormatOptions(),
    "sharegpt inline": FormatOptions(reasoning=Reasoning.INLINE),
    "trl": FormatOptions(),
    "trl inline": FormatOptions(reasoning=Reasoning.INLINE),
}
every_case = pytest.mark.parametrize("case", CASES)
KIMI = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
SMALL_CHUNK = 256 * 1024


def _mixed(count: int, *, chars: int) -> list[Record]:
    """Return records of which the first nine tenths are plain, with nulls, and the last have every shape."""
    text, ids = "x" * chars, list(range(1, chars // 6))
    plain = [
        record(f"p{n}", content=text, prompt_token_ids=ids, usage=Usage(None, None)) for n in range(count * 9 // 10)
    ]
    asked = {"role": "assistant", "content": None, "tool_calls": [KIMI]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": "functions.f:0", "name": "f"}
    messages = [{"role": "system", "content": "Be brief."}, USER, asked, result]
    objects = {**KIMI, "function": {"name": "f", "arguments": {"city": 1, "deep": [None, {"a": 2.5}]}}}
    late = [
        record(f"l{n}", messages=messages, tools=[TOOL], reasoning="Hm.", content=None, tool_calls=[KIMI, objects])
        for n in range(count - len(plain))
    ]
    return plain + late


def _export(folder: Path, case: str, records: list[Record], name: str) -> Path:
    """Export the records and return the file."""
    output = folder / name
    with ledger_with(folder / "d", records) as ledger:
        report = export(ledger, format=case.split(maxsplit=1)[0], output=output, options=CASES[case])
    assert (report.exported, report.left_out) == (len(records), {})
    return output


def _check_huggingface(tmp_path: Path, case: str, records: list[Record], **options: Any) -> None:
    datasets = pytest.importorskip("datasets")
    output = _export(tmp_path, case, records, "out.jsonl")
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset("json", data_files=str(output), split="train", cache_dir=cache, **options)
    rows = rows_of(output)
    assert loaded.column_names == list(rows[0])
    places = [0, 1, len(rows) * 9 // 10, len(rows) - 1]
    assert [loaded[place] for place in places] == [rows[place] for place in places]
    id_ = loaded.column_names[0]
    assert loaded[id_][:] == [row[id_] for row in rows]


def test_every_format_is_loaded_here() -> None:
    """No format that makes rows is missing in these tests."""
    assert {case.split()[0] for case in CASES} == set(ROW_FORMATS)


@every_case
def test_huggingface_reads_late_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """load_dataset("json") reads rows whose first tools and thoughts come in its seventh block, unchanged."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _check_huggingface(tmp_path, case, _mixed(320, chars=6_000), chunksize=SMALL_CHUNK)


@pytest.mark.slow
@every_case
def test_huggingface_reads_a_large_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The same holds for 40 MB and the loader's own block size of 10 MB."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _check_huggingface(tmp_path, case, _mixed(3_000, chars=15_000))


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    """Compressed exports hold the very lines of the plain one, and equal rows give equal bytes."""
    plain, packed, again = tmp_path / "out.jsonl", tmp_path / f"out{suffix}", tmp_path / f"again{suffix}"
    with ledger_with(tmp_path / "d", _mixed(100, chars=600)) as ledger:
        export(ledger, format="openai", output=plain)
        report = export(ledger, format="openai", output=packed)
        export(ledger, format="openai", output=again)
    assert rows_of(packed) == rows_of(plain)
    assert packed.read_bytes() == again.read_bytes()
    assert report.bytes == packed.stat().st_size < plain.stat().st_size


def _bare(value: Any) -> Any:
    """Return a row without nulls, and without the weights that mark the first row of a trl file."""
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if item is not None}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _unmarked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for message in (*rows[0].get("prompt", ()), *rows[0].get("completion", ())):
        message.pop("weight")
    return rows


@every_case
def test_tables_hold_the_same_rows(tmp_path: Path, case: str) -> None:
    """Parquet and Arrow hold the rows of the JSONL export, but for nulls where a message lacks a key."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    records = _mixed(40, chars=600)
    rows = _unmarked(rows_of(_export(tmp_path, case, records, "out.jsonl")))
    parquet = pq.read_table(_export(tmp_path, case, records, "out.parquet"))
    with pa.ipc.open_stream(_export(tmp_path, case, records, "out.arrow")) as stream:
        arrow = stream.read_all()
    assert [_bare(row) for row in parquet.to_pylist()] == rows
    assert arrow.equals(parquet)


def test_huggingface_maps_arrow_files(tmp_path: Path) -> None:
    """An Arrow export can be mapped into memory by datasets.Dataset.from_file, and loaded by load_dataset."""
    datasets = pytest.importorskip("datasets")
    output = _export(tmp_path, "tokens", _mixed(20, chars=600), "out.arrow")
    mapped = datasets.Dataset.from_file(str(output))
    loaded = datasets.load_dataset("arrow", data_files=str(output), split="train", cache_dir=str(tmp_path / "cache"))
    assert mapped[0] == loaded[0]
    assert mapped["id"][:] == loaded["id"][:] == [one.id for one in _mixed(20, chars=600)]


@every_case
def test_table_types_do_not_depend_on_the_rows(tmp_path: Path, case: str) -> None:
    """Plain records and records with tools give Parquet files of one schema, which can be read together."""
    pq = pytest.importorskip("pyarrow.parquet")
    records = _mixed(20, chars=600)
    schemas = []
    for name, part in (("plain", records[:2]), ("late", records[-2:])):
        schemas.append(pq.read_schema(_export(tmp_path / name, case, part, "out.parquet")))
    assert schemas[0] == schemas[1]


def test_token_types(tmp_path: Path) -> None:
    """Token ids and masks are 64-bit lists in Parquet, as loaders infer them from JSONL."""
    pq = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "out.parquet"
    with ledger_with(tmp_path / "d", [record("a"), record("b", prompt_token_ids=[2**31])]) as ledger:
        export(ledger, format="tokens", output=output)
    table = pq.read_table(output)
    assert [str(field.type) for field in table.schema] == ["string", "list<element: int64>", "list<element: int64>"]
    assert table["input_ids"].to_pylist() == [[1, 2, 3, 7, 8], [2**31, 7, 8]]
    assert table["loss_mask"].to_pylist() == [[0, 0, 0, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Without pyarrow, tables are refused with the command that installs it, and JSONL still works."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        with pytest.raises(UsageError, match=r"run `pip install 'promptmill\[data\]'`"):
            export(ledger, format="tokens", output=tmp_path / f"out{suffix}")
        assert not list(tmp_path.glob("*out*"))
        export(ledger, format="tokens", output=tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "a"
