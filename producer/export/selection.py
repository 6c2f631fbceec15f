"""The records of datasets that an export takes, each id once, in file order or in id order, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from app import jsonl
from app.errors import StoreError, UsageError
from app.index import Entry
from app.ledger import Ledger
from app.records import Kind
from producer.export.base import Head, LeftOut

_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_LINES = 5_000
COMPLETION, BY_ID = "completion", "id"
ORDERS = (COMPLETION, BY_ID)
"""What `--order` takes: as the answers came, or sorted by id, which is the same on every machine."""

_Record = TypeVar("_Record", bound=Head)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which records, in which order."""

    order: str = COMPLETION
    rejected: frozenset[str] | None = frozenset()
    """The reasons whose rejected records are taken too; None takes all."""

    @classmethod
    def parse(cls, order: str, include: Sequence[str]) -> Selection:
        """Return the selection that the options `--order` and `--include rejected[:REASON]` name.

        Raises UsageError.
        """
        if order not in ORDERS:
            raise UsageError(f"--order {order!r} is not known; choose one of {', '.join(ORDERS)}.")
        reasons = set[str]()
        for word in include:
            kind, colon, reason = word.partition(":")
            if kind != Kind.REJECTED or (colon and not reason):
                raise UsageError(
                    f"--include {word!r} is not known; give rejected for all rejected records, or rejected:REASON "
                    "(such as rejected:truncated) for some."
                )
            reasons.add(reason)
        return cls(order, None if "" in reasons else frozenset(reasons))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The files that are read."""
        return (Kind.ACCEPTED,) if self.rejected == frozenset() else (Kind.ACCEPTED, Kind.REJECTED)

    def takes(self, kind: Kind, reason: str) -> bool:
        """Tell whether records of that kind, rejected for that reason, are taken."""
        return kind is Kind.ACCEPTED or (kind is Kind.REJECTED and (self.rejected is None or (reason in self.rejected)))


@dataclasses.dataclass(frozen=True)
class Batch(Generic[_Record]):
    """A run of records that follow each other."""

    records: list[_Record]
    """Those that count, in order."""
    sources: list[Ledger]
    """Which dataset each is of."""
    left_out: Counter[LeftOut]
    """Why others do not."""
    read_bytes: int
    """How much was read by now."""
    total_bytes: int
    """How much there was to read when reading began."""


class _Found(NamedTuple, Generic[_Record]):
    """A readable line and where it is."""

    offset: int
    record: _Record


def select(
    ledgers: Sequence[Ledger],
    read: Callable[[bytes], _Record],
    selection: Selection = Selection(),
) -> Iterator[Batch[_Record]]:
    """Yield the chosen records that were on disk at the start, decoded by `read`.

    Which line of a repeated id is its record, the ledger's index decides. Lines that cannot be read are counted.
    Ids that several datasets have come several times, in id order one right after the other.
    """
    for ledger in ledgers:
        ledger.catch_up()
    begun = _identities(ledgers, selection)
    ends = [{kind: _size(ledger, kind) for kind in selection.kinds} for ledger in ledgers]
    total = sum(sum(end.values()) for end in ends)
    if selection.order == BY_ID:
        for batch in _by_id(ledgers, ends, read, selection):
            _refuse_replaced(begun)
            yield batch
        return
    before = 0
    for ledger, end in zip(ledgers, ends, strict=True):
        for kind, size in end.items():
            for batch in _in_file_order(ledger, kind, size, read, selection):
                _refuse_replaced(begun)
                yield dataclasses.replace(batch, read_bytes=before + batch.read_bytes, total_bytes=total)
            before += size


def _identities(ledgers: Sequence[Ledger], selection: Selection) -> dict[Path, int]:
    """Return the inode of each file that is read."""
    paths = [ledger.folder.lines(kind) for ledger in ledgers for kind in selection.kinds]
    return {path: path.stat().st_ino for path in paths if path.exists()}


def _refuse_replaced(begun: Mapping[Path, int]) -> None:
    """Raise StoreError if a file is another one by now: the index speaks of that one, not of the one that is read."""
    for path, inode in begun.items():
        if not path.exists() or path.stat().st_ino != inode:
            raise StoreError(f"{path} was replaced (by verify --repair, or by hand) while it was read; export again.")


def _size(ledger: Ledger, kind: Kind) -> int:
    path = ledger.folder.lines(kind)
    return path.stat().st_size if path.exists() else 0


def _in_file_order(
    ledger: Ledger, kind: Kind, total: int, read: Callable[[bytes], _Record], selection: Selection
) -> Iterator[Batch[_Record]]:
    found, left_out, size, lines = list[_Found[_Record]](), Counter[LeftOut](), 0, 0
    for line in jsonl.read_lines(ledger.folder.lines(kind)):
        if line.offset >= total or not line.whole:
            break  # it was appended, or is being written, since the start
        try:
            found.append(_Found(line.offset, read(line.data)))
        except (msgspec.DecodeError, UnicodeDecodeError):
            left_out[LeftOut.UNREADABLE] += 1
        size, lines = size + len(line.data) + 1, lines + 1
        if size >= _BATCH_BYTES or lines >= _BATCH_LINES:
            records = _those_that_count(ledger, kind, found, left_out, selection)
            yield Batch(records, [ledger] * len(records), left_out, line.offset + len(line.data) + 1, total)
            found, left_out, size, lines = [], Counter(), 0, 0
    if lines:
        records = _those_that_count(ledger, kind, found, left_out, selection)
        yield Batch(records, [ledger] * len(records), left_out, total, total)


def _those_that_count(
    ledger: Ledger, kind: Kind, found: list[_Found[_Record]], left_out: Counter[LeftOut], selection: Selection
) -> list[_Record]:
    """Return the records that count, and count the others."""
    entries = _look_up(ledger, {one.record.id for one in found})
    chosen = []
    for offset, record in found:
        entry = entries.get(record.id)
        if entry is None:
            left_out[LeftOut.UNREADABLE] += 1  # the index could not read it either
        elif entry.kind is not kind or entry.offset != offset:
            # A rejected line that a later round replaced is history, and nothing that the export lacks.
            if kind is Kind.ACCEPTED:
                left_out[LeftOut.REPEATED] += 1
        elif record.verdict != kind:
            left_out[LeftOut.NOT_ACCEPTED] += 1
        elif selection.takes(kind, entry.reason):
            chosen.append(record)
    return chosen


def _look_up(ledger: Ledger, ids: set[str]) -> dict[str, Entry]:
    entries = ledger.look_up(ids)
    if len(entries) < len(ids):
        # A line appended just after the start may be on disk before it is in the index.
        ledger.catch_up()
        entries = ledger.look_up(ids)
    return entries


class _Place(NamedTuple):
    """Where a record is; places sort by id, then by the order of the datasets."""

    id: str
    dataset: int
    entry: Entry


def _by_id(
    ledgers: Sequence[Ledger],
    ends: Sequence[dict[Kind, int]],
    read: Callable[[bytes], _Record],
    selection: Selection,
) -> Iterator[Batch[_Record]]:
    total = sum(sum(end.values()) for end in ends)
    done = 0
    with contextlib.ExitStack() as stack:
        files = [{kind: _open(stack, ledger, kind) for kind in selection.kinds} for ledger in ledgers]
        first = _bad_lines(ledgers, selection)
        for places in _batches(
            heapq.merge(*map(_places, itertools.count(), ledgers, ends, itertools.repeat(selection)))
        ):
            records, sources, left_out = list[_Record](), list[Ledger](), first  # the first batch has the bad lines
            first = Counter[LeftOut]()
            for id_, number, entry in places:
                done += entry.length + 1
                line = os.pread(files[number][entry.kind], entry.length, entry.offset)
                try:
                    record = read(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    left_out[LeftOut.UNREADABLE] += 1
                    continue
                if record.id == id_ and record.verdict == entry.kind:
                    records.append(record)
                    sources.append(ledgers[number])
                else:
                    left_out[LeftOut.NOT_ACCEPTED] += 1
            yield Batch(records, sources, left_out, min(done, total), total)
        if first:
            yield Batch([], [], first, total, total)


def _bad_lines(ledgers: Sequence[Ledger], selection: Selection) -> Counter[LeftOut]:
    """Count the lines that the index has no place for."""
    taken = {ledger.folder.lines(kind) for ledger in ledgers for kind in selection.kinds}
    unreadable = sum(bad.path in taken for ledger in ledgers for bad in ledger.bad_lines())
    repeated = sum(ledger.duplicates() for ledger in ledgers)
    return +Counter({LeftOut.UNREADABLE: unreadable, LeftOut.REPEATED: repeated})


def _open(stack: contextlib.ExitStack, ledger: Ledger, kind: Kind) -> int:
    path = ledger.folder.lines(kind)
    if not path.exists():
        return -1
    with jsonl.translated(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _places(number: int, ledger: Ledger, end: dict[Kind, int], selection: Selection) -> Iterator[_Place]:
    for id_, entry in ledger.entries(*selection.kinds):
        if entry.offset < end[entry.kind] and selection.takes(entry.kind, entry.reason):
            yield _Place(id_, number, entry)


def _batches(places: Iterator[_Place]) -> Iterator[list[_Place]]:
    batch, size = list[_Place](), 0
    for place in places:
        batch.append(place)
        size += place.entry.length
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_LINES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
