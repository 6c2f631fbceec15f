"""Watches servers that are up: hung ones are found without waiting for a timeout, and calls that they lost given up."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import redis.exceptions

from app.broker import Client as RedisClient
from app.errors import MillError
from app.places import Keys
from app.queue import take_turn
from app.snapshot import HUNG
from workers.clients.base import CallFailed, Request
from workers.endpoint import Call, Endpoint, State
from workers.gauges import Gauges, parse

logger = logging.getLogger(__name__)

_SHORTEST_PATIENCE_S = 20.0
"""Seconds without any answer before a server is looked at: long prompts and cold caches take some, a look is cheap."""
_USUAL_TIMES = 4.0
"""The same, as a multiple of the longest latency seen lately, so that a server with slow answers is left in peace."""
_LOOK_EVERY_S = 60.0
"""Seconds between two looks at a silent server, over all workers."""
_LOOKS = 2
"""Looks that must time out in a row."""
_LOOK_TIMEOUT_S = 15.0
"""Seconds for one look; SGLang's /health generates a token, and gives up by itself after 20."""
_TRIAL_AFTER = 2.0
"""Patiences after which a server that passes its looks has to answer a request for one token."""
_SHORTEST_TRIAL_S = 120.0
"""Seconds of silence before that at least: the first answers of a run may take long, and no latency is known yet."""
_TRIAL_S = 30.0
"""Seconds for that request."""
_MOVED_WITHIN_S = 60.0
"""Seconds for which a server that was seen to generate counts as one that does."""
_GAUGES_EVERY_S = 10.0
"""Seconds between two readings of /metrics, over all workers."""
_METRICS_TIMEOUT_S = 5.0
_NO_METRICS_S = 600.0
"""Seconds for which a server without such a page is not asked for it again."""
_TRY_EVERY_S = 5.0
"""Seconds after which a worker tries again whether a duty's turn is its own."""
_FRESH_S = 25.0
"""Seconds for which a reading says something of the present."""
_LOST_AFTER_S = 30.0
"""Seconds for which a server must call itself idle, and a call have waited, before the call is lost."""
_UNKNOWN_GRACE_S = 600.0
"""Seconds for a server that hung to answer what it was asked before, where no latency is known."""


class Watch:
    """One worker's watch over its endpoints; used in the loop only. Duties are shared over turns in Redis."""

    def __init__(
        self, redis: RedisClient, keys: Keys, owner: str, *, change: Callable[[Endpoint, State, str], None]
    ) -> None:
        """Take what tells everybody of a change of state."""
        self._redis = redis
        self._keys = keys
        self._owner = owner
        self._change = change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, float] = {}
        """Monotonic seconds before which this worker does not ask for a turn again."""
        self._moved: dict[str, tuple[float, float]] = {}
        """Per endpoint: the progress it last told, and when that last grew, in monotonic seconds."""

    def tick(self, endpoint: Endpoint) -> None:
        """Do what is due at one endpoint; called about once a second."""
        if endpoint.state is not State.UP:
            return
        now = time.monotonic()
        self._note_progress(endpoint)
        self._give_up_lost(endpoint, now)
        if endpoint.silence_s(now) >= patience_s(endpoint):
            self._start(f"look.{endpoint.name}", self._look, endpoint)
        self._start(f"gauges.{endpoint.name}", self._read_gauges, endpoint)

    def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks.values():
            task.cancel()

    def _start(self, duty: str, do: Callable[[str, Endpoint], Coroutine[Any, Any, None]], endpoint: Endpoint) -> None:
        now = time.monotonic()
        if duty not in self._tasks and now >= self._next.get(duty, 0.0):
            self._next[duty] = now + _TRY_EVERY_S
            task = asyncio.get_running_loop().create_task(self._do(do(duty, endpoint)))
            self._tasks[duty] = task
            task.add_done_callback(lambda _task: self._tasks.pop(duty, None))

    async def _do(self, duty: Coroutine[Any, Any, None]) -> None:
        try:
            await duty
        except redis.exceptions.RedisError:
            return  # whose turn it is cannot be told
        except Exception:
            # The watch goes on, as the work does.
            logger.exception("watching a model server failed; the next turn tries again")

    async def _take_turn(self, duty: str, for_s: float, *, longest_s: float | None = None) -> bool:
        key = self._keys.turn(duty)
        return await asyncio.to_thread(take_turn, self._redis, key, self._owner, for_s=for_s, longest_s=longest_s)

    # Hung

    async def _look(self, duty: str, endpoint: Endpoint) -> None:
        """Look at a silent server: close it if it is not well, or well in appearance only."""
        if not await self._take_turn(duty, _LOOK_EVERY_S):
            return
        began = time.monotonic()
        for _ in range(_LOOKS):
            probe = await endpoint.client.probe(timeout_s=_LOOK_TIMEOUT_S)
            if not probe.timed_out:
                break
        silence_s = endpoint.silence_s(time.monotonic())
        if not _is_silent(endpoint, since=began):
            return
        if probe.timed_out:
            words = f"no answer to anything for {silence_s:.0f} s, nor to {_LOOKS} looks of {_LOOK_TIMEOUT_S:g} s"
            self._change(endpoint, State.DOWN, HUNG + words)
        elif not probe.alive:
            self._change(endpoint, State.PAUSED if probe.refuses else State.DOWN, probe.words)
        elif silence_s >= _trial_after_s(endpoint) and not self._moves(endpoint):
            await self._try(endpoint, began)

    async def _try(self, endpoint: Endpoint, began: float) -> None:
        if await answers_a_trial(endpoint, timeout_s=_TRIAL_S):
            endpoint.proved_at = time.monotonic()
        elif _is_silent(endpoint, since=began):
            silence_s = endpoint.silence_s(time.monotonic())
            words = (
                f"it passes its health check, but has answered no request for {silence_s:.0f} s, nor one for a token"
            )
            self._change(endpoint, State.DOWN, HUNG + words)

    def _note_progress(self, endpoint: Endpoint) -> None:
        if endpoint.gauges is not None and (progress := endpoint.gauges.progress) is not None:
            known, moved_at = self._moved.get(endpoint.name, (progress, 0.0))
            self._moved[endpoint.name] = (progress, moved_at if progress == known else time.monotonic())

    def _moves(self, endpoint: Endpoint) -> bool:
        """Tell whether the server is seen to generate, for whomever."""
        _progress, moved_at = self._moved.get(endpoint.name, (0.0, 0.0))
        return bool(moved_at) and time.monotonic() - moved_at < _MOVED_WITHIN_S

    # Lost requests

    async def _read_gauges(self, duty: str, endpoint: Endpoint) -> None:
        if not await self._take_turn(duty, _GAUGES_EVERY_S, longest_s=_NO_METRICS_S):
            return
        page = await endpoint.client.read_metrics(timeout_s=_METRICS_TIMEOUT_S)
        if page is None:
            return
        reading = parse(page, at=time.time())
        if reading is None:
            await asyncio.to_thread(self._redis.set, self._keys.turn(duty), self._owner, px=int(_NO_METRICS_S * 1000))
            return
        told = msgspec.json.encode(reading.after(endpoint.gauges)).decode()
        await asyncio.to_thread(self._redis.hset, self._keys.endpoint(endpoint.name), "gauges", told)

    def _give_up_lost(self, endpoint: Endpoint, now: float) -> None:
        """End the calls that no answer will come to; each is asked again at once."""
        lost, why = _forgotten(endpoint, now)
        if not lost:
            lost, why = _outlived(endpoint, now)
        for call in lost:
            call.give_up(why)
        if lost:
            endpoint.lost += len(lost)
            logger.warning(
                "endpoint %s lost %d of %d requests (%s); they are asked again and use up no attempt (%d lost so far)",
                endpoint.shown,
                len(lost),
                len(endpoint.calls),
                why,
                endpoint.lost,
            )


def patience_s(endpoint: Endpoint) -> float:
    """Return the seconds for which a server may answer nothing before it is looked at."""
    return max(_SHORTEST_PATIENCE_S, _USUAL_TIMES * max(endpoint.latencies, default=0.0))


def _trial_after_s(endpoint: Endpoint) -> float:
    return max(_SHORTEST_TRIAL_S, _TRIAL_AFTER * patience_s(endpoint))


async def answers_a_trial(endpoint: Endpoint, *, timeout_s: float) -> bool:
    """Ask a server for one token, beyond the bound; tell whether it answers at all, be it with an error."""
    request = Request(
        messages=[{"role": "user", "content": "Hi"}],
        model=endpoint.asked_model or next(iter(endpoint.models), "default"),
        sampling={"max_tokens": 1},
        request_id=f"trial-{uuid.uuid4().hex[:12]}",
        want_token_ids=False,
    )
    try:
        async with asyncio.timeout(timeout_s):
            await endpoint.client.complete(request)
    except TimeoutError:
        return False
    except CallFailed as failure:
        return failure.fault.status is not None
    except MillError:
        return True  # this worker can ask it nothing, as it is set up; whoever asks for a dataset hears why
    return True


def _is_silent(endpoint: Endpoint, *, since: float) -> bool:
    """Tell whether the server is still thought to be up and has answered no call since."""
    return endpoint.state is State.UP and endpoint.heard_at < since and bool(endpoint.calls)


def _gauges_now(endpoint: Endpoint, now: float) -> Gauges | None:
    """Return the server's load if it is known and can be believed."""
    fresh = now - endpoint.gauges_at <= _FRESH_S
    gauges = endpoint.gauges if fresh and not endpoint.gauges_are_wrong else None
    return gauges if gauges is not None and gauges.peak > 0 else None


def _waiting(endpoint: Endpoint) -> list[Call]:
    return [call for call in endpoint.calls if call.lost is None]


def _forgotten(endpoint: Endpoint, now: float) -> tuple[list[Call], str]:
    """Return the calls that have waited long while the server works on nothing."""
    gauges = _gauges_now(endpoint, now)
    if gauges is None or gauges.idle_s < _LOST_AFTER_S:
        return [], ""
    lost = [call for call in _waiting(endpoint) if now - call.started >= _LOST_AFTER_S]
    return lost, f"its /metrics shows no request at all for {gauges.idle_s:.0f} s while they wait"


def _outlived(endpoint: Endpoint, now: float) -> tuple[list[Call], str]:
    """Return the calls from before a hang of which the server, long back and answering others, says nothing."""
    back_at, gauges = endpoint.back_at, _gauges_now(endpoint, now)
    if not endpoint.hung_at or endpoint.hung_at > back_at or endpoint.proved_at < back_at:
        return [], ""
    waiting = _waiting(endpoint)
    if gauges is not None and gauges.busy >= len(waiting):
        return [], ""  # it has them all
    grace_s = patience_s(endpoint) if endpoint.latencies else _UNKNOWN_GRACE_S
    if now - max(back_at, endpoint.old_answer_at) < grace_s:
        return [], ""
    lost = [call for call in waiting if call.started < endpoint.hung_at]
    return lost, f"it hung, is back for {now - back_at:.0f} s and answers others"
