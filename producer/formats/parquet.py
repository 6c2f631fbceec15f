"""Rows of a .parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import SourceError
from producer.formats.rows import Row, problem_row, table_row
from producer.formats.text import reading
from producer.refusals import Reason, Refusal

BATCH_ROWS = 128


def check(path: Path) -> None:
    """Refuse a file that is no Parquet, or any while pyarrow is missing. Raises SourceError."""
    _open(path).close()


def read(path: Path, *, limit: int, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a small batch in memory at a time. Raises SourceError."""
    number = 0
    with reading(path), _open(path) as table:
        batches = table.iter_batches(batch_size=BATCH_ROWS)
        while (batch := _next(path, batches, number)) is not None:
            for value in _values(batch):
                number += 1
                if value is None:
                    refusal = Refusal(Reason.NOT_UTF8, "a text of the row is not UTF-8")
                    yield problem_row(refusal, b"", number=number, name=name)
                else:
                    yield table_row(value, number=number, name=name, limit=limit)


def _open(path: Path) -> Any:
    try:
        import pyarrow as pa  # noqa: PLC0415 - heavy, and only in the data extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - heavy, and only in the data extra
    except ImportError as error:
        raise SourceError(f"Reading {path} needs pyarrow; run: pip install 'promptmill[data]'.") from error
    with reading(path):
        try:
            return pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise SourceError(f"{path} is not a sound Parquet file ({_brief(error)}); copy the file again.") from error


def _next(path: Path, batches: Iterator[Any], number: int) -> Any:
    import pyarrow as pa  # noqa: PLC0415 - heavy, and only in the data extra

    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} cannot be read after row {number}: {_brief(error)}.") from error


def _values(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield a batch's rows as plain values; None for one that holds a text which is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield None


def _brief(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200].rstrip(".")
