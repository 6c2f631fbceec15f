"""Damage to the end of a file of records, as a worker that dies in a write or a machine without power leaves it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.chaos.plan import Fault, Step


@contextlib.contextmanager
def as_writer(folder: Path) -> Iterator[None]:
    """Hold a dataset folder's lock as a worker does that is about to die in a write.

    Raises BlockingIOError when somebody else holds it.
    """
    with (folder / ".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _tear(path: Path, step: Step) -> str:
    line = path.read_bytes().split(b"\n")[-2].replace(b'"id":"', b'"id":"torn-')
    return _append(path, line[: 1 + int(step.dice * (len(line) - 2))])


def _nul(path: Path, step: Step) -> str:
    return _append(path, bytes(1 + int(step.dice * 9000)))


def _append(path: Path, data: bytes) -> str:
    with path.open("ab") as file, contextlib.suppress(OSError):  # a full disk takes what it takes
        file.write(data)
        file.flush()
    return f"{len(data)} bytes at the end"


def _cut(path: Path, _step: Step) -> str:
    data = path.read_bytes()
    last = len(data) - data.rstrip(b"\n").rfind(b"\n")
    os.truncate(path, len(data) - last // 2)
    return f"{last // 2} bytes less"


def _unend(path: Path, _step: Step) -> str:
    os.truncate(path, path.stat().st_size - 1)
    return "no newline at the end"


TAILS: Mapping[Fault, Callable[[Path, Step], str]] = {
    Fault.TEAR_TAIL: _tear,
    Fault.NUL_TAIL: _nul,
    Fault.CUT_TAIL: _cut,
    Fault.UNEND_TAIL: _unend,
}
"""What does each damage to a file, and says so in words."""
