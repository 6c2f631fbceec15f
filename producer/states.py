"""Whether the files that an extraction has recorded are still what was recorded, and what to do where they are not."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from app import jsonl, manifest
from app.extraction import Extracted, decode_extracted, plan_from_content
from app.ledger import Ledger
from app.records import Kind
from producer.rewrite import GROWTH, Cut, check_room, quarantine

_PIECE_BYTES = 4 * 1024 * 1024
_SHOWN = 5
_TELL_EVERY = 500


@dataclasses.dataclass
class Findings:
    """What a look at the recorded files has found."""

    files: int = 0
    bytes: int = 0
    missing: int = 0
    damaged: int = 0
    """Files of another size or content than was recorded."""
    examples: list[str] = dataclasses.field(default_factory=list)
    """The first of them: path and what is wrong."""
    ids: set[str] = dataclasses.field(default_factory=set)

    @property
    def bad(self) -> int:
        """Files that are not what was recorded."""
        return self.missing + self.damaged

    def note(self, id_: str, path: Path, fault: str) -> None:
        """Count a bad file."""
        self.missing += fault == _GONE
        self.damaged += fault != _GONE
        self.ids.add(id_)
        if len(self.examples) < _SHOWN:
            self.examples.append(f"{path}: {fault}")


_GONE = "it is not there"


def check_files(ledger: Ledger, *, read: bool, on_progress: Callable[[str], None] = lambda _words: None) -> Findings:
    """Look at every recorded file: that it is there, of its size, and with `read` of the content that was recorded."""
    found, folders = Findings(), _folders(ledger)
    for _line, record in _records(ledger):
        if record is None or record.file is None or record.id in found.ids:
            continue
        path = folders.get(record.settings, ledger.folder.path) / record.file
        found.files += 1
        found.bytes += record.bytes or 0
        if fault := _fault(path, record, read=read):
            found.note(record.id, path, fault)
        if not found.files % _TELL_EVERY:
            on_progress(f"checked {found.files:,} files, {found.bytes / 1e9:,.1f} GB")
    return found


def set_aside(ledger: Ledger, found: Findings) -> int:
    """Move the records of bad files to the quarantine file, so that their samples count as to be made again.

    The file of records is replaced at once by one that is durable, after what it lacks is durable elsewhere; writers
    wait meanwhile, and the caller holds the folder's repair lock. Raises StoreError, and DiskFullError before anything
    is done where there is too little space.
    """
    path, cuts = ledger.folder.lines(Kind.ACCEPTED), list[Cut]()
    if not found.ids:
        return 0
    with ledger.locked():
        size = Path(os.path.realpath(path)).stat().st_size if path.exists() else 0
        check_room(path, int(size * GROWTH), again="producer extract")
        with jsonl.replacing(path) as kept:
            for line, record in _records(ledger):
                if record is not None and record.id in found.ids:
                    cuts.append((line.offset, len(line.data), "its file is missing or damaged"))
                else:
                    kept.write(line.data + (b"\n" if line.whole else b""))
            quarantine(ledger.folder.quarantine, path, cuts)
    ledger.catch_up()
    return len(cuts)


def drop_temporaries(folder: Path) -> int:
    """Remove what killed workers had begun to write; call it only while no worker is at work there."""
    removed = 0
    for temporary in folder.rglob(".*.tmp"):
        temporary.unlink(missing_ok=True)
        removed += 1
    return removed


def _records(ledger: Ledger) -> Iterator[tuple[jsonl.Line, Extracted | None]]:
    path = ledger.folder.lines(Kind.ACCEPTED)
    if not path.exists():
        return
    for line in jsonl.read_lines(path):
        try:
            yield line, decode_extracted(line.data) if line.whole else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            yield line, None  # verify tells of it


def _folders(ledger: Ledger) -> Mapping[str, Path]:
    """Return the output folder of each plan by its fingerprint."""
    known = manifest.read(ledger)
    return {
        entry.fingerprint: plan_from_content(entry.content).folder(ledger.folder.path)
        for entry in (known.settings if known else [])
    }


def _fault(path: Path, record: Extracted, *, read: bool) -> str | None:
    try:
        there = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return _GONE
    if there != record.bytes:
        return f"it has {there:,} bytes and had {record.bytes or 0:,}"
    if not read:
        return None
    digest = hashlib.sha256()
    with jsonl.translated(path), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return None if digest.hexdigest() == record.sha256 else "its content has changed"
