"""Dataset folders with accepted records, for the tests of exports."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.records import Kind, Record, Source, Usage, encode_line

USER = {"role": "user", "content": "Hi"}
LOOK_UP = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Zürich"}'}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def record(id_: str, **fields: Any) -> Record:
    """Return an accepted record with exact ids; `fields` replace what it has."""
    plain: dict[str, Any] = {
        "dataset": "d",
        "verdict": Kind.ACCEPTED,
        "source": Source(row=1),
        "messages": [USER],
        "content": "Hello.",
        "finish_reason": "stop",
        "prompt_token_ids": [1, 2, 3],
        "output_ids": [7, 8],
        "usage": Usage(3, 2),
        "sampling": {"max_tokens": 8192},
        "settings": "0" * 16,
    }
    return Record(id=id_, **{**plain, **fields})


def many(count: int, *, chars: int = 0) -> list[Record]:
    """Return so many records in id order, each with that many characters more."""
    return [record(f"s{number:05d}", content=f"Answer {number}." + "x" * chars) for number in range(count)]


@contextlib.contextmanager
def ledger_with(folder: Path, records: Sequence[Record]) -> Iterator[Ledger]:
    """Open a dataset folder that holds these records."""
    with Ledger.open(DatasetFolder(folder)) as ledger:
        ledger.commit([Pen(Kind.ACCEPTED, one.id, encode_line(one)) for one in records])
        yield ledger


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL export, plain or compressed."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data[:-1].split(b"\n")]


def ids_of(path: Path) -> list[str]:
    """Return the ids of a JSONL export, in file order."""
    return [row["id"] for row in rows_of(path)]
