"""One look for all viewers: read in a thread, kept for a moment, never twice at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable

FRESH_S = 1.5
"""Seconds for which a look is shown as it is."""
REST = 4.0
"""Times as long as a look took, at least, until the next one: large folders do not keep a core busy."""
USABLE_S = 10.0
"""Seconds for which it is still shown while the next one is under way."""
GRACE_S = 0.3
"""Seconds that a viewer waits for the next one before the old one is shown."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a look has found."""

    body: bytes
    """JSON."""
    seen_at: float
    """Monotonic seconds."""

    @property
    def age_s(self) -> float:
        """Seconds since it was read."""
        return time.monotonic() - self.seen_at


class SharedLook:
    """Answers any number of viewers out of one look; for one event loop."""

    def __init__(
        self,
        read: Callable[[], bytes],
        executor: concurrent.futures.Executor,
        *,
        fresh_s: float = FRESH_S,
        usable_s: float = USABLE_S,
        rest: float = REST,
    ) -> None:
        """`read` runs in the executor; what it raises reaches whoever waits for that look.

        A look is fresh for `fresh_s` seconds, or for as long as it took and `rest` times that again.
        """
        self._read = read
        self._executor = executor
        self._fresh_s = fresh_s
        self._usable_s = usable_s
        self._rest = rest
        self._seen: Seen | None = None
        self._took_s = 0.0
        self._running: asyncio.Future[Seen] | None = None

    async def get(self) -> Seen:
        """Return a fresh look; one that is a little older where the next one takes long; else wait for that."""
        seen = self._seen
        if seen is not None and seen.age_s < max(self._fresh_s, (self._rest + 1) * self._took_s):
            return seen
        if self._running is None:
            self._running = asyncio.ensure_future(self._look())
            # A look that nobody waits for reports its error to the next viewer, who looks again.
            self._running.add_done_callback(lambda done: done.cancelled() or done.exception())
        running = self._running
        if seen is not None and seen.age_s < self._usable_s:
            done, _waiting = await asyncio.wait({running}, timeout=GRACE_S)
            if not done:
                return seen
        return await asyncio.shield(running)

    async def _look(self) -> Seen:
        try:
            seen_at = time.monotonic()
            body = await asyncio.get_running_loop().run_in_executor(self._executor, self._read)
            self._seen = Seen(body, seen_at)
            self._took_s = self._seen.age_s
            return self._seen
        finally:
            self._running = None
