"""Reads training files row by row, strictly, in memory that one row bounds."""

from __future__ import annotations

import dataclasses
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from app.errors import SourceError
from producer.export.sinks import ARROW, PARQUET, SUFFIXES
from producer.validate.problems import Problem

_BLOCK = 4 * 1024 * 1024
_TABLE_ROWS = 256
_DETAIL_CHARS = 120


@dataclasses.dataclass(frozen=True)
class Item:
    """One row of a file, or what is there in its place."""

    number: int
    """1-based; the line, in JSONL."""
    row: dict[str, Any] | None
    problem: Problem | None = None
    detail: str = ""
    read_bytes: int = 0
    """How far into the file it reaches, compressed bytes where it is compressed; 0 where unknown."""


def read_items(path: Path) -> Iterator[Item]:
    """Yield the rows of a .jsonl (.gz, .zst), .parquet or .arrow file.

    Raises SourceError when the file cannot be opened or its container is damaged.
    """
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise SourceError(f"{path} is no training file; it must end in one of {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise SourceError(f"{path} is not there; give the file that producer export wrote.")
    if name.endswith((PARQUET, ARROW)):
        yield from _read_table(path, name.endswith(PARQUET))
        return
    with path.open("rb") as raw:
        try:
            yield from _read_lines(_unpacked(raw, name), raw)
        except (EOFError, OSError) as error:
            raise SourceError(f"{path} is damaged ({error}); export it again.") from error


def _unpacked(raw: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]  # it reads like one
    if name.endswith(".zst"):
        import zstandard  # noqa: PLC0415 heavy

        stream: BinaryIO = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return stream
    return raw


def _read_lines(file: BinaryIO, raw: BinaryIO) -> Iterator[Item]:
    number, rest = 0, io.BytesIO()
    while block := file.read(_BLOCK):
        pieces = block.split(b"\n")
        for piece in pieces[:-1]:
            number += 1
            rest.write(piece)
            yield _item(number, rest.getvalue(), raw.tell())
            rest = io.BytesIO()
        rest.write(pieces[-1])
    if rest.getvalue():
        yield Item(number + 1, None, Problem.TORN_END, _start(rest.getvalue()), raw.tell())


def _item(number: int, line: bytes, place: int) -> Item:
    if not line.strip():
        return Item(number, None, Problem.NOT_A_ROW, "an empty line", place)
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Item(number, None, Problem.NOT_JSON, f"{error}: {_start(line)}", place)
    if not isinstance(value, dict):
        return Item(number, None, Problem.NOT_A_ROW, _start(line), place)
    return Item(number, value, read_bytes=place)


def _start(line: bytes) -> str:
    return repr(line[:_DETAIL_CHARS].decode("utf-8", "replace"))


def _read_table(path: Path, is_parquet: bool) -> Iterator[Item]:
    try:
        import pyarrow as pa  # noqa: PLC0415 heavy
        import pyarrow.parquet as pq  # noqa: PLC0415 heavy
    except ImportError as error:
        raise SourceError(
            f"{path} needs pyarrow, which is not installed: run `pip install 'promptmill[data]'`."
        ) from error
    number = 0
    try:
        with path.open("rb") as file:
            batches = pq.ParquetFile(file).iter_batches(_TABLE_ROWS) if is_parquet else pa.ipc.open_stream(file)
            for batch in batches:
                for start in range(0, batch.num_rows, _TABLE_ROWS):
                    for row in batch.slice(start, _TABLE_ROWS).to_pylist():
                        number += 1
                        yield Item(number, {name: _without_nulls(value) for name, value in row.items()})
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} is damaged ({error}); export it again.") from error


def _without_nulls(value: Any) -> Any:
    """Drop the nulls with which a table fills the keys that a message lacks."""
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
