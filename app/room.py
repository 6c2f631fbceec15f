"""How much more may be put into Redis, so that memory is left for the workers that empty it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from app.queue import Queue
from app.records import Sample

FULL = 0.8
"""The part of maxmemory above which nothing is added: workers must write to take and to record."""
_LOOK_EVERY_S = 1.0
_GROWTH = 1.25
"""Bytes that a byte of payload takes in Redis, at most: its allocator rounds up."""
_BESIDE_BYTES = 2048
"""What a sample takes in Redis beside its payload: the ticket, ids and table entries, generously."""


class Room:
    """Tells how many samples fit now; memory is looked at once a second and reckoned in between."""

    def __init__(self, books: Queue, *, max_pending: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._books = books
        self._max_pending = max_pending
        self._clock = clock
        self._left = math.inf
        """Bytes below the mark, reckoned since the last look."""
        self._look_at = -math.inf

    def fit(self, samples: Sequence[Sample]) -> tuple[int, str]:
        """Return how many of the first samples fit now and, where none does, why.

        An empty queue always takes one: nobody will make room, so it is for Redis to say that it is full.
        """
        depth = self._books.depth()
        if depth >= self._max_pending:
            return 0, f"{depth:,} prompts wait in Redis (MILL_MAX_PENDING)"
        count = self._fit_memory(samples[: self._max_pending - depth])
        if not count and depth:
            return 0, f"Redis holds {depth:,} prompts and uses {FULL:.0%} of its memory (maxmemory)"
        return max(1, count), ""

    def _fit_memory(self, samples: Sequence[Sample]) -> int:
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + _LOOK_EVERY_S
            memory = self._books.client.info("memory")
            used, most = int(memory["used_memory"]), int(memory.get("maxmemory", 0))
            # Unbounded, or quite full: then nobody can make room, and Redis itself says so.
            self._left = FULL * most - used if used < most else math.inf
        if self._left == math.inf:
            return len(samples)
        for count, sample in enumerate(samples):
            need = len(msgspec.json.encode(sample)) * _GROWTH + _BESIDE_BYTES
            if need > self._left:
                return count
            self._left -= need
        return len(samples)
