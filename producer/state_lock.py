"""Lets one command at a time start and stop the services of a state folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

from app.errors import StoreError, UnwritableError
from app.places import StateDir

WAIT_S = 180


@contextlib.contextmanager
def held(state: StateDir, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the state folder, making it first, so that two commands never start or stop services at once.

    Raises UnwritableError when it cannot be made, StoreError when another command does not let go of it.
    """
    try:
        state.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(state.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnwritableError(
            f"The folder {state.path} cannot be written ({error.strerror}); set MILL_STATE_DIR to one that can."
        ) from error
    try:
        _lock(descriptor, state, say)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, state: StateDir, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + WAIT_S
    told = False
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not told:
            say("Waiting for another command that starts or stops services here.")
            told = True
        time.sleep(0.1)
    raise StoreError(f"Another command still starts or stops services and holds {state.lock}; wait until it has ended.")
