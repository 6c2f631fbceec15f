"""Bytes and lines of a text file, plain or compressed, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from app.errors import SourceError

COMPRESSIONS = (".gz", ".zst")

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "Zstandard", b"PAR1": "Parquet", b"PK\x03\x04": "zip"}
_PEEK_BYTES = 4096
_BUFFER_BYTES = 1 << 20
# One byte of Zstandard can stand for 32 KiB of text; small bites bound what one step can unfold.
_ZSTD_BITE_BYTES = 2048


class Line(NamedTuple):
    """One line of a text file without its line end."""

    number: int
    """1-based and physical: blank lines count."""
    data: bytes
    """The line, or the beginning of one that is too long."""
    size: int
    """Its whole length in bytes."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every failure to read `path` inside the block into a SourceError of one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceError(f"There is no file {path}; check the path.") from error
    except IsADirectoryError as error:
        raise SourceError(f"{path} is a folder, not a file.") from error
    except PermissionError as error:
        raise SourceError(f"{path} may not be read by this user; change its permissions.") from error
    except EOFError as error:
        raise SourceError(f"{path} is cut short: the compressed data ends too early; copy the file again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{path} is not a sound gzip file ({error}); copy the file again.") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}.") from error


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading what it holds, decompressed when its name ends in .gz or .zst."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    raw = path.open("rb", buffering=_BUFFER_BYTES)
    if suffix == ".zst":
        return cast("BinaryIO", io.BufferedReader(_ZstdReader(raw, path), _BUFFER_BYTES))
    return raw


class _ZstdReader(io.RawIOBase):
    """Unfolds a Zstandard file of any number of frames and notices when the last one is cut short."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        import zstandard  # noqa: PLC0415 - only needed for .zst files

        self._zstd: Any = zstandard
        self._raw = raw
        self._path = path
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._unfold():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unfold(self) -> bool:
        rest = self._frame.unused_data if self._frame.eof else b""
        bite = rest or self._raw.read(_ZSTD_BITE_BYTES)
        if not bite:
            if self._begun and not self._frame.eof:
                raise EOFError
            return False
        if self._frame.eof:
            self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._begun = True
        try:
            self._ready = memoryview(self._frame.decompress(bite))
        except self._zstd.ZstdError as error:
            raise SourceError(f"{self._path} is not a sound Zstandard file; copy the file again.") from error
        return True

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def check_text(path: Path) -> None:
    """Refuse a file as a whole when it cannot be opened or its beginning is not UTF-8 text.

    Raises SourceError.
    """
    with reading(path), open_bytes(path) as stream:
        head = stream.read(_PEEK_BYTES)
    first_line = head.split(b"\n", 1)[0]
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            raise SourceError(f"{path} holds {kind} data, not text; give it the name ending that says so.")
    if head.startswith(_WIDE_BOMS) or b"\0" in first_line:
        raise SourceError(f"{path} is not UTF-8 text (it looks like UTF-16 or UTF-32); convert it to UTF-8 first.")


def lines(path: Path, *, limit: int) -> Iterator[Line]:
    r"""Yield the lines of a UTF-8 file, blank ones left out.

    Only byte 0x0A ends a line; one `\r` before it is taken off, as is a byte order mark at the file's start. Of a
    line longer than `limit` bytes only the beginning is kept. Raises SourceError.
    """
    with reading(path), open_bytes(path) as stream:
        readline = stream.readline
        number = 0
        while data := readline(limit + 2):
            number += 1
            size = len(data)
            if data.endswith(b"\n"):
                data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
                size = len(data)
            elif size > limit + 1:
                size += _skip_line(stream, data[-1:])
            elif data.endswith(b"\r"):
                data = data[:-1]
                size = len(data)
            if number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
                size -= len(_BOM)
            if data and not data.isspace():
                yield Line(number, data[:limit] if size > limit else data, size)


def _skip_line(stream: BinaryIO, last: bytes) -> int:
    """Read on to the line's end and return how many bytes that adds to the line, whose `last` byte is given."""
    skipped = 0
    while piece := stream.readline(_BUFFER_BYTES):
        skipped += len(piece)
        last = (last + piece)[-2:]
        if last.endswith(b"\n"):
            return skipped - (2 if last == b"\r\n" else 1)
    return skipped
