"""The speed of a model server that many requests share: each gets the same part of it, up to what one can use.

This is egalitarian processor sharing with a bound for each: with n answers under way, each of them grows by
min(each, total / n) tokens a second. It is kept exactly, by one clock that counts the tokens that an answer has gained
which was there all the time: an answer of L tokens that begins at V on that clock ends at V + L.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
from collections.abc import Callable

_SAME_S = 1e-9
"""Moments that are no further apart are one."""


@dataclasses.dataclass(eq=False)
class Answer:
    """An answer that is being generated."""

    ends_at: float
    """On the clock of tokens."""
    done: Callable[[], None]
    speed: SharedSpeed
    over: bool = False

    def cancel(self) -> None:
        """Give up the rest of it."""
        self.speed.give_up(self)


class SharedSpeed:
    """Runs in the server's loop; `each` and `total` are tokens a second, `clock` tells seconds."""

    def __init__(self, each: float, total: float, *, clock: Callable[[], float]) -> None:
        self.each = each
        self.total = total
        self._clock = clock
        self._answers: list[tuple[float, int, Answer]] = []
        self._numbers = itertools.count()
        self._count = 0
        self._complete: list[Answer] = []
        self._gained = 0.0
        self._generated = 0.0
        self._at = clock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def generated(self) -> float:
        """The tokens of all answers up to now, of unfinished ones too."""
        self._advance()
        return self._generated

    def begin(self, tokens: float, done: Callable[[], None]) -> Answer:
        """Generate an answer and call `done` when it is complete."""
        self._advance()
        answer = Answer(self._gained + tokens, done, self)
        self._count += 1
        heapq.heappush(self._answers, (answer.ends_at, next(self._numbers), answer))
        self._set_timer()
        return answer

    def give_up(self, answer: Answer) -> None:
        """Generate no more of an answer; `done` is not called, unless it is complete already."""
        self._advance()
        if not answer.over:
            answer.over = True
            self._count -= 1
        self._set_timer()

    def finish_due(self) -> None:
        """Tell of every answer that is complete by now."""
        self._advance()
        complete, self._complete = self._complete, []
        self._set_timer()
        for answer in complete:
            answer.done()

    def seconds_to_next(self) -> float | None:
        """Return when the next answer is complete if none begins before; None where there is none."""
        if self._complete:
            return 0.0
        while self._answers and self._answers[0][2].over:
            heapq.heappop(self._answers)
        return max(0.0, self._answers[0][0] - self._gained) / self._speed() if self._answers else None

    def _speed(self) -> float:
        return min(self.each, self.total / max(1, self._count))

    def _advance(self) -> None:
        """Let the time pass up to now; an answer that ended meanwhile took no speed from the others since."""
        now, complete = self._clock(), self._complete
        self._complete = []
        while (wait_s := self.seconds_to_next()) is not None and self._at + wait_s <= now + _SAME_S:
            self._pass(wait_s)
            answer = heapq.heappop(self._answers)[2]
            answer.over = True
            self._count -= 1
            complete.append(answer)
        self._pass(now - self._at)
        self._complete = complete

    def _pass(self, seconds: float) -> None:
        gained = seconds * self._speed() if self._count else 0.0
        self._gained += gained
        self._generated += gained * self._count
        self._at += seconds

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self.seconds_to_next()
        self._timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, self.finish_due)
