"""How connections are opened: few at once, each with its time, and kept alive by the system."""

from __future__ import annotations

import asyncio
import contextvars
import socket
from collections.abc import Callable
from typing import Any

MAX_CONNECTING = 32
"""Connections that are opened at once, less than any server's queue of them holds; the others wait for their turn and
have not begun to connect."""

STALE_WINDOW_S = 2.0
"""A reused connection that breaks later than this after the request was sent was not stale: the server broke."""

ON_NEW_CONNECTION = contextvars.ContextVar("on_new_connection", default=False)
"""Whether requests go over connections of their own, whatever idle ones there are."""

_CONNECT_TICKS, _STALE_TICKS = 20, 8
"""Parts in which a time is counted."""

# A silent call of half an hour must survive NAT gateways, which forget idle connections after two to six minutes.
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8))


class Patience:
    """A timer for what a server does, counted in ticks, each begun after the one before was noticed.

    While this process's own loop stands still, which is no fault of the server, it passes by one tick at most.
    """

    def __init__(self, seconds: float, ticks: int, ended: Callable[[], None]) -> None:
        """Start it; `ended` is called at its end."""
        self._tick_s = seconds / ticks
        self._left = ticks
        self._ended = ended
        self._next: asyncio.TimerHandle
        self._run_tick()

    def cancel(self) -> None:
        """Give it up."""
        self._next.cancel()

    def _run_tick(self) -> None:
        if not self._left:
            self._ended()
            return
        self._left -= 1
        self._next = asyncio.get_running_loop().call_later(self._tick_s, self._run_tick)


class Passage:
    """One request's way to its connection; `limit` is around the request, and ends it where that takes too long."""

    def __init__(self, turns: asyncio.Semaphore, timeout_s: float) -> None:
        """Take what bounds the connections that are opened at once, and the seconds for this one."""
        self.may_be_stale = False
        """Whether the connection has served another request before, and was used again only just now."""
        self.limit = asyncio.timeout(None)
        self._turns = turns
        self._timeout_s = timeout_s
        self._patience: Patience | None = None
        self._holds_turn = False

    async def connect(self) -> None:
        """Wait for the turn to open a connection; its time begins after that."""
        await self._turns.acquire()
        self._holds_turn = True
        self._patience = Patience(self._timeout_s, _CONNECT_TICKS, self._give_up)

    def connected(self) -> None:
        """Note that the connection is open."""
        self.end()
        if not self.limit.expired():
            self.limit.reschedule(None)

    def reused(self) -> None:
        """Note that the connection is one that has served another request."""
        self.may_be_stale = True
        self._patience = Patience(STALE_WINDOW_S, _STALE_TICKS, self._grow_old)

    def end(self) -> None:
        """Give the turn back, if there is one, and stop the clock."""
        if self._patience is not None:
            self._patience.cancel()
        if self._holds_turn:
            self._holds_turn = False
            self._turns.release()

    def _give_up(self) -> None:
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def _grow_old(self) -> None:
        self.may_be_stale = False


def make_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for an address as `getaddrinfo` gives it."""
    family, kind, protocol, *_rest = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
