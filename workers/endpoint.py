"""One model server as a worker process sees it: its health, its permits, and the calls that run there."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections import deque

from app.places import endpoint_name, public_url
from app.snapshot import HUNG
from workers.clients.base import Answer, CallFailed, Client, Request
from workers.faults import FaultKind, make_fault
from workers.gauges import Gauges
from workers.permits import Pool

_RETURN_CEILING = 4
"""Calls that a server which has just come back is sent at once; doubled twice a second."""
_TOKEN_EVERY_S = 1.0
_KEPT_LATENCIES = 256
"""Answers from whose latencies the usual one is worked out."""


class State(enum.StrEnum):
    """An endpoint's health, shared by all workers."""

    UP = "up"
    DOWN = "down"
    """Not reachable, hung, or its engine is dead; looked at every few seconds by one worker."""
    PAUSED = "paused"
    """It refuses everybody (key, model name); tried with one request now and then."""


@dataclasses.dataclass(eq=False)
class Call:
    """A request that is under way."""

    started: float
    """Monotonic seconds."""
    limit: asyncio.Timeout = dataclasses.field(default_factory=lambda: asyncio.timeout(None))
    lost: str | None = None
    """Why no answer is waited for any more."""

    def give_up(self, why: str) -> None:
        """End the call with the fault `lost`: the server has forgotten it."""
        self.lost = why
        self.limit.reschedule(asyncio.get_running_loop().time())


@dataclasses.dataclass
class Endpoint:
    """One model server; used in the loop only."""

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
    newest_answered: float = 0.0
    """Monotonic seconds at which the call began that is the latest to have brought a completion."""
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
    calls: set[Call] = dataclasses.field(default_factory=set)
    """The requests that are under way."""
    latencies: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=_KEPT_LATENCIES))
    """Seconds that its last answers took."""
    asked_model: str | None = None
    """The model that it was asked for last."""
    heard_at: float = 0.0
    """Monotonic seconds of its last answer of any kind to a call, or of its return."""
    fell_at: float = 0.0
    back_at: float = 0.0
    """Monotonic seconds of the last change from up and of the last one to up."""
    proved_at: float = 0.0
    """Monotonic seconds at which it last answered a request that began after its return."""
    hung_at: float = 0.0
    """Monotonic seconds at which it was last found hung."""
    old_answer_at: float = 0.0
    """Monotonic seconds of its last answer to a call that began before that."""
    lost: int = 0
    """Calls that it has lost since this worker's start."""
    gauges: Gauges | None = None
    """What it last said of its load, whichever worker read it; None where it says nothing."""
    gauges_at: float = 0.0
    """Monotonic seconds at which this worker came to know the gauges."""
    gauges_are_wrong: bool = False
    """Whether it called itself idle while it worked on a call of ours: several servers behind one address do."""

    @property
    def shown(self) -> str:
        """The URL without credentials."""
        return public_url(self.url)

    @property
    def name(self) -> str:
        """A short name without credentials."""
        return endpoint_name(self.url)

    @property
    def hung(self) -> bool:
        """Whether it is down because it answers nothing: then it has to answer a request before it counts as up."""
        return self.state is State.DOWN and self.reason.startswith(HUNG)

    @property
    def latency_s(self) -> float | None:
        """The mean latency of its last answers in seconds; None before the first."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else None

    def silence_s(self, now: float) -> float:
        """Return for how many seconds calls have waited with no answer to any of them; `now` is monotonic."""
        oldest = min((call.started for call in self.calls), default=now)
        return now - max(oldest, self.heard_at)

    def set_state(self, state: State, reason: str, *, since: float | None = None) -> None:
        """Change the state; the pool opens or closes with it."""
        if state is not self.state:
            self.since = time.time() if since is None else since
            if State.UP in {state, self.state}:
                self._note_change(state, hung=reason.startswith(HUNG))
        self.state, self.reason = state, reason
        self.pool.open = state is State.UP

    def _note_change(self, state: State, *, hung: bool) -> None:
        now = time.monotonic()
        if state is State.UP:
            self.pool.ceiling = _RETURN_CEILING
            self.half_open, self.trials = True, 0
            self.back_at = self.heard_at = now
        else:
            self.fell_at = now
            self.hung_at = now if hung else self.hung_at

    async def complete(self, request: Request) -> Answer:
        """Ask once (see Client.complete), so that the call can be given up while it waits.

        Raises CallFailed, with the fault `lost` for a call that was given up.
        """
        call = Call(time.monotonic())
        self.asked_model = request.model
        self.calls.add(call)
        try:
            async with call.limit:
                answer = await self.client.complete(
                    dataclasses.replace(request, on_token=lambda: self._hear_token(call))
                )
        except TimeoutError as error:
            if call.lost is None:
                raise
            raise CallFailed(make_fault(FaultKind.LOST, call.lost)) from error
        except CallFailed as failure:
            if failure.fault.status is not None:
                self.hear(call)
            raise
        finally:
            self.calls.discard(call)
        self.hear(call)
        self.newest_answered = max(self.newest_answered, call.started)
        self.latencies.append(answer.latency_s)
        return answer

    def _hear_token(self, call: Call) -> None:
        """Note that a stream goes on, about once a second: the server is not silent."""
        if time.monotonic() - self.heard_at >= _TOKEN_EVERY_S:
            self.hear(call)

    def hear(self, call: Call) -> None:
        """Note an answer, whatever it says."""
        now = time.monotonic()
        self.heard_at = now
        if call.started >= self.back_at:
            self.proved_at = now
        if call.started < self.hung_at:
            self.old_answer_at = now
        if self.gauges is not None and self.gauges.contradict(now - self.gauges_at, call_s=now - call.started):
            self.gauges_are_wrong = True
