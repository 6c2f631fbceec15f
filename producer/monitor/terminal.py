"""A terminal while something live is on it: single keys, signals that end it in order, its modes given back."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

TICK_S = 0.2
"""Seconds between two looks at the keyboard and at the terminal's size."""


@contextlib.contextmanager
def stops_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the view in order, so that the cursor comes back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def single_keys(keys: TextIO) -> Iterator[Callable[[], str]]:
    """Yield a function that waits a tick for one key; the terminal is as before afterwards."""
    if not keys.isatty():
        yield _no_key
        return
    import termios  # noqa: PLC0415 - a terminal alone has it
    import tty  # noqa: PLC0415

    descriptor = keys.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], TICK_S)
        data = os.read(descriptor, 64) if ready else b""
        if ready and not data:
            raise KeyboardInterrupt  # the terminal is gone
        return data.decode("ascii", "replace")[:1]

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key() -> str:
    time.sleep(TICK_S)
    return ""
