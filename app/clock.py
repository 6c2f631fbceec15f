"""Redis' clock, read from here: the one time that workers of several machines can compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

_FRESH_S = 10.0
"""Seconds after which Redis is asked again."""
_PATIENCE_S = 1.0
"""A reply that takes longer says too little about the time."""
_STEP_S = 2.0
"""A difference from which Redis' clock was set, and does not merely drift."""


class TimeTeller(Protocol):
    """A Redis client, as far as the time goes."""

    def time(self) -> Any:
        """Return seconds and microseconds."""


class RedisClock:
    """Unix seconds by Redis' clock, for any thread.

    It is asked seldom; between two answers this process's monotonic clock counts, which nobody can set. Until Redis
    has answered once the machine's own clock must do.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._offset: float | None = None
        """Redis' time minus monotonic time."""
        self._asked_at = 0.0
        self._stepped_at: float | None = None

    def now(self) -> float:
        """Return the time without asking Redis."""
        offset = self._offset
        return time.time() if offset is None else self._monotonic() + offset

    def read(self, client: TimeTeller) -> float:
        """Return the time, asking Redis if its last answer is older than ten seconds.

        Raises what the client raises.
        """
        if self._offset is None or self._monotonic() - self._asked_at > _FRESH_S:
            self.ask(client)
        return self.now()

    def ask(self, client: TimeTeller) -> None:
        """Ask Redis for its time and keep it, unless the answer came late.

        Raises what the client raises.
        """
        before = self._monotonic()
        seconds, microseconds = cast("tuple[int, int]", client.time())
        after = self._monotonic()
        offset = float(seconds) + float(microseconds) / 1e6 - (before + after) / 2
        with self._lock:
            if self._offset is not None:
                if after - before > _PATIENCE_S:
                    return
                if abs(offset - self._offset) > _STEP_S:
                    self._stepped_at = after
            self._offset, self._asked_at = offset, after

    def stepped_within(self, seconds: float) -> bool:
        """Tell whether Redis' clock was seen to jump in the last so many seconds."""
        return self._stepped_at is not None and self._monotonic() - self._stepped_at < seconds
