"""The lock of a dataset folder: writers take turns, and whoever waits for long can say for whom."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import functools
import logging
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from app import jsonl
from app.errors import StoreError

logger = logging.getLogger(__name__)

LOCK_PATIENCE_S = 10.0
"""Seconds after which a folder whose lock nobody lets go counts, for a worker, as one that takes no records."""
LOOK_PATIENCE_S = 5.0
"""Seconds that looks and presses of a button wait for a folder's lock, which a repair may hold for long."""
_TELL_AFTER_S = 5.0
"""Writers hold the lock for milliseconds, a rebuild of the index for seconds."""
_POLLS = ((1.0, 0.002), (10.0, 0.01), (math.inf, 0.05))
"""Seconds waited so far, and seconds until the next try; a wait in the kernel could be neither told nor ended."""
_HOLDER_BYTES = 160
"""What is written of a holder is padded to this, so that it never needs room on the disk again."""


class LockedError(StoreError):
    """Somebody else holds a folder's lock for longer than the caller waits."""


class _Holder(msgspec.Struct):
    """Who holds a lock, as the lock file says it."""

    pid: int
    host: str
    since: float
    """Unix seconds, by the holder's clock."""


_decode_holder = msgspec.json.Decoder(_Holder).decode


class FolderLock:
    """A flock on a file, which names its holder for those who wait."""

    def __init__(self, path: Path, *, patience_s: float | None = None) -> None:
        """Without `patience_s` it is waited for as long as it takes; long waits are logged."""
        self._path = path
        self._patience_s = patience_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises LockedError when patience ends, StoreError when the file cannot be used.
        """
        with jsonl.translated(self._path):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with jsonl.translated(self._path):
                self._acquire(descriptor)
                _sign(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> None:
        if _try(descriptor):
            return
        began, told = time.monotonic(), False
        while not _try(descriptor):
            waited = time.monotonic() - began
            if self._patience_s is not None and waited >= self._patience_s:
                raise LockedError(f"{self._path} is locked by {holder(self._path)}; end that process if it hangs.")
            if waited >= _TELL_AFTER_S and not told and self._patience_s is None:
                told = True
                logger.warning("%s is locked by %s; waiting for it", self._path, holder(self._path))
            time.sleep(next(pause for until, pause in _POLLS if waited < until))


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _host() -> str:
    return platform.node()


def _sign(descriptor: int) -> None:
    """Write down who holds the lock; a disk that takes no more bytes does not matter."""
    words = msgspec.json.encode(_Holder(os.getpid(), _host()[:100], round(time.time(), 3)))
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, words.ljust(_HOLDER_BYTES - 1) + b"\n", 0)


def holder(path: Path) -> str:
    """Return who holds the lock, by the kernel where it knows and by the file where it does not."""
    try:
        said = _decode_holder(path.read_bytes().strip())
    except (OSError, msgspec.DecodeError):
        said = None
    pid = _flock_owner(path)
    if said is None or (pid and said.host == _host() and said.pid != pid):
        return f"process {pid}" if pid else "another process"
    since = dt.datetime.fromtimestamp(said.since, dt.UTC).astimezone()
    return f"process {said.pid} on {said.host} since {since:%Y-%m-%d %H:%M:%S}"


def _flock_owner(path: Path) -> int | None:
    """Return the process that holds a flock on the file, as far as /proc/locks shows it."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 08:01:131074 0 EOF
        words = line.split()
        if len(words) == 8 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            return int(words[4]) if int(words[4]) > 0 else None
    return None
