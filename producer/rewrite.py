"""Writes a dataset's file anew without the lines that are no records, and keeps every byte that it leaves out."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from app import jsonl
from app.errors import DiskFullError
from app.ledger import Ledger
from app.records import ASKED_AGAIN, Kind
from app.settings import MIN_FREE_DISK_BYTES
from producer.scratch import growing, private_database
from producer.soundness import Piece, pieces

GROWTH = 1.4
"""Bytes that a byte of the file may take meanwhile: kept as it is, or moved as base64."""
_BATCH_BYTES = 4 * 1024 * 1024
_TELL_EVERY = 1000
_REPEATED = "its id stands on an earlier line"
_MISNAMED = "its id is not that of its prompt"


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


Cut = tuple[int, int, str]
"""Offset and length in bytes of a piece that is not kept, and why."""


def rewrite(
    ledger: Ledger,
    kind: Kind,
    dataset: str,
    *,
    is_misnamed: Callable[[Piece], bool],
    on_progress: Callable[[str], None],
) -> Moved:
    """Move what is no sound record, or repeats one, from a file to the quarantine file; writers wait meanwhile.

    `is_misnamed` is asked of each sound record whether its id belongs to something else.

    The file is replaced at once by one that is durable, after what it lacks is durable in the quarantine file. Killed
    at any point it leaves the old file or the new one, and at worst some bytes in the quarantine file twice.
    Raises StoreError, and DiskFullError: before anything is done where there is too little space, and where the
    temporary folder is full.
    """
    path, moved = ledger.folder.lines(kind), Moved()
    with ledger.locked():
        if not path.exists():
            return moved
        size = Path(os.path.realpath(path)).stat().st_size
        check_room(path, int(size * GROWTH), again="producer verify --repair")
        with _Scratch() as scratch, jsonl.replacing(path) as file:
            lines = (_judged(line, kind, dataset, is_misnamed) for line in _watched(path, on_progress))
            with growing("of verify --repair"):
                _sort(lines, kind, scratch=scratch, keep=file, moved=moved)
                quarantine(ledger.folder.quarantine, path, scratch.cuts())
    return moved


def _judged(line: jsonl.Line, kind: Kind, dataset: str, is_misnamed: Callable[[Piece], bool]) -> list[Piece]:
    return [
        piece._replace(judgement=piece.judgement._replace(fault=_MISNAMED))
        if piece.judgement.fault is None and is_misnamed(piece)
        else piece
        for piece in pieces(line, kind, dataset)
    ]


def _sort(lines: Iterator[list[Piece]], kind: Kind, *, scratch: _Scratch, keep: BinaryIO, moved: Moved) -> None:
    """Write the first sound record of each id to `keep`, and note where the rest stands."""
    for found in lines:
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


def quarantine(target: Path, path: Path, cuts: Iterable[Cut]) -> None:
    """Append pieces of the file at `path` to the quarantine file, durably and in batches; under the folder's lock.

    Raises StoreError.
    """
    batch = [b""] if _is_ended(target) else [b"\n"]
    with path.open("rb") as file:
        for offset, length, reason in cuts:
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
        self._table = private_database(
            "CREATE TABLE met (id TEXT, round INTEGER, PRIMARY KEY (id, round)) WITHOUT ROWID",
            "CREATE TABLE cuts (offset INTEGER, length INTEGER, reason TEXT)",
            "BEGIN",
        )

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

    def cuts(self) -> Iterator[Cut]:
        """Yield offset, length and reason of what is not kept, in file order."""
        yield from self._table.execute("SELECT offset, length, reason FROM cuts ORDER BY rowid")
