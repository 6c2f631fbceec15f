"""Shows what the background services wrote to their logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from app.errors import UsageError
from app.places import StateDir
from producer import processes

_LOOK_S = 0.2
_LOOKS_FOR_NEW = 10
"""Looks after which services that were started meanwhile are looked for."""


def log_files(state: StateDir, name: str | None = None) -> dict[str, Path]:
    """Return the logs by service name: all, or those whose name begins with `name`.

    Raises UsageError when there is none.
    """
    logs, chosen = _find(state, None), _find(state, name)
    if not logs:
        raise UsageError(f"There are no logs in {state.logs}: nothing was started here; `producer up` does it.")
    if not chosen:
        raise UsageError(f"No service here is called {name!r}; there are logs of {', '.join(logs)}.")
    return chosen


def _find(state: StateDir, name: str | None) -> dict[str, Path]:
    return {path.stem: path for path in sorted(state.logs.glob("*.log")) if path.stem.startswith(name or "")}


def logs(
    state: StateDir, name: str | None = None, *, follow: bool = False, lines: int = 20
) -> Iterator[tuple[str, str]]:
    """Yield (service, line): the last lines of each log, then, if asked to, each new line for ever.

    What is followed goes on through rotations, and services that are started meanwhile join in.
    Raises UsageError when no log fits the name.
    """
    files = log_files(state, name)
    sizes = {service: processes.log_size(path) for service, path in files.items()}
    for service, path in files.items():
        for line in processes.tail(path, lines):
            yield service, line
    if follow:
        yield from _follow(state, name, sizes)


def _follow(state: StateDir, name: str | None, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
    with contextlib.ExitStack() as stack:
        followed: dict[str, _Follower] = {}
        looks = 0
        while True:
            if looks % _LOOKS_FOR_NEW == 0:
                for service, path in _find(state, name).items():
                    if service not in followed:
                        followed[service] = stack.enter_context(_Follower(path, sizes.get(service, 0)))
            for service, follower in followed.items():
                for line in follower.fresh_lines():
                    yield service, line
            looks += 1
            time.sleep(_LOOK_S)


class _Follower(contextlib.AbstractContextManager["_Follower"]):
    """A log that is read as it grows, by what its name means at any moment."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open(offset)

    def __exit__(self, *_error: object) -> None:
        self._close()

    def fresh_lines(self) -> list[str]:
        """Return the whole lines that came in since the last call."""
        if self._is_cut():
            self._rest = b""
            self._close()
            self._open(0)
        replaced = self._is_replaced()
        data = self._read()  # after that look: nothing is written to a log once its successor is there to be seen
        if replaced:
            self._close()
            self._open(0)
            data += self._read()
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def _open(self, offset: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._file = self._path.open("rb")
            self._file.seek(offset if offset <= os.fstat(self._file.fileno()).st_size else 0)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> bytes:
        return self._file.read() if self._file is not None else b""

    def _is_replaced(self) -> bool:
        """Tell whether the name now means another file."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False  # it is about to come back
        if self._file is None:
            return True
        mine = os.fstat(self._file.fileno())
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def _is_cut(self) -> bool:
        return self._file is not None and os.fstat(self._file.fileno()).st_size < self._file.tell()
