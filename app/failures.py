"""Groups a dataset's failed and rejected samples by class, out of its files as they grow."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator

import msgspec

from app import jsonl
from app.errors import StoreError
from app.places import DatasetFolder
from app.records import Kind

KINDS = (Kind.FAILED, Kind.REJECTED)
KEPT_IDS = 20
"""Sample ids that are kept of each class, the newest ones."""
LOOK_BYTES = 32 * 1024 * 1024
"""Bytes that one look reads at most: a worker's rejected answers may be gigabytes when Flower starts late."""
_TAIL_BYTES = 64
_ERROR_CHARS = 500


class _Head(msgspec.Struct):
    id: str
    reason: str | None = None
    error: str | None = None
    finished_at: float | None = None


_decode = msgspec.json.Decoder(_Head).decode


@dataclasses.dataclass
class Group:
    """The lines of one class: a kind and a reason."""

    kind: Kind
    reason: str
    lines: int = 0
    """Times that a sample was recorded so; one that was asked again may be among them twice."""
    first_at: float | None = None
    """Unix seconds."""
    last_at: float | None = None
    error: str = ""
    """The newest one's words, bounded; empty for rejected ones."""
    ids: deque[str] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT_IDS))
    """Newest last."""

    def add(self, head: _Head) -> None:
        """Count one more line."""
        self.lines += 1
        if head.finished_at is not None:
            self.first_at = min(head.finished_at, self.first_at if self.first_at is not None else head.finished_at)
            self.last_at = max(head.finished_at, self.last_at if self.last_at is not None else head.finished_at)
        self.error = (head.error or "")[:_ERROR_CHARS] or self.error
        if head.id in self.ids:
            self.ids.remove(head.id)
        self.ids.append(head.id)


@dataclasses.dataclass
class _Cursor:
    """How far a file was read, and what proves that it is still the same file."""

    inode: int = 0
    mtime_ns: int = 0
    size: int = 0
    offset: int = 0
    """Bytes read, up to the last whole line."""
    tail: bytes = b""
    """The last bytes before `offset`."""


class FailureBook:
    """One dataset's failures and rejections, read on from where the last look ended; for one thread at a time."""

    def __init__(self, folder: DatasetFolder, *, look_bytes: int = LOOK_BYTES) -> None:
        self._folder = folder
        self._look_bytes = look_bytes
        self._cursors = {kind: _Cursor() for kind in KINDS}
        self._groups: dict[tuple[Kind, str], Group] = {}
        self.complete = False
        """Whether the last look reached the ends of the files."""

    def look(self) -> list[Group]:
        """Read what was appended since the last look; return the classes, the most recent first.

        A file that was cut, edited or replaced is read anew. Raises StoreError.
        """
        ends = [self._look_at(kind) for kind in KINDS]
        self.complete = all(ends)
        return sorted(self._groups.values(), key=lambda group: group.last_at or 0.0, reverse=True)

    def _look_at(self, kind: Kind) -> bool:
        """Return whether the end of the file was reached."""
        path, cursor = self._folder.lines(kind), self._cursors[kind]
        try:
            now = path.stat()
        except FileNotFoundError:
            self._forget(kind)
            return True
        except OSError as error:
            raise jsonl.translate(error, path) from error
        if not self._is_grown(kind, now):
            self._forget(kind)
            cursor = self._cursors[kind]
        cursor.inode, cursor.mtime_ns, cursor.size = now.st_ino, now.st_mtime_ns, now.st_size
        start = cursor.offset
        for line in self._whole_lines(kind, start):
            self._take(kind, line.data)
            cursor.offset = line.offset + len(line.data) + 1
            if cursor.offset - start >= self._look_bytes:
                break
        if cursor.offset != start:
            begin = max(0, cursor.offset - _TAIL_BYTES)
            cursor.tail = jsonl.read_span(path, begin, cursor.offset - begin)
        return cursor.offset >= now.st_size

    def _whole_lines(self, kind: Kind, start: int) -> Iterator[jsonl.Line]:
        return (line for line in jsonl.read_lines(self._folder.lines(kind), start) if line.whole)

    def _is_grown(self, kind: Kind, now: os.stat_result) -> bool:
        """Tell whether the file is as it was, with nothing but more lines."""
        cursor = self._cursors[kind]
        if cursor.inode != now.st_ino or now.st_size < cursor.size:
            return False
        if now.st_size == cursor.size:
            return now.st_mtime_ns == cursor.mtime_ns
        begin = cursor.offset - len(cursor.tail)
        try:
            return jsonl.read_span(self._folder.lines(kind), begin, len(cursor.tail)) == cursor.tail
        except StoreError:
            return False

    def _take(self, kind: Kind, data: bytes) -> None:
        try:
            head = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return  # the snapshot's notes tell of lines that are no records
        reason = head.reason or "unknown"
        self._groups.setdefault((kind, reason), Group(kind, reason)).add(head)

    def _forget(self, kind: Kind) -> None:
        self._cursors[kind] = _Cursor()
        self._groups = {key: group for key, group in self._groups.items() if key[0] is not kind}
