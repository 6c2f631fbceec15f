"""The accepted records of a dataset, each id once and in file order, in bounded memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from app import jsonl
from app.index import Entry
from app.ledger import Ledger
from app.records import Kind
from producer.export.base import Head, LeftOut

_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_LINES = 5_000

_Record = TypeVar("_Record", bound=Head)


@dataclasses.dataclass(frozen=True)
class Batch(Generic[_Record]):
    """A run of lines that follow each other."""

    records: list[_Record]
    """Those that count, in file order."""
    left_out: Counter[LeftOut]
    """Why the others do not."""
    read_bytes: int
    """How far into the file the batch reaches."""
    total_bytes: int
    """How long the file was when reading began."""


class _Found(Generic[_Record]):
    """A readable line and where it is."""

    __slots__ = ("offset", "record")

    def __init__(self, offset: int, record: _Record) -> None:
        self.offset = offset
        self.record = record


def accepted(ledger: Ledger, read: Callable[[bytes], _Record]) -> Iterator[Batch[_Record]]:
    """Yield the accepted records that were on disk at the start, decoded by `read`.

    Which line of a repeated id is its record, the ledger's index decides. Lines that cannot be read are counted.
    """
    ledger.catch_up()
    path = ledger.folder.lines(Kind.ACCEPTED)
    total = path.stat().st_size if path.exists() else 0
    found, left_out, size, lines = list[_Found[_Record]](), Counter[LeftOut](), 0, 0
    for line in jsonl.read_lines(path):
        if line.offset >= total or not line.whole:
            break  # it was appended, or is being written, since the start
        try:
            found.append(_Found(line.offset, read(line.data)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            left_out[LeftOut.UNREADABLE] += 1
        size, lines = size + len(line.data) + 1, lines + 1
        if size >= _BATCH_BYTES or lines >= _BATCH_LINES:
            records = _select(ledger, found, left_out)
            yield Batch(records, left_out, line.offset + len(line.data) + 1, total)
            found, left_out, size, lines = [], Counter(), 0, 0
    if lines:
        yield Batch(_select(ledger, found, left_out), left_out, total, total)


def _select(ledger: Ledger, found: list[_Found[_Record]], left_out: Counter[LeftOut]) -> list[_Record]:
    """Return the records that count, and count the others."""
    entries = _look_up(ledger, {one.record.id for one in found})
    chosen = []
    for one in found:
        entry = entries.get(one.record.id)
        if entry is None:
            left_out[LeftOut.UNREADABLE] += 1  # the index could not read it either
        elif entry.kind is not Kind.ACCEPTED or entry.offset != one.offset:
            left_out[LeftOut.REPEATED] += 1
        elif one.record.verdict != Kind.ACCEPTED:
            left_out[LeftOut.NOT_ACCEPTED] += 1
        else:
            chosen.append(one.record)
    return chosen


def _look_up(ledger: Ledger, ids: set[str]) -> dict[str, Entry]:
    entries = ledger.look_up(ids)
    if len(entries) < len(ids):
        # A line appended just after the start may be on disk before it is in the index.
        ledger.catch_up()
        entries = ledger.look_up(ids)
    return entries
