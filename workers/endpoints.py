"""The model servers: which there are, which is healthy, which gets the next request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import random
import time
from collections.abc import Sequence

import redis.exceptions

from app.broker import Client as RedisClient
from app.broker import text
from app.places import Keys, endpoint_name, public_url
from workers.clients.base import Client
from workers.faults import Fault, FaultKind, Scope
from workers.permits import Block, Gate, PermitDesk, Pool

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_SHORTEST_TICK_S = 0.1
"""Seconds between two renewals at least, however often calls ask for one."""
_START_CEILING = 64
"""Calls that a fresh process starts at once; doubled twice a second, so that a thousand connects do not pile up."""
_RETURN_CEILING = 4
"""The same for a server that has just come back."""
_TRIP_AFTER = 5
"""Faults in a row, with no success between them, after which a server counts as down."""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 15.0, 300.0
"""Seconds until a server that refused everybody (401, 403, 404) is tried with one request; doubled each time."""
_RAISE_EVERY_S = 0.5
_SLOW_DOWN = 0.7
_SLOW_DOWN_EVERY_S = 2.0
_FAILING_OTHERS = 3
"""Other samples that must fail, too, before a fault counts as the server's: a run may end on a few bad samples."""
_RECENT_S = 60.0
"""Seconds for which a success or a slow-down counts as recent."""

_TRIPS_AT_ONCE = frozenset({FaultKind.CONNECT, FaultKind.ENGINE_DEAD, FaultKind.LOADING})
_REFUSES_ALL = frozenset({FaultKind.UNAUTHORIZED, FaultKind.NOT_FOUND})
_TRIPS_IN_A_ROW = frozenset({FaultKind.CONNECT_TIMEOUT, FaultKind.CONNECTION_LOST, FaultKind.SERVER_ERROR})


class State(enum.StrEnum):
    """An endpoint's health, shared by all workers."""

    UP = "up"
    DOWN = "down"
    """Not reachable or its engine is dead; looked at every few seconds by one worker."""
    PAUSED = "paused"
    """It refuses everybody (key, model name); tried with one request now and then."""


@dataclasses.dataclass
class Endpoint:
    """One model server as this process sees it; used in the loop only."""

    url: str
    client: Client
    pool: Pool = dataclasses.field(default_factory=Pool)
    state: State = State.DOWN
    since: float = 0.0
    """Unix seconds of the last change of state."""
    reason: str = "not looked at yet"
    models: tuple[str, ...] = ()
    in_a_row: int = 0
    """Faults since the last success."""
    failing: set[str] = dataclasses.field(default_factory=set)
    """Samples that have failed since the last success."""
    last_success: float = 0.0
    """Monotonic seconds."""
    half_open: bool = False
    """Whether it has not answered since it came back: the first fault closes it again."""
    trials: int = 0
    """Single requests that a paused server was tried with."""
    slowed_at: float = 0.0
    raised_at: float = 0.0
    looking: bool = False
    """Whether a probe is under way."""
    unpublished: bool = False
    """Whether the state has changed here since Redis was told."""

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        return public_url(self.url)

    @property
    def name(self) -> str:
        """A short name without credentials."""
        return endpoint_name(self.url)

    def set_state(self, state: State, reason: str, *, since: float | None = None) -> None:
        """Change the state; the pool opens or closes with it."""
        if state is not self.state:
            self.since = time.time() if since is None else since
        if state is State.UP and self.state is not State.UP:
            self.pool.ceiling = _RETURN_CEILING
            self.half_open, self.trials = True, 0
        self.state, self.reason = state, reason
        self.pool.open = state is State.UP


class Endpoints:
    """All endpoints of this process, their shared breaker and their permits."""

    def __init__(
        self, endpoints: Sequence[Endpoint], *, redis: RedisClient, keys: Keys, owner: str, bound: int, probe_s: float
    ) -> None:
        self.all = list(endpoints)
        self._by_pool = {id(endpoint.pool): endpoint for endpoint in self.all}
        self._redis = redis
        self._keys = keys
        self._owner = owner
        self._bound = bound
        self._probe_s = probe_s
        self._desk = PermitDesk(redis, keys, owner)
        self._nudged = asyncio.Event()
        self._turned_away = asyncio.Event()
        self._probes = set[asyncio.Task[None]]()
        self._reported = 0
        self.gate = Gate([endpoint.pool for endpoint in self.all], on_wait=self._on_wait)

    # Taking and giving back

    async def acquire(self, avoid: Endpoint | None = None) -> Endpoint:
        """Wait for a permit of a healthy endpoint."""
        pool = await self.gate.acquire(avoid.pool if avoid and len(self.all) > 1 else None)
        return self._by_pool[id(pool)]

    def release(self, endpoint: Endpoint) -> None:
        """Give the permit back; the next waiting call starts at once."""
        self.gate.release(endpoint.pool)

    def succeeded(self, endpoint: Endpoint) -> None:
        """Note an answer."""
        endpoint.in_a_row, endpoint.half_open = 0, False
        endpoint.failing.clear()
        endpoint.last_success = time.monotonic()
        if endpoint.state is not State.UP:
            self._change(endpoint, State.UP, "ok")

    def failed(self, endpoint: Endpoint, fault: Fault, sample_id: str) -> None:
        """Note a failed call: trip the breaker, pause the endpoint, or slow down."""
        endpoint.failing.add(sample_id)
        if fault.scope is Scope.LOAD:
            self._slow_down(endpoint)
        elif fault.kind in _REFUSES_ALL:
            self._change(endpoint, State.PAUSED, fault.message)
        elif fault.kind in _TRIPS_AT_ONCE:
            self._change(endpoint, State.DOWN, fault.message)
        elif fault.kind in _TRIPS_IN_A_ROW:
            endpoint.in_a_row += 1
            if endpoint.in_a_row >= _TRIP_AFTER or endpoint.half_open:
                self._change(endpoint, State.DOWN, f"{endpoint.in_a_row} failures in a row: {fault.message}")

    def is_sick(self, endpoint: Endpoint, started: float, sample_id: str) -> bool:
        """Tell whether a fault is likely not the sample's: others fail too, and nothing has succeeded since or lately.

        `started` is the call's start in monotonic seconds.
        """
        others_fail = len(endpoint.failing - {sample_id}) >= _FAILING_OTHERS
        return others_fail and endpoint.last_success < max(started, time.monotonic() - _RECENT_S)

    async def pause(self, seconds: float) -> None:
        """Wait before a retry; raises CancelledError when the worker ends meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._turned_away.wait()
            raise asyncio.CancelledError

    def turn_away(self) -> None:
        """Cancel every call that has not begun: the worker ends."""
        self._turned_away.set()
        self.gate.turn_away()

    def shut(self, why: str | None) -> None:
        """Start no new call while `why` says so; None opens again."""
        self.gate.shut = why
        self.gate.hand_out()

    def _slow_down(self, endpoint: Endpoint) -> None:
        now = time.monotonic()
        if now - endpoint.slowed_at >= _SLOW_DOWN_EVERY_S:
            endpoint.slowed_at = now
            endpoint.pool.ceiling = max(1, int(min(endpoint.pool.ceiling, endpoint.pool.in_use) * _SLOW_DOWN))

    def _change(self, endpoint: Endpoint, state: State, reason: str) -> None:
        if endpoint.state is state and state is not State.PAUSED:
            return
        if endpoint.state is not state:
            level = logging.WARNING if state is not State.UP else logging.INFO
            logger.log(level, "endpoint %s is %s: %s", endpoint.shown, _SAID[state], reason)
        endpoint.set_state(state, reason)
        endpoint.unpublished = True
        self._nudged.set()
        self.gate.hand_out()

    # Keeping house

    async def look_at_all(self) -> None:
        """Probe every endpoint once, at the start."""
        await asyncio.gather(*(self._probe(endpoint) for endpoint in self.all))
        for endpoint in self.all:
            endpoint.pool.ceiling, endpoint.half_open = _START_CEILING, False
        self._nudged.set()

    async def keep(self) -> None:
        """Renew permits, share health and probe: once a second, sooner when more calls wait; until cancelled."""
        while True:
            # Not wait_for, which forgets in Python 3.11 that it was cancelled when the event comes at the same time.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._nudged.wait()
            self._nudged.clear()
            try:
                await self._exchange()
                self._raise_ceilings()
                self.gate.hand_out()
            except Exception:
                # Without renewals the permits would run out and this worker ask nothing for ever.
                logger.exception("permits and health could not be exchanged; the next turn tries again")
            await asyncio.sleep(_SHORTEST_TICK_S)

    def _on_wait(self) -> None:
        if self.gate.waiting + sum(endpoint.pool.in_use for endpoint in self.all) > self._reported:
            self._nudged.set()

    async def give_back(self) -> None:
        """Return all permits that are not in use (at the end: all)."""
        with contextlib.suppress(redis.exceptions.RedisError):
            await asyncio.to_thread(self._trade, [(endpoint.name, endpoint.pool.in_use, 0) for endpoint in self.all])

    async def close(self) -> None:
        """Close every client's connections."""
        for task in self._probes:
            task.cancel()
        for endpoint in self.all:
            await endpoint.client.close()

    async def _exchange(self) -> None:
        waiting = self.gate.waiting if self.gate.shut is None else 0
        wishes = []
        for endpoint in self.all:
            # A closed endpoint may be tried with one request.
            more = waiting if endpoint.pool.open else min(waiting, 1)
            in_use = endpoint.pool.count()
            wishes.append((endpoint.name, in_use, in_use + more))
        self._reported = waiting + sum(endpoint.pool.in_use for endpoint in self.all)
        try:
            blocks, shared = await asyncio.to_thread(lambda: (self._trade(wishes), self._share()))
        except redis.exceptions.RedisError:
            for endpoint in self.all:
                endpoint.pool.keep()
            return  # running requests go on, on the permits that are leased; the keeper says that Redis is away
        for endpoint, block, (state, since, reason) in zip(self.all, blocks, shared, strict=True):
            endpoint.pool.renew(block)
            if not state:
                endpoint.unpublished = True  # Redis has forgotten it
            if not endpoint.unpublished and state and state != endpoint.state:
                endpoint.set_state(State(state), reason, since=since)
            if endpoint.state is not State.UP and not endpoint.looking:
                self._start_turn(endpoint)

    def _trade(self, wishes: Sequence[tuple[str, int, int]]) -> list[Block]:
        return [
            self._desk.lease(name, in_use=in_use, wanted=wanted, bound=self._bound) for name, in_use, wanted in wishes
        ]

    def _share(self) -> list[tuple[str, float, str]]:
        """Tell Redis of changes made here; return what it says of each endpoint."""
        changed = [endpoint for endpoint in self.all if endpoint.unpublished]
        for endpoint in changed:
            endpoint.unpublished = False  # before it is read, so that a change meanwhile is told the next time
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for endpoint in changed:
                    key, since = self._keys.endpoint(endpoint.name), repr(endpoint.since)
                    pipe.hset(key, items=["url", endpoint.shown, "state", endpoint.state.value, "since", since])
                    pipe.hset(key, "reason", endpoint.reason)
                    pipe.sadd(self._keys.endpoints, endpoint.name)
                pipe.execute()
                for endpoint in self.all:
                    pipe.hmget(self._keys.endpoint(endpoint.name), "state", "since", "reason")
                return [(text(state), float(since or 0), text(reason)) for state, since, reason in pipe.execute()]
        except redis.exceptions.RedisError:
            for endpoint in changed:
                endpoint.unpublished = True
            raise

    def _raise_ceilings(self) -> None:
        now = time.monotonic()
        for endpoint in self.all:
            pool = endpoint.pool
            if self.gate.waiting and endpoint.state is State.UP and pool.in_use >= pool.ceiling:
                self._nudged.set()
                if now - endpoint.raised_at >= _RAISE_EVERY_S:
                    endpoint.raised_at = now
                    recently_slowed = now - endpoint.slowed_at < _RECENT_S
                    pool.ceiling += max(1, pool.ceiling // 10) if recently_slowed else pool.ceiling

    # Probing

    def _start_turn(self, endpoint: Endpoint) -> None:
        endpoint.looking = True
        task = asyncio.get_running_loop().create_task(self._take_turn(endpoint))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _take_turn(self, endpoint: Endpoint) -> None:
        """Probe an endpoint that is down, or try a paused one, if the turn falls to this worker."""
        try:
            pause = min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2**endpoint.trials)
            for_s = pause if endpoint.state is State.PAUSED else self._probe_s
            key = self._keys.probe(endpoint.name)
            mine = await asyncio.to_thread(self._redis.set, key, self._owner, nx=True, px=int(for_s * 1000))
            if not mine:
                return
            await asyncio.sleep(random.random() * 0.1 * self._probe_s)  # noqa: S311 jitter
            if endpoint.state is State.PAUSED:
                self._try_once(endpoint)
            else:
                await self._probe(endpoint)
        except redis.exceptions.RedisError:
            return  # whose turn it is cannot be told
        finally:
            endpoint.looking = False

    def _try_once(self, endpoint: Endpoint) -> None:
        """Let one request through to an endpoint that refuses everybody: the only way to see whether it still does."""
        if time.time() - endpoint.since < _PAUSE_FIRST_S:
            return
        endpoint.trials = min(endpoint.trials + 1, 16)
        endpoint.pool.ceiling, endpoint.pool.open = endpoint.pool.in_use + 1, True
        self.gate.hand_out()
        endpoint.pool.open = False

    async def _probe(self, endpoint: Endpoint) -> None:
        probe = await endpoint.client.probe()
        if probe.alive:
            endpoint.models = probe.models or endpoint.models
            if endpoint.state is State.DOWN:
                self._change(endpoint, State.UP, "ok")
        elif endpoint.state is State.UP or endpoint.since == 0.0:
            endpoint.set_state(State.UP, "")  # so that the change is seen as one
            self._change(endpoint, State.PAUSED if probe.refuses else State.DOWN, probe.words)


_SAID = {State.UP: "up", State.DOWN: "down", State.PAUSED: "paused, for it refuses every request"}


async def model_of(endpoint: Endpoint) -> str | None:
    """Return the model that the server lists first, asking it if need be; None where it lists none."""
    if not endpoint.models:
        probe = await endpoint.client.probe()
        endpoint.models = probe.models
    return endpoint.models[0] if endpoint.models else None
