"""Rows of a .csv or .tsv file with a header line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.errors import SourceError
from producer.formats.rows import HEAD_BYTES, MIB, Row, problem_row
from producer.formats.text import open_bytes, reading
from producer.refusals import Reason, Refusal

_BOM = b"\xef\xbb\xbf"


def read(path: Path, *, limit: int, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file; fields may hold line breaks inside quotes, blank lines are no rows.

    A row's number is the physical line that it begins on. Raises SourceError, also for a row that outgrows `limit`:
    behind a quote that is never closed there is no telling where the next row begins.
    """
    delimiter = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes[-2:]) else ","
    csv.field_size_limit(max(csv.field_size_limit(), limit + 1))
    with reading(path), open_bytes(path) as stream:
        feed = _Feed(path, stream, limit)
        table = csv.reader(feed, delimiter=delimiter)
        header = _header(path, next((fields for fields in feed.rows_of(table) if fields), []))
        feed.new_row()
        for fields in feed.rows_of(table):
            if fields:
                yield _row(header, fields, number=feed.first_line, size=feed.row_bytes, name=name)
            feed.new_row()


class _Feed:
    """Hands the lines of a file to `csv.reader` and keeps count of the row that they make up."""

    def __init__(self, path: Path, stream: Any, limit: int) -> None:
        self._path = path
        self._stream = stream
        self._limit = limit
        self._line = 0
        self.first_line = 1
        self.row_bytes = 0

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        data = self._stream.readline(self._limit + 2 - self.row_bytes)
        if not data:
            raise StopIteration
        self._line += 1
        self.row_bytes += len(data)
        if self.row_bytes > self._limit + 1:
            raise SourceError(
                f"{self._path} has a row at line {self.first_line} larger than {self._limit / MIB:g} MiB; "
                "close its quote, or raise MILL_MAX_ROW_MB."
            )
        if self._line == 1:
            data = data.removeprefix(_BOM)
        return str(data, "utf-8", "surrogateescape")

    def new_row(self) -> None:
        """Begin to count the next row."""
        self.first_line = self._line + 1
        self.row_bytes = 0

    def rows_of(self, table: Iterator[list[str]]) -> Iterator[list[str]]:
        """Yield the rows that csv makes of the lines; SourceError where it gives up."""
        try:
            yield from table
        except csv.Error as error:
            raise SourceError(f"{self._path} cannot be read as a table at line {self._line}: {error}.") from error


def _header(path: Path, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise SourceError(f"{path} has the column {twice[0]!r} twice in its header; give every column its own name.")
    if not "".join(names).isprintable():
        raise SourceError(f"{path} has a header that is not UTF-8 text; convert the file to UTF-8 first.")
    return names


def _row(header: list[str], fields: list[str], *, number: int, size: int, name: str | None) -> Row:
    try:
        data = ",".join(fields).encode()
    except UnicodeEncodeError:
        data = ",".join(fields).encode("utf-8", "surrogateescape")
        refusal = Refusal(Reason.NOT_UTF8, "a field of the row is not UTF-8")
        return problem_row(refusal, data, number=number, name=name)
    if len(fields) != len(header):
        refusal = Refusal(Reason.BAD_COLUMNS, f"the row has {len(fields)} fields, the header has {len(header)}")
        return problem_row(refusal, data, number=number, name=name)
    value = dict(zip(header, fields, strict=True))
    return Row(number=number, value=value, name=name, size=size, head=data[:HEAD_BYTES])
