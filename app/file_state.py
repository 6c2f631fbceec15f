"""How a file of lines looked when it was indexed, to tell later whether what the index says of it still holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self

from app import jsonl

_TAIL_BYTES = 256


class FileState(NamedTuple):
    """A file as it was when it was last indexed."""

    size: int = 0
    mtime_ns: int = 0
    inode: int = 0
    tail: bytes = b""
    """The last bytes before `size`: what a file that only grew still holds there."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the file as it is."""
        now = path.stat()
        return cls(now.st_size, now.st_mtime_ns, now.st_ino, _tail(path, now.st_size))

    @classmethod
    def after(cls, path: Path, appended: jsonl.Appended, data: bytes) -> Self:
        """Return the file as it was when `data` had been appended, not as somebody may have edited it since."""
        offset, now = appended
        short = _TAIL_BYTES - len(data)
        before = jsonl.read_span(path, max(0, offset - short), min(offset, short)) if short > 0 else b""
        return cls(now.st_size, now.st_mtime_ns, now.st_ino, before + data[-_TAIL_BYTES:])

    def is_still(self, now: os.stat_result) -> bool:
        """Tell whether nothing has happened to the file."""
        return (self.size, self.mtime_ns, self.inode) == (now.st_size, now.st_mtime_ns, now.st_ino)

    def only_grew(self, path: Path, now: os.stat_result) -> bool:
        """Tell whether lines were appended to the file and no other change shows."""
        return self.inode == now.st_ino and self.size < now.st_size and _tail(path, self.size) == self.tail


def _tail(path: Path, size: int) -> bytes:
    begin = max(0, size - _TAIL_BYTES)
    return jsonl.read_span(path, begin, size - begin)
