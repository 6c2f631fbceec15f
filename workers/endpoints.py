"""The model servers: which there are, which is healthy, which gets the next request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import redis.exceptions

from app import logs
from app.broker import Client as RedisClient
from app.broker import text
from app.places import Keys
from app.queue import take_turn
from workers.clients.base import PROBE_TIMEOUT_S
from workers.endpoint import Endpoint, State
from workers.faults import Fault, FaultKind, Scope
from workers.gauges import Gauges
from workers.permits import Block, Gate, PermitDesk
from workers.watch import Watch, answers_a_trial

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_SHORTEST_TICK_S = 0.1
"""Seconds between two renewals at least, however often calls ask for one."""
_START_CEILING = 64
"""Calls that a fresh process starts at once; doubled twice a second, so that a thousand connects do not pile up."""
_TRIP_AFTER = 5
"""Faults in a row, with no success between them, after which a server counts as down."""
_PAUSE_FIRST_S, _PAUSE_MAX_S = 15.0, 300.0
"""Seconds until a server that refused everybody (401, 403, 404) is tried with one request; doubled each time."""
_RAISE_EVERY_S = 0.5
_SLOW_DOWN = 0.7
_SLOW_DOWN_EVERY_S = 2.0
_FAILING_OTHERS = 3
"""Other samples that must fail, too, before a fault counts as the server's: a run may end on a few bad samples."""
_SETTLED_S = 2.0
"""Seconds for which a server must have been down before what breaks there surely broke by that."""
_HUNG_PROBE_S = 8.0
"""Seconds for a probe of a hung server, and for the request that it must answer then: work shall go on within 10 s."""
_RECENT_S = 60.0
"""Seconds for which a success or a slow-down counts as recent."""

_TRIPS_AT_ONCE = frozenset({FaultKind.CONNECT, FaultKind.ENGINE_DEAD, FaultKind.LOADING})
REFUSES_ALL = frozenset({FaultKind.UNAUTHORIZED, FaultKind.NOT_FOUND})
"""Faults that a server meets everybody with, unless they prove to be the sample's own."""
_TRIPS_IN_A_ROW = frozenset({FaultKind.CONNECT_TIMEOUT, FaultKind.CONNECTION_LOST, FaultKind.SERVER_ERROR})


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
        self._watch = Watch(redis, keys, owner, change=self._change)
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
        elif fault.kind in REFUSES_ALL and fault.scope is Scope.ENDPOINT:
            self._change(endpoint, State.PAUSED, fault.message)
        elif fault.kind in _TRIPS_AT_ONCE:
            self._change(endpoint, State.DOWN, fault.message)
        elif fault.kind in _TRIPS_IN_A_ROW:
            endpoint.in_a_row += 1
            if endpoint.in_a_row >= _TRIP_AFTER or endpoint.half_open:
                self._change(endpoint, State.DOWN, f"{endpoint.in_a_row} failures in a row: {fault.message}")

    def is_sick(self, endpoint: Endpoint, started: float, sample_id: str) -> bool:
        """Tell whether a fault is likely not the sample's: the server is down, or others fail too and none succeeds.

        `started` is the call's start in monotonic seconds.
        """
        if endpoint.state is State.DOWN and started < endpoint.fell_at < time.monotonic() - _SETTLED_S:
            return True
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
            told = logs.fields("endpoint_changed", endpoint=endpoint.shown, state=state)
            logger.log(level, "endpoint %s is %s: %s", endpoint.shown, _SAID[state], reason, extra=told)
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
        self._watch.close()
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
        for endpoint, block, told in zip(self.all, blocks, shared, strict=True):
            endpoint.pool.renew(block)
            self._learn(endpoint, told)
            self._watch.tick(endpoint)
            if endpoint.state is not State.UP and not endpoint.looking:
                self._start_turn(endpoint)

    @staticmethod
    def _learn(endpoint: Endpoint, told: _Told) -> None:
        """Take over what other workers have found out."""
        if not told.state:
            endpoint.unpublished = True  # Redis has forgotten it
        elif not endpoint.unpublished and told.state != endpoint.state:
            logger.info("endpoint %s is %s, another worker says: %s", endpoint.shown, told.state, told.reason)
            endpoint.set_state(State(told.state), told.reason, since=told.since)
        if told.gauges is not None and told.gauges != endpoint.gauges:
            endpoint.gauges, endpoint.gauges_at = told.gauges, time.monotonic()

    def _trade(self, wishes: Sequence[tuple[str, int, int]]) -> list[Block]:
        return [
            self._desk.lease(name, in_use=in_use, wanted=wanted, bound=self._bound) for name, in_use, wanted in wishes
        ]

    def _share(self) -> list[_Told]:
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
                    pipe.hmget(self._keys.endpoint(endpoint.name), "state", "since", "reason", "gauges")
                return [_read(*fields) for fields in pipe.execute()]
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
            probe_s = max(self._probe_s, _HUNG_PROBE_S) if endpoint.hung else self._probe_s
            for_s = pause if endpoint.state is State.PAUSED else probe_s
            key = self._keys.probe(endpoint.name)
            if not await asyncio.to_thread(
                take_turn, self._redis, key, self._owner, for_s=for_s, longest_s=_PAUSE_MAX_S
            ):
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
        if 0 <= time.time() - endpoint.since < _PAUSE_FIRST_S:  # `since` may be by another machine's clock
            return
        endpoint.trials = min(endpoint.trials + 1, 16)
        endpoint.pool.ceiling, endpoint.pool.open = endpoint.pool.in_use + 1, True
        self.gate.hand_out()
        endpoint.pool.open = False

    async def _probe(self, endpoint: Endpoint) -> None:
        hung = endpoint.hung
        probe = await endpoint.client.probe(timeout_s=_HUNG_PROBE_S if hung else PROBE_TIMEOUT_S)
        if probe.alive:
            endpoint.models = probe.models or endpoint.models
            if hung and not await answers_a_trial(endpoint, timeout_s=_HUNG_PROBE_S):
                return
            if endpoint.state is State.DOWN:
                await endpoint.client.identify(again=True)  # it may have come back as another one
                self._change(endpoint, State.UP, "ok")
            endpoint.proved_at = time.monotonic() if hung else endpoint.proved_at
        elif endpoint.state is State.UP or endpoint.since == 0.0:
            endpoint.set_state(State.UP, "")  # so that the change is seen as one
            self._change(endpoint, State.PAUSED if probe.refuses else State.DOWN, probe.words)


class _Told(NamedTuple):
    """What Redis says of an endpoint."""

    state: str
    """Empty where it knows nothing."""
    since: float
    reason: str
    gauges: Gauges | None


def _read(state: bytes | None, since: bytes | None, reason: bytes | None, gauges: bytes | None) -> _Told:
    try:
        read = msgspec.json.decode(gauges, type=Gauges) if gauges else None
    except msgspec.DecodeError:
        read = None  # written by a worker of another version
    return _Told(text(state), float(since or 0), text(reason), read)


_SAID = {State.UP: "up", State.DOWN: "down", State.PAUSED: "paused, for it refuses every request"}


async def model_of(endpoint: Endpoint) -> str | None:
    """Return the model that the server lists first, asking it if need be; None where it lists none."""
    if not endpoint.models:
        probe = await endpoint.client.probe()
        endpoint.models = probe.models
    return endpoint.models[0] if endpoint.models else None
