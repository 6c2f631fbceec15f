r"""Durable lines: append with fsync, mend a torn tail, stream back. Only `\n` ends a line."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from app.errors import DiskFullError, StoreError, UnwritableError

_BLOCK = 4 * 1024 * 1024
_FILE_MODE = 0o644
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_RIGHTS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
_PREVIEW_CHARS = 120


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a file."""

    offset: int
    data: bytes
    r"""The line without its `\n`."""
    whole: bool
    r"""Whether a `\n` ended it; only the last line of a file may lack one."""


@dataclasses.dataclass(frozen=True)
class Mending:
    """What was done to a tail that did not end in a newline."""

    path: Path
    offset: int
    """Where the tail began, in bytes."""
    cut: int
    """How many bytes were moved to the torn file; 0 when only the newline was missing."""
    torn: Path
    follows: str = "the sample is asked again"
    """What becomes of a line that was torn, in words."""

    def __str__(self) -> str:
        """Say it in one sentence."""
        if self.cut:
            return (
                f"The last line of {self.path} was torn: {self.cut} bytes from byte {self.offset} on were moved to "
                f"{self.torn}; {self.follows}."
            )
        return f"The last line of {self.path} (byte {self.offset}) had lost its newline; it is whole and counts."


def translate(error: OSError, path: Path) -> StoreError:
    """Return the one-sentence error for a failed file operation on `path`."""
    words = error.strerror or type(error).__name__
    if error.errno in _NO_SPACE:
        return DiskFullError(f"{path} cannot grow: {words}; free some space and the work goes on.")
    if error.errno in _NO_RIGHTS:
        return UnwritableError(f"{path} cannot be used: {words}; check the path and its rights.")
    return StoreError(f"{path} cannot be used: {words}.")


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a StoreError."""
    try:
        yield
    except OSError as error:
        raise translate(error, path) from error


def fsync_folder(folder: Path) -> None:
    """Make a new name in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appended(NamedTuple):
    """Where appended bytes begin, and the file as it was once they were written."""

    offset: int
    state: os.stat_result


def append(path: Path, data: bytes) -> Appended:
    """Append `data` to the file and fsync it; return where it begins.

    Either all of it is durable afterwards or StoreError is raised and the file has its old length again (as far as
    the disk allows; what remains is a torn tail). The caller holds the folder's lock.
    """
    with translated(path):
        new = not path.exists()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _FILE_MODE)
        try:
            start = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, data)
                # At once: whatever somebody does to the file from now on shows as a change, also during the fsync.
                state = os.fstat(descriptor)
                os.fdatasync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, start)
                raise
        finally:
            os.close(descriptor)
        if new:
            fsync_folder(path.parent)
    return Appended(start, state)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file atomically: temporary file in the same folder, fsync, rename, fsync of the folder."""
    # Containers that share a folder have equal process ids.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with translated(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the path's place when the block ends well, durably and at once, and vanishes if not.

    A link is followed, so that the file behind it is replaced; its rights stay as they were. A process that is killed
    meanwhile leaves `temporary_of(path)` behind, which the next one begins anew. The caller holds the folder's lock.
    """
    real, temporary = Path(os.path.realpath(path)), temporary_of(path)
    with prepared(path) as file:
        yield file
    with translated(path):
        try:
            temporary.replace(real)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_folder(real.parent)


@contextlib.contextmanager
def prepared(path: Path) -> Iterator[BinaryIO]:
    """Yield `temporary_of(path)`, a new file with the rights of the old one, durable when the block ends well.

    It vanishes if not.
    """
    real, temporary = Path(os.path.realpath(path)), temporary_of(path)
    with translated(path):
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), stat.S_IMODE(real.stat().st_mode) if real.exists() else _FILE_MODE)
                yield file
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def temporary_of(path: Path) -> Path:
    """Return the file that `prepared` and `replacing` write, beside the one that is to be replaced."""
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.tmp")


def read_lines(path: Path, start: int = 0) -> Iterator[Line]:
    r"""Yield the lines from byte `start` on, splitting on `\n` alone; nothing if the file does not exist."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return
    except OSError as error:
        raise translate(error, path) from error
    with file, translated(path):
        file.seek(start)
        offset, pieces = start, list[bytes]()
        while block := file.read(_BLOCK):
            begin = 0
            while (end := block.find(b"\n", begin)) >= 0:
                pieces.append(block[begin:end])
                data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                yield Line(offset, data, whole=True)
                offset += len(data) + 1
                pieces.clear()
                begin = end + 1
            if begin < len(block):
                pieces.append(block[begin:])
        if pieces:
            yield Line(offset, b"".join(pieces), whole=False)


def read_span(path: Path, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset` on (fewer at the file's end)."""
    with translated(path), path.open("rb", buffering=0) as file:
        file.seek(offset)
        pieces = []
        while length > 0 and (piece := file.read(length)):
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)


def mend_tail(
    path: Path, torn: Path, tail: Line, *, is_record: Callable[[bytes], bool], follows: str = Mending.follows
) -> Mending:
    r"""Give an unended last line its `\n` if it is a whole record, else move its bytes to the torn file.

    NULs that a crashed node left behind a whole record are dropped. `follows` are the words for what becomes of a torn
    line. The caller holds the folder's lock.
    """
    kept = tail.data.rstrip(b"\0")
    if is_record(kept):
        with translated(path), path.open("r+b") as file:
            file.truncate(tail.offset + len(kept))
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
        return Mending(path, tail.offset, 0, torn, follows)
    append(torn, encode_cut(path, tail.offset, tail.data))
    with translated(path), path.open("r+b") as file:
        file.truncate(tail.offset)
        os.fsync(file.fileno())
    return Mending(path, tail.offset, len(tail.data), torn, follows)


def encode_cut(path: Path, offset: int, data: bytes, **more: str) -> bytes:
    """Return the line that keeps bytes which were cut out of a file, with their place; `more` are further fields."""
    only_nul = not data.strip(b"\0")
    entry = {
        "file": path.name,
        "offset": offset,
        "length": len(data),
        "at": time.time(),
        **more,
        "start": data[:_PREVIEW_CHARS].decode("utf-8", "replace"),
        # A run of NULs can be as long as the disk; its length says all.
        "base64": None if only_nul else base64.b64encode(data).decode("ascii"),
    }
    return msgspec.json.encode(entry) + b"\n"
