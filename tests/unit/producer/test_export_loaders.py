"""Exports as their users load them: compressed JSONL, Parquet through pyarrow, and Hugging Face datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from app.errors import UsageError
from app.records import Record, Usage
from producer.export.run import export
from tests.support.exports import LOOK_UP, TOOL, USER, ledger_with, record, rows_of

COUNT = 1_000
PLAIN_COUNT = 900
"""So many records come before the first with tools, reasoning, a system prompt and several turns."""
CHARS = 13_000
"""So long that the loader's first block of 10 MB holds plain records alone."""
FORMATS = [("openai", "drop"), ("openai", "field"), ("sharegpt", "drop"), ("tokens", "drop")]


def _mixed() -> list[Record]:
    """Return records that begin plain, with nulls, and grow every shape late."""
    text = "x" * CHARS
    ids = list(range(1, 2501))
    plain = [record(f"p{n}", content=text, prompt_token_ids=ids, usage=Usage(None, None)) for n in range(PLAIN_COUNT)]
    asked = {"role": "assistant", "content": None, "tool_calls": [LOOK_UP]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "look_up"}
    messages = [{"role": "system", "content": "Be brief."}, USER, asked, result]
    late = [
        record(
            f"l{n}", messages=messages, tools=[TOOL], reasoning="Hm.", content=None, tool_calls=[LOOK_UP] * (n % 3 + 1)
        )
        for n in range(COUNT - PLAIN_COUNT)
    ]
    return plain + late


@pytest.mark.parametrize(("name", "reasoning"), FORMATS)
def test_huggingface_reads_late_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reasoning: str
) -> None:
    """load_dataset("json") reads 1,000 rows whose first tools and thoughts come after its first block, unchanged."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    output = tmp_path / "out.jsonl"
    with ledger_with(tmp_path / "d", _mixed()) as ledger:
        assert export(ledger, format=name, output=output, reasoning=reasoning).exported == COUNT
    loaded = datasets.load_dataset("json", data_files=str(output), split="train", cache_dir=str(tmp_path / "cache"))
    rows = rows_of(output)
    assert loaded.column_names == list(rows[0])
    assert [loaded[0], loaded[PLAIN_COUNT], loaded[-1]] == [rows[0], rows[PLAIN_COUNT], rows[-1]]
    assert loaded["id"][:] == [row["id"] for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    """Compressed exports hold the very lines of the plain one, and equal rows give equal bytes."""
    plain, packed, again = tmp_path / "out.jsonl", tmp_path / f"out{suffix}", tmp_path / f"again{suffix}"
    with ledger_with(tmp_path / "d", _mixed()[PLAIN_COUNT:]) as ledger:
        export(ledger, format="openai", output=plain)
        report = export(ledger, format="openai", output=packed)
        export(ledger, format="openai", output=again)
    assert rows_of(packed) == rows_of(plain)
    assert packed.read_bytes() == again.read_bytes()
    assert report.bytes == packed.stat().st_size < plain.stat().st_size


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("name", "reasoning"), FORMATS)
def test_parquet_holds_the_same_rows(tmp_path: Path, name: str, reasoning: str) -> None:
    """A Parquet export read through pyarrow is the JSONL export, but for nulls where a message lacks a key."""
    parquet = pytest.importorskip("pyarrow.parquet")
    plain, packed = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    with ledger_with(tmp_path / "d", _mixed()[PLAIN_COUNT - 20 :]) as ledger:
        export(ledger, format=name, output=plain, reasoning=reasoning)
        report = export(ledger, format=name, output=packed, reasoning=reasoning)
    table = parquet.read_table(packed)
    assert [_without_nulls(row) for row in table.to_pylist()] == rows_of(plain)
    assert report.bytes == packed.stat().st_size


def test_parquet_types_do_not_depend_on_the_rows(tmp_path: Path) -> None:
    """Plain records and records with tools give Parquet files of one schema, which can be read together."""
    pq = pytest.importorskip("pyarrow.parquet")
    records = _mixed()
    schemas = []
    for number, part in enumerate([records[:2], records[-2:]]):
        output = tmp_path / f"{number}.parquet"
        with ledger_with(tmp_path / f"d{number}", part) as ledger:
            export(ledger, format="openai", output=output)
        schemas.append(pq.read_schema(output))
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


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow, Parquet is refused with the command that installs it, and JSONL still works."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with ledger_with(tmp_path / "d", [record("a")]) as ledger:
        with pytest.raises(UsageError, match=r"run `pip install 'promptmill\[data\]'`"):
            export(ledger, format="tokens", output=tmp_path / "out.parquet")
        assert not list(tmp_path.glob("*out*"))
        export(ledger, format="tokens", output=tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["id"] == "a"
