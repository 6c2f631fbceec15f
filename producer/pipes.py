"""What to do once the reader of our output has gone."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO


def silence(stream: TextIO) -> None:
    """Point a closed pipe at nothing, so that the interpreter's last flush does not complain."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
