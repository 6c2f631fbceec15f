"""The global bound on requests in flight: permits leased from Redis in blocks and handed on inside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import resources
from typing import cast

from app.broker import Client
from app.places import Keys

PERMIT_TTL_S = 15.0
"""Seconds for which a block of permits is leased; a dead worker's block comes free after it."""
_SAFETY_S = 2.0
"""A block counts as lost this much before Redis lets it expire."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The permits that a worker holds of one endpoint."""

    held: int
    bound: int
    """The endpoint's bound over all workers."""
    others: int
    """What other workers hold."""
    share: int | None = dataclasses.field(default=None, compare=False)
    """How many of the held ones may be handed on to new calls; None is all."""


class PermitDesk:
    """Leases blocks of permits from Redis (permits.lua)."""

    def __init__(self, client: Client, keys: Keys, owner: str) -> None:
        self._keys = keys
        self._owner = owner
        script = resources.files("workers").joinpath("permits.lua").read_text(encoding="utf-8")
        self._lease = client.register_script(script)

    def lease(self, endpoint: str, *, in_use: int, wanted: int, bound: int) -> Block:
        """Renew this worker's block of one endpoint, growing or shrinking it towards what is wanted and fair.

        `bound` is this worker's own; one that a person has set in Redis goes before it.
        """
        args: list[str | int] = [self._owner, in_use, wanted, bound, int(PERMIT_TTL_S * 1000)]
        keys = [self._keys.permits(endpoint), self._keys.bound]
        return Block(*cast("list[int]", self._lease(keys=keys, args=args)))


class Pool:
    """The permits of one endpoint inside this process; used in the loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held = 0
        self._counted: int | None = None
        self._asked_at = 0.0
        """By the clock, when what is in use was last counted: no later than the lease began."""
        self._valid_until = 0.0
        self.in_use = 0
        self.open = False
        """Whether the endpoint may be asked at all."""
        self.ceiling = 1 << 30
        """A lower bound of our own: ramping up after a start, slowing down when the server is busy."""
        self.bound = 0

    def count(self) -> int:
        """Return what is in use, to be told to Redis now.

        Until `renew` or `keep` no more is used, for the answer may be a smaller block.
        """
        self._counted, self._asked_at = self.in_use, self._clock()
        return self._counted

    def keep(self) -> None:
        """Go on with the block as it was: it could not be renewed."""
        self._counted = None

    def renew(self, block: Block) -> None:
        """Take over a block that was asked for with the last `count`, however late the answer comes."""
        self._held, self.bound = block.held if block.share is None else block.share, block.bound
        self._counted = None
        self._valid_until = self._asked_at + PERMIT_TTL_S - _SAFETY_S

    @property
    def held(self) -> int:
        """Permits that may be in use now; none once the lease has run out."""
        return self._held if self._clock() < self._valid_until else 0

    @property
    def free(self) -> int:
        """Calls that may start now."""
        most = min(self.held, self.ceiling if self._counted is None else min(self.ceiling, self._counted))
        return max(0, most - self.in_use) if self.open else 0


class Gate:
    """Hands permits of several endpoints to waiting calls, first come first served; used in the loop only."""

    def __init__(self, pools: Sequence[Pool], *, on_wait: Callable[[], None]) -> None:
        self._pools = pools
        self._waiters: deque[asyncio.Future[Pool]] = deque()
        self._on_wait = on_wait
        self._turned_away = False
        self.shut: str | None = None
        """Why no new call may start (the disk is full), if so."""

    @property
    def waiting(self) -> int:
        """Calls that wait for a permit."""
        return len(self._waiters)

    async def acquire(self, avoid: Pool | None = None) -> Pool:
        """Return the pool of the endpoint to ask, its permit taken; prefer another than `avoid`.

        Raises CancelledError once calls are turned away.
        """
        if self._turned_away:
            raise asyncio.CancelledError
        if not self._waiters and (pool := self._choose(avoid)) is not None:
            pool.in_use += 1
            return pool
        waiter: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._on_wait()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            else:
                with contextlib.suppress(ValueError):  # a permit that came free has passed over it already
                    self._waiters.remove(waiter)
            raise

    def release(self, pool: Pool) -> None:
        """Give a permit back; the next waiting call starts at once."""
        pool.in_use -= 1
        self.hand_out()

    def hand_out(self) -> None:
        """Wake as many waiting calls as may start now."""
        while self._waiters and (pool := self._choose(None)) is not None:
            waiter = self._waiters.popleft()
            if not waiter.done():
                pool.in_use += 1
                waiter.set_result(pool)

    def turn_away(self) -> None:
        """Cancel every waiting call, and every one that comes."""
        self._turned_away = True
        for waiter in self._waiters:
            waiter.cancel()

    def _choose(self, avoid: Pool | None) -> Pool | None:
        """Return the pool with the smallest share of its permits in use."""
        if self.shut is not None:
            return None
        ready = [pool for pool in self._pools if pool.free > 0]
        preferred = [pool for pool in ready if pool is not avoid] or ready
        return min(preferred, key=lambda pool: pool.in_use / max(1, pool.held), default=None)
