"""Counts failed calls by kind of fault, and tells Redis now and then instead of at every fault."""

from __future__ import annotations

import threading
from collections import Counter

import redis.exceptions

from app.queue import Queue


class FaultTally:
    """The failed calls that Redis has not been told of yet; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold: dict[str, Counter[str]] = {}

    def note(self, dataset: str, kind: str) -> None:
        """Count a failed call, whether it is followed by another or not."""
        with self._lock:
            self._untold.setdefault(dataset, Counter())[kind] += 1

    def tell(self, books: Queue) -> None:
        """Add what has come in to Redis' counts; what could not be told is kept for the next time.

        Raises RedisError.
        """
        with self._lock:
            untold, self._untold = self._untold, {}
        while untold:
            dataset, faults = untold.popitem()
            try:
                books.tally.add_faults(dataset, faults)
            except redis.exceptions.RedisError:
                untold[dataset] = faults
                with self._lock:
                    for name, kept in untold.items():
                        self._untold.setdefault(name, Counter()).update(kept)
                raise
