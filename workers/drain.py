"""What SIGTERM means: take nothing new, let running requests finish for MILL_DRAIN_S, hand the rest back at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from celery.apps.worker import install_worker_term_handler

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class Drain:
    """Turns stop signals into a deadline; a second signal brings it forward to now."""

    def __init__(
        self, drain_s: float, *, hand_back: Callable[[], int], turn_away: Callable[[], None] = lambda: None
    ) -> None:
        """`turn_away` hands back what has not been asked yet, `hand_back` everything; it returns how many."""
        self._drain_s = drain_s
        self._turn_away = turn_away
        self._hand_back = hand_back
        self._signals = 0
        self._thread = threading.Thread(target=self._watch, name="mill-drain", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Start watching for the signal."""
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether a signal has come."""
        return self._signals > 0

    def signalled(self, sig: str = "SIGTERM", **_signal: object) -> None:
        """Note a signal; called inside the signal handler, so it only counts (a lock could be held already)."""
        self._signals += 2 if sig == "SIGQUIT" else 1

    def end(self) -> None:
        """Stop watching: everything has finished."""
        self._ended.set()

    def _watch(self) -> None:
        while not self.stopping:
            if self._ended.wait(_POLL_S):
                return
        logger.info(
            "stopping: no new samples; running requests have %.0f s to finish, a second signal hands them back now",
            self._drain_s,
        )
        self._turn_away()
        deadline = time.monotonic() + self._drain_s
        while self._signals < 2 and time.monotonic() < deadline:
            if self._ended.wait(_POLL_S):
                return
        while not self._ended.wait(_POLL_S):
            if handed_back := self._hand_back():
                logger.info("handed %d unfinished samples back to the queue", handed_back)


def take_over_signals(worker: Any) -> None:
    """Let Ctrl-C and SIGQUIT do what SIGTERM does: Celery's own second Ctrl-C kills jobs, which no thread pool can."""
    for name in ("SIGINT", "SIGQUIT"):
        install_worker_term_handler(worker, sig=name)
