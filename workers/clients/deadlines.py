"""How long a call may take: a fixed time, or one worked out from its most tokens and the speed that was seen."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

from app.records import Usage
from workers.clients.fits import limits
from workers.faults import Fault, FaultKind, make_fault

AUTO: Final = "auto"
UNKNOWN_SPEED_S = 1800.0
"""Seconds for a call while too few answers were seen to tell a server's speed."""
ENOUGH_ANSWERS = 32
"""Answers that tell a server's speed."""
SHORTEST_S, LONGEST_S = 120.0, 6 * 3600.0
"""What a worked-out deadline lies between, in seconds."""
SAFETY = 3.0
"""How many times the slow answers' time is allowed."""
STREAM_DEADLINES = 12
"""How many times its deadline a stream may take as a whole."""
LATE_S = 1.0
"""A timer that comes later than this by so many seconds was kept from it by this process itself."""
_KEPT_ANSWERS = 256
_SLOW, _USUAL = 0.95, 0.5
_MOST_WIDENINGS = 8


@dataclasses.dataclass(frozen=True)
class Deadline:
    """Until when an answer, or its first token, must have come."""

    seconds: float
    """From the start of the call on."""
    why: str
    """Where it comes from, with its numbers."""


class Deadlines:
    """Sets the deadlines of one endpoint's calls."""

    def __init__(self, request_timeout_s: float | Literal["auto"]) -> None:
        """Take a fixed number of seconds, or `auto`."""
        self._fixed = None if request_timeout_s == AUTO else Deadline(request_timeout_s, "MILL_REQUEST_TIMEOUT_S")
        self._answers: deque[tuple[float, int]] = deque(maxlen=_KEPT_ANSWERS)
        """Seconds and output tokens."""
        self._speed: tuple[float, float] | None = None
        self._widenings = 0
        self._widened_at = float("-inf")
        self._since_widened = 0

    def of(self, sampling: Mapping[str, Any]) -> Deadline:
        """Return the deadline of a call with these request fields."""
        if self._fixed is not None:
            return self._fixed
        most = max(limits(sampling), default=None)  # whichever of them the server heeds
        if most is None or len(self._answers) < ENOUGH_ANSWERS:
            known = "it is not known how long the answer may be" if most is None else "too few answers were seen"
            return Deadline(UNKNOWN_SPEED_S, f"MILL_REQUEST_TIMEOUT_S=auto: {known}")
        beside_s, token_s = self._speed or self._work_out()
        factor = SAFETY * 2**self._widenings
        seconds = min(LONGEST_S, max(SHORTEST_S, factor * (beside_s + most * token_s)))
        return Deadline(
            seconds,
            f"MILL_REQUEST_TIMEOUT_S=auto: {factor:g} times ({beside_s:.3g} s and {most} tokens of {token_s:.3g} s), "
            f"by the last {len(self._answers)} answers, between {SHORTEST_S:g} and {LONGEST_S:g} s",
        )

    def answered(self, latency_s: float, usage: Usage) -> None:
        """Note an answer."""
        if self._fixed is not None or not usage.completion_tokens:
            return
        self._answers.append((latency_s, usage.completion_tokens))
        self._speed = None
        self._since_widened += 1
        if self._widenings and self._since_widened >= _KEPT_ANSWERS:
            self._widenings, self._since_widened = self._widenings - 1, 0

    def missed(self, *, started: float) -> None:
        """Note a call that the deadline ended: it allows twice as much from now on.

        `started` is the call's start in monotonic seconds. Calls from before the last such change say nothing new.
        What no answer shows, a server that has become much slower, could not be learnt otherwise.
        """
        if started > self._widened_at and self._widenings < _MOST_WIDENINGS:
            self._widened_at = time.monotonic()
            self._widenings, self._since_widened = self._widenings + 1, 0

    def _work_out(self) -> tuple[float, float]:
        """Return the seconds beside the tokens and those of one token, both of slow answers.

        The longer half of the answers tells the time of a token best.
        """
        middle = _quantile([tokens for _, tokens in self._answers], _USUAL)
        paces = [latency_s / tokens for latency_s, tokens in self._answers if tokens >= middle]
        usual_s = _quantile(paces, _USUAL)
        beside_s = _quantile([max(0.0, latency_s - usual_s * tokens) for latency_s, tokens in self._answers], _SLOW)
        self._speed = beside_s, _quantile(paces, _SLOW)
        return self._speed


class Wait:
    """How long one call is waited for: until its deadline, and, once a stream has begun, from token to token.

    An async context manager around the call; where that was not waited for any longer, it raises TimeoutError.
    """

    def __init__(self, deadline: Deadline, *, stall_s: float, on_token: Callable[[], None] | None = None) -> None:
        """Take the deadline, the longest silence of a stream in seconds, and who is told when tokens come."""
        self.started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._deadline = deadline
        self._stall_s = stall_s
        self._on_token = on_token
        self._tokens_came = False
        self._comments_came = False
        began = self._loop.time()
        self._due = self._deadline_at = began + deadline.seconds
        self._ceiling = began + STREAM_DEADLINES * deadline.seconds
        self._timer = self._loop.call_at(self._due, self._look)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def token(self) -> None:
        """Note that tokens came."""
        self._tokens_came = True
        self._wait_until(min(self._loop.time() + self._stall_s, self._ceiling))
        if self._on_token is not None:
            self._on_token()

    def comment(self) -> None:
        """Note that a comment came: before the first token it says that the request waits, and later nothing."""
        if not self._tokens_came:
            self._comments_came = True
            self._wait_until(min(self._loop.time() + self._stall_s, self._deadline_at))

    def fault(self) -> Fault:
        """Return what a call has met that was not waited for any longer."""
        stall = f"{self._stall_s:g} s (MILL_STALL_TIMEOUT_S)"
        if self._tokens_came and self._loop.time() >= self._ceiling:
            whole = f"{STREAM_DEADLINES} times its deadline of {self._deadline.seconds:.4g} s"
            return make_fault(FaultKind.TIMEOUT, f"the stream had not ended after {whole} ({self._deadline.why})")
        if self._tokens_came:
            return make_fault(FaultKind.STALLED, f"the stream stood still: no token for {stall}")
        if self._comments_came and not self.overdue:
            return make_fault(FaultKind.STALLED, f"the stream stood still: no token and no comment for {stall}")
        return make_fault(FaultKind.TIMEOUT, f"no answer within {self._deadline.seconds:.4g} s ({self._deadline.why})")

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed without a token."""
        return not self._tokens_came and self._loop.time() >= self._deadline_at

    def _wait_until(self, due: float) -> None:
        """Set the end; one that is put off costs an assignment, for the timer finds out by itself."""
        self._due = due
        if due < self._timer.when():
            self._timer.cancel()
            self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._timer.when() > LATE_S:
            # This process stood still, not the server: what has come meanwhile must be read first.
            self._due = max(self._due, now + LATE_S)
        if self._due > now:
            self._timer = self._loop.call_at(self._due, self._look)
        elif not self._limit.expired():
            self._limit.reschedule(self._due)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
