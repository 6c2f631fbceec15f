"""Rows are counted where that is cheap, as their readers count them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from producer import row_count

ROW_BYTES = 2**20


def test_rows_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    """Files and folders are counted as their readers count; what would have to be downloaded is not."""
    lines = b'{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "c"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.csv").write_text("prompt\none\ntwo\n", encoding="utf-8")
    assert row_count.count(str(tmp_path / "a.jsonl"), max_row_bytes=ROW_BYTES) == 3
    assert row_count.count(str(tmp_path / "c.csv"), max_row_bytes=ROW_BYTES) == 2
    assert row_count.count(str(tmp_path), max_row_bytes=ROW_BYTES) == 8
    assert row_count.count("gsm8k", max_row_bytes=ROW_BYTES) is None
    assert row_count.count("hf:openai/gsm8k", max_row_bytes=ROW_BYTES) is None


def test_rows_of_parquet_are_in_its_footer(tmp_path: Path) -> None:
    """A Parquet file says itself how many rows it has."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": [str(number) for number in range(7)]}), tmp_path / "d.parquet")
    assert row_count.count(str(tmp_path / "d.parquet"), max_row_bytes=ROW_BYTES) == 7


def test_lines_are_counted_with_or_without_a_last_line_break(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file too large to be read through has as many rows as lines; what is not made of lines is not counted."""
    monkeypatch.setattr(row_count, "_CHEAP_BYTES", 0)
    for name, text, rows in (("a.jsonl", b"1\n2\n3", 3), ("b.jsonl", b"1\n2\n", 2), ("c.csv", b"a\nb\n", None)):
        (tmp_path / name).write_bytes(text)
        assert row_count.count(str(tmp_path / name), max_row_bytes=ROW_BYTES) == rows
