"""Rows of a .json file: an array, an object around one list of rows, or one object a line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from app.errors import SourceError
from producer.formats import json_lines
from producer.formats.rows import Row, json_row, too_large
from producer.formats.text import lines, open_bytes, reading

MAX_DOCUMENT_BYTES = 1 << 30
"""The largest file of the form {"data": [...]}, which is held in memory whole; arrays are streamed."""
CHUNK_BYTES = 1 << 20

_ROW_LISTS = frozenset({"messages", "conversations", "conversation", "prompt", "input", "tools", "functions"})
"""Lists of objects that belong to one row, so that an object holding one of them is a row itself."""

_OUTSIDE = re.compile(rb'["\[\]{},]')
_STRING_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BOM = b"\xef\xbb\xbf"


def read(path: Path, *, limit: int, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a .json file; SourceError for a file that is none of the three forms."""
    with reading(path), open_bytes(path) as stream:
        start = stream.read(CHUNK_BYTES).removeprefix(_BOM).lstrip()
        if start.startswith(b"["):
            yield from _rows_of_array(path, start[1:], stream, limit=limit, name=name)
            return
        if not start and not stream.read(1):
            return
    if _one_object_a_line(path, limit=limit):
        yield from json_lines.read(path, limit=limit, name=name)
    else:
        yield from _rows_of_document(path, limit=limit, name=name)


def _one_object_a_line(path: Path, *, limit: int) -> bool:
    """Tell whether the first line is a whole object, and a row rather than a document around a list of rows."""
    head = list(itertools.islice(lines(path, limit=limit), 2))
    if not head or head[0].size > limit:
        return len(head) != 1
    value = json_row(head[0].data, number=1).value
    return value is not None and (len(head) > 1 or _list_of_rows(value) is None)


def _list_of_rows(document: dict[str, Any]) -> str | None:
    """Return the one key whose list holds objects; None when the document is a row itself or has several lists."""
    keys = [key for key, value in document.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return keys[0] if len(keys) == 1 and keys[0] not in _ROW_LISTS else None


def _rows_of_document(path: Path, *, limit: int, name: str | None) -> Iterator[Row]:
    with reading(path), open_bytes(path) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1).removeprefix(_BOM)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise SourceError(f"{path} is one JSON object of more than {MAX_DOCUMENT_BYTES:,} bytes; convert it to .jsonl.")
    try:
        document = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        lists = {
            key: msgspec.json.decode(raw, type=list[msgspec.Raw])
            for key, raw in document.items()
            if bytes(memoryview(raw)[:1]) == b"["
        }
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is neither a JSON array nor an object nor one object a line: {error}.") from error
    if set(lists) & _ROW_LISTS or not lists:
        yield json_row(data, number=1, name=name)
        return
    tables = {key: items for key, items in lists.items() if items and bytes(memoryview(items[0])[:1]) == b"{"}
    if len(tables) != 1:
        found = ", ".join(sorted(tables or document))
        raise SourceError(f"{path} is a JSON object without exactly one list of rows (it has {found}); use .jsonl.")
    for number, raw in enumerate(next(iter(tables.values())), start=1):
        data = bytes(raw)
        if len(data) > limit:
            yield too_large(data[:limit], number=number, size=len(data), limit=limit, name=name)
        else:
            yield json_row(data, number=number, name=name)


def _rows_of_array(path: Path, start: bytes, stream: BinaryIO, *, limit: int, name: str | None) -> Iterator[Row]:
    pieces = _elements(start, stream, limit=limit)
    for number in itertools.count(1):
        try:
            element = next(pieces, None)
        except ValueError as error:
            raise SourceError(f"{path} is not a sound JSON array: {error} at row {number}.") from error
        if element is None:
            return
        if element.size > limit:
            yield too_large(element.data, number=number, size=element.size, limit=limit, name=name)
        else:
            yield json_row(element.data, number=number, name=name)


class _Element(NamedTuple):
    data: bytes
    """The element, or the beginning of one that is too large."""
    size: int


class _Cutter:
    """Cuts the inside of a JSON array at its top-level commas, a chunk at a time, without decoding it."""

    def __init__(self, buffer: bytes, limit: int) -> None:
        self.buffer = buffer
        self.limit = limit
        self.position = 0
        self.start = 0
        self.depth = 0
        self.in_string = False
        self.head = b""
        self.dropped = 0

    def next_end(self) -> bytes | None:
        """Move to the next top-level `,` or the array's `]` and return it; None when the buffer is used up."""
        while True:
            if self.in_string and not self._leave_string():
                return None
            found = _OUTSIDE.search(self.buffer, self.position)
            if found is None:
                self.position = len(self.buffer)
                return None
            self.position = found.end()
            mark = found.group()
            if mark == b'"':
                self.in_string = True
            elif mark in b"[{":
                self.depth += 1
            elif mark == b",":
                if self.depth == 0:
                    return mark
            elif self.depth == 0:
                return mark
            else:
                self.depth -= 1

    def _leave_string(self) -> bool:
        rest = _STRING_REST.match(self.buffer, self.position)
        self.position = rest.end() if rest else self.position
        if self.buffer[self.position : self.position + 1] != b'"':
            return False
        self.position += 1
        self.in_string = False
        return True

    def add(self, chunk: bytes) -> None:
        """Append a chunk, keeping only the beginning of an element that has become too large."""
        if self.position - self.start > self.limit:
            self.head = self.head or self.buffer[self.start : self.start + self.limit]
            self.dropped += self.position - self.start
            self.start = self.position
        self.buffer = self.buffer[self.start :] + chunk
        self.position -= self.start
        self.start = 0

    def take(self) -> _Element:
        """Return the element that ends before the mark just found, and begin the next one."""
        data = self.buffer[self.start : self.position - 1]
        self.start = self.position
        size = len(data) + self.dropped
        data = self.head or data
        self.head, self.dropped = b"", 0
        return _Element(data[: self.limit] if size > self.limit else data.strip(), size)


def _elements(start: bytes, stream: BinaryIO, *, limit: int) -> Iterator[_Element]:
    """Yield the elements of an array whose inside begins with `start`; ValueError when it is cut short."""
    cutter = _Cutter(start, limit)
    first = True
    while True:
        mark = cutter.next_end()
        if mark is None:
            chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                raise ValueError("it ends too early")
            cutter.add(chunk)
            continue
        element = cutter.take()
        if mark == b"}":
            raise ValueError("a closing brace is out of place")
        if element.data or mark == b"," or not first:
            if not element.data:
                raise ValueError("an element is missing")
            yield element
        first = False
        if mark == b"]":
            rest = cutter.buffer[cutter.position :] + stream.read(CHUNK_BYTES)
            if rest.strip():
                raise ValueError("text follows the closing bracket")
            return
