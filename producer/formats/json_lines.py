"""Rows of a JSON Lines file: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from producer.formats.rows import Row, json_row, too_large
from producer.formats.text import lines


def read(path: Path, *, limit: int, name: str | None = None) -> Iterator[Row]:
    """Yield the rows of a .jsonl or .ndjson file; blank lines are no rows. Raises SourceError."""
    for number, data, size in lines(path, limit=limit):
        if size > limit:
            yield too_large(data, number=number, size=size, limit=limit, name=name)
        else:
            yield json_row(data, number=number, name=name)
