"""Output files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from app import jsonl
from app.errors import StoreError, UsageError

_FILE_MODE = 0o644


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError if the path is taken and may not be replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give --output the name of a file.")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists already; choose another --output, or replace it with --overwrite.")


class PendingFile:
    """A file that is written as `.<name>.tmp`, under a lock, until it takes its own name or vanishes.

    A killed process leaves the temporary file, which the next writer of the same name empties and uses.
    """

    def __init__(self, temporary: Path, file: BinaryIO) -> None:
        self.temporary = temporary
        self.file = file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Begin the file that will be `path`; missing folders are made.

        Raises StoreError if it cannot be written or another process is writing it.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        with jsonl.translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(temporary, os.fdopen(_claim(temporary, path), "wb"))

    def sync(self) -> int:
        """Make what was written durable; return its length in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def rename(self, path: Path) -> None:
        """Take the name; the lock is held until then."""
        self.temporary.replace(path)
        self.file.close()

    def discard(self) -> None:
        """Vanish."""
        self.temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what a full disk keeps in its buffer is not wanted any more
            self.file.close()


@contextlib.contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file that takes the path's place when the block ends well, and vanishes when it does not.

    Raises UsageError if the path is taken, StoreError if it cannot be written or another process is writing it.
    """
    pending = PendingFile.open(path)
    with jsonl.translated(path):
        try:
            yield pending.file
            pending.sync()
            refuse_existing(path, overwrite=overwrite)
            pending.rename(path)
        except BaseException:
            pending.discard()
            raise
        jsonl.fsync_folder(path.parent)


def sweep(folder: Path, pattern: str) -> None:
    """Remove temporary files that killed exports left; those that a living process writes stay."""
    for temporary in folder.glob(pattern):
        with contextlib.suppress(OSError):  # somebody else may be quicker, or own it
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(temporary, descriptor):
                    temporary.unlink()
            finally:
                os.close(descriptor)


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
