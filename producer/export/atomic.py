"""An output file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from app import jsonl
from app.errors import StoreError, UsageError

_FILE_MODE = 0o644


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError if the path is taken and may not be replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give --output the name of a file.")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another --output, or replace it with --overwrite.")


@contextlib.contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file that takes the path's place when the block ends well, and vanishes when it does not.

    It is written beside the path as `.<name>.tmp` under a lock, fsynced and renamed. A killed process leaves that
    temporary file, which the next writer of the same path empties and uses. Missing folders are made.
    Raises UsageError if the path is taken, StoreError if it cannot be written or another process is writing it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with jsonl.translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(_claim(temporary, path), "wb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                refuse_existing(path, overwrite=overwrite)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        jsonl.fsync_folder(path.parent)


def _claim(temporary: Path, path: Path) -> int:
    """Open the temporary file, empty and locked against other processes; return its descriptor."""
    while True:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock, its last owner may have renamed or removed it: that file is not ours to empty.
            if _is_at(temporary, descriptor):
                os.ftruncate(descriptor, 0)
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                message = f"Another export is writing {path}; wait for it, or choose another --output."
                raise StoreError(message) from error
            raise
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
