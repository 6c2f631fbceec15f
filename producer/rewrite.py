"""Writes a dataset's file anew without the lines that are no records, and keeps every byte that it leaves out."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from app import jsonl
from app.errors import DiskFullError
from app.ledger import Ledger
from app.records import Kind
from app.settings import MIN_FREE_DISK_BYTES
from producer.scan import ASKED_AGAIN
from producer.soundness import Piece, pieces

_GROWTH = 1.4
"""Bytes that a byte of the file may take meanwhile: kept as it is, or moved as base64."""
_BATCH_BYTES = 4 * 1024 * 1024
_TELL_EVERY = 1000
_REPEATED = "its id stands on an earlier line"


@dataclasses.dataclass
class Moved:
    """What became of a file's lines."""

    bad: int = 0
    """Pieces that are no sound record of the dataset."""
    repeated: int = 0
    """Records whose id an earlier line has."""
    rescued: int = 0
    """Whole records that stood on a damaged line, and have lines of their own now."""

    def __bool__(self) -> bool:
        """Tell whether the file was written anew."""
        return bool(self.bad or self.repeated or self.rescued)


def rewrite(ledger: Ledger, kind: Kind, dataset: str, *, on_progress: Callable[[str], None]) -> Moved:
    """Move what is no sound record, or repeats one, from a file to the quarantine file; writers wait meanwhile.

    The file is replaced at once by one that is durable, after what it lacks is durable in the quarantine file. Killed
    at any point it leaves the old file or the new one, and at worst some bytes in the quarantine file twice.
    Raises StoreError, and DiskFullError before anything is done where there is too little space.
    """
    path, moved = ledger.folder.lines(kind), Moved()
    with ledger.locked():
        if not path.exists():
            return moved
        size = Path(os.path.realpath(path)).stat().st_size
        check_room(path, int(size * _GROWTH), again="producer verify --repair")
        with _Scratch() as scratch, jsonl.replacing(path) as file:
            _sort(_watched(path, on_progress), kind, dataset, scratch=scratch, keep=file, moved=moved)
            _quarantine(ledger.folder.quarantine, path, scratch)
    return moved


def _sort(
    lines: Iterator[jsonl.Line], kind: Kind, dataset: str, *, scratch: _Scratch, keep: BinaryIO, moved: Moved
) -> None:
    """Write the first sound record of each id to `keep`, and note where the rest stands."""
    for line in lines:
        found = list(pieces(line, kind, dataset))
        for piece in found:
            if piece.judgement.fault is not None:
                moved.bad += 1
                scratch.note_cut(piece, piece.judgement.fault)
            elif not scratch.is_first(piece.judgement.id, piece.judgement.round if kind in ASKED_AGAIN else 0):
                moved.repeated += 1
                scratch.note_cut(piece, _REPEATED)
            else:
                moved.rescued += len(found) > 1
                keep.write(piece.data + b"\n")


def _watched(path: Path, on_progress: Callable[[str], None]) -> Iterator[jsonl.Line]:
    size = path.stat().st_size
    for number, line in enumerate(jsonl.read_lines(path)):
        if not number % _TELL_EVERY:
            on_progress(f"writing {path.name} anew: {line.offset / 1e6:,.0f} of {size / 1e6:,.0f} MB")
        yield line


def check_room(path: Path, needed: int, *, again: str) -> None:
    """Raise DiskFullError where so many bytes cannot be written beside a file; `again` is the command to run then."""
    disk = os.statvfs(Path(os.path.realpath(path)).parent)
    free, needed = disk.f_bavail * disk.f_frsize, needed + MIN_FREE_DISK_BYTES
    if free < needed:
        raise DiskFullError(
            f"{path} cannot be written anew: {needed // 2**20:,} MiB are needed beside it and {free // 2**20:,} MiB "
            f"are free; free some space and run {again} again."
        )


def _quarantine(target: Path, path: Path, scratch: _Scratch) -> None:
    batch = [b""] if _is_ended(target) else [b"\n"]
    with path.open("rb") as file:
        for offset, length, reason in scratch.cuts():
            file.seek(offset)
            batch.append(jsonl.encode_cut(path, offset, file.read(length), reason=reason))
            if sum(map(len, batch)) >= _BATCH_BYTES:
                jsonl.append(target, b"".join(batch))
                batch = []
    if any(batch):
        jsonl.append(target, b"".join(batch))


def _is_ended(path: Path) -> bool:
    """Tell whether a file's last line has its end; a crash may have cut it off."""
    size = path.stat().st_size if path.exists() else 0
    return not size or jsonl.read_span(path, size - 1, 1) == b"\n"


class _Scratch:
    """The ids that were met and the places that are cut, in a private file that vanishes with the connection."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None)
        self._table.executescript(
            "CREATE TABLE met (id TEXT, round INTEGER, PRIMARY KEY (id, round)) WITHOUT ROWID;"
            "CREATE TABLE cuts (offset INTEGER, length INTEGER, reason TEXT);"
        )
        self._table.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._table.close()

    def is_first(self, id_: str, round_: int) -> bool:
        """Tell whether the id was not met before (in that round), and remember it."""
        return self._table.execute("INSERT OR IGNORE INTO met VALUES (?, ?)", (id_, round_)).rowcount > 0

    def note_cut(self, piece: Piece, reason: str) -> None:
        """Remember bytes that are not kept."""
        self._table.execute("INSERT INTO cuts VALUES (?, ?, ?)", (piece.offset, len(piece.data), reason))

    def cuts(self) -> Iterator[tuple[int, int, str]]:
        """Yield offset, length and reason of what is not kept, in file order."""
        yield from self._table.execute("SELECT offset, length, reason FROM cuts ORDER BY rowid")
