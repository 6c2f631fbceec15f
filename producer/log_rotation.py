"""Keeps the logs of background processes small: a full one is set aside, and the process goes on in a new one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

LIMIT_BYTES = 16 * 1024 * 1024
"""Size from which a log is set aside."""
KEPT = 3
"""Logs set aside: name.log.1 is the newest of them."""
LOOK_S = 5.0
"""Seconds between two looks at a log's size."""


def set_aside(log: Path) -> None:
    """Make `name.log` `name.log.1`, and so on; the oldest goes. Raises OSError."""
    for number in range(KEPT - 1, 0, -1):
        older = _aside(log, number)
        if older.exists():
            older.replace(_aside(log, number + 1))
    if log.exists():
        log.replace(_aside(log, 1))


def set_aside_if_full(log: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
    """Do so if it has reached the limit; a log that is not there is not full. Raises OSError."""
    if log.exists() and log.stat().st_size >= limit_bytes:
        set_aside(log)


def _aside(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def keep_own_output_small(*, limit_bytes: int = LIMIT_BYTES, look_s: float = LOOK_S) -> None:
    """Rotate the file that standard output and error go to, for as long as this process lives.

    Both are turned to a new file under the same name, below whatever writes to them: no line is lost or cut, nothing
    needs a pipe, and no other process need live. Where output goes to no file, nothing is done.
    """
    log = _output_file()
    if log is not None:
        keeper = threading.Thread(target=_keep, args=(log, limit_bytes, look_s), name="log-rotation", daemon=True)
        keeper.start()


def _output_file() -> Path | None:
    """Return the file that both standard output and error go to, if there is one."""
    out, error = os.fstat(1), os.fstat(2)
    if not stat.S_ISREG(out.st_mode) or (out.st_dev, out.st_ino) != (error.st_dev, error.st_ino):
        return None
    path = Path("/proc/self/fd/1").readlink()
    return path if path.exists() else None


def _keep(log: Path, limit_bytes: int, look_s: float) -> None:
    never = threading.Event()
    while not never.wait(look_s):
        try:
            if os.fstat(1).st_size >= limit_bytes:
                set_aside(log)
                _turn_output_to(log)
        except OSError:  # a full disk, a folder that is gone: the old file serves on
            continue


def _turn_output_to(log: Path) -> None:
    # It gets its name when nothing goes to the old one any more, so that whoever follows can tell when that is read.
    beside = log.with_name(f"{log.name}.new")
    fresh = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.dup2(fresh, 1)
        os.dup2(fresh, 2)
    finally:
        os.close(fresh)
    beside.replace(log)
