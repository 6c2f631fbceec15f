"""Tells whether a call ended because its model server died: then the sample that was asked may have killed it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time

from workers.clients.base import Probe
from workers.endpoint import Endpoint
from workers.faults import Fault, FaultKind

_MAY_BE_DEATHS = frozenset({FaultKind.CONNECTION_LOST, FaultKind.ENGINE_DEAD})
_LOOK_S = 5.0
"""Seconds after which a server that lets a look wait counts as alive: it is busy or hung, and there."""


class Finding(enum.StrEnum):
    """What became of the server of a call that failed."""

    ALIVE = "alive"
    """It is there, or nothing speaks against it."""
    GONE = "gone"
    """It was dead before the call began."""
    DIED = "died"
    """It died while it worked on the call."""


@dataclasses.dataclass(frozen=True)
class _Death:
    """A server's end, as this process saw it."""

    at: float
    """Monotonic seconds at which the first call heard of it."""
    back_at: float
    """When the server had come back before: tells one death from the next."""


class Inquest:
    """Looks at servers that broke a call off, once for all calls that end together; used in the loop only."""

    def __init__(self) -> None:
        self._looks: dict[str, asyncio.Task[Probe]] = {}
        self._deaths: dict[str, _Death] = {}

    async def look_into(self, endpoint: Endpoint, fault: Fault, *, started: float, back_at: float) -> Finding:
        """Return what became of the server of a failed call.

        `started` is the call's start, `back_at` what the endpoint said of its last return then; monotonic seconds. A
        call that began after others had heard of the same death found the server dead and has no part in it.
        """
        if fault.kind not in _MAY_BE_DEATHS:
            return Finding.ALIVE
        ended = time.monotonic()
        if not _is_gone(await self._look(endpoint)):
            return Finding.ALIVE
        death = self._deaths.get(endpoint.name)
        if death is None or death.back_at != back_at:
            death = self._deaths[endpoint.name] = _Death(ended, back_at)
        return Finding.DIED if started <= death.at else Finding.GONE

    async def _look(self, endpoint: Endpoint) -> Probe:
        look = self._looks.get(endpoint.name)
        if look is None:
            look = asyncio.get_running_loop().create_task(endpoint.client.probe(timeout_s=_LOOK_S))
            self._looks[endpoint.name] = look
            look.add_done_callback(lambda _done: self._looks.pop(endpoint.name, None))
        return await asyncio.shield(look)


def _is_gone(probe: Probe) -> bool:
    return not (probe.alive or probe.refuses or probe.timed_out)
