"""When the first and the newest record of a dataset was finished, out of the ends of its files."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from app import jsonl
from app.places import DatasetFolder
from app.records import RECORDED

_CHUNK = 65536
_LONGEST = 64 * 2**20
"""Bytes after which a line's end is no longer looked for."""


class _Head(msgspec.Struct):
    finished_at: float | None = None


_decode = msgspec.json.Decoder(_Head).decode


def first_and_last(folder: DatasetFolder) -> tuple[float | None, float | None]:
    """Return the Unix seconds at which the first and the newest record on disk was finished; null while there is none.

    Only the first and the last line of each file are read.
    Raises StoreError when a file cannot be read.
    """
    moments = [_of_file(folder.lines(kind)) for kind in RECORDED]
    firsts = [first for first, _last in moments if first is not None]
    lasts = [last for _first, last in moments if last is not None]
    return min(firsts, default=None), max(lasts, default=None)


def _of_file(path: Path) -> tuple[float | None, float | None]:
    with jsonl.translated(path):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None, None
        with file:
            return _moment(file.readline(_LONGEST)), _moment(_last_line(file))


def _last_line(file: BinaryIO) -> bytes:
    """Return the last line that a newline ends."""
    begin, tail = file.seek(0, 2), b""
    while begin > 0 and len(tail) < _LONGEST:
        step = min(begin, max(_CHUNK, len(tail)))
        begin -= step
        file.seek(begin)
        tail = file.read(step) + tail
        whole = tail[: tail.rfind(b"\n") + 1]
        before = whole.rfind(b"\n", 0, -1)
        if before >= 0 or (whole and begin == 0):
            return whole[before + 1 :]
    return b""


def _moment(line: bytes) -> float | None:
    try:
        return _decode(line).finished_at
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
