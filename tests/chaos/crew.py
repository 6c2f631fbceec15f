"""The workers of a chaos run: each has a seat, and another one takes the seat when it is empty."""

from __future__ import annotations

import dataclasses
import enum
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.mill import Mill
from tests.support.processes import WORKER_READY, WorkerProcess

DRAIN_S = 2.0
_LEAVES_WITHIN_S = 45.0
"""Seconds after SIGTERM within which a worker must be gone, whatever else is broken."""
_RETRY_S = 1.5
"""Seconds until a worker that refused to start (no Redis, no disk) is followed by the next."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a worker process holds."""

    uptime_s: float
    rss_mib: float
    files: int


class _State(enum.Enum):
    EMPTY = 0
    TAKEN = 1
    LEAVING = 2
    """Its worker was asked to leave."""


class Seat:
    """One worker's place; a worker that ends is followed by another under a new name."""

    def __init__(self, number: int, mill: Mill, *, slots: int) -> None:
        self.number = number
        self.paused = False
        self.refusals = 0
        """Starts that ended before the worker was ready."""
        self.starts = 0
        self._mill = mill
        self._slots = slots
        self._process: WorkerProcess | None = None
        self._state = _State.EMPTY
        self._held = False
        """Whether the seat stays empty until `refill`."""
        self._not_before = self._leave_by = self._started_at = 0.0
        """Monotonic seconds."""

    @property
    def node(self) -> str:
        """The name of the worker in the seat."""
        return f"w{self.number}-{self.starts}"

    @property
    def process(self) -> WorkerProcess:
        """The worker; raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"the seat {self.number} was never taken")
        return self._process

    @property
    def steady(self) -> bool:
        """Whether a worker is there that neither sleeps nor leaves."""
        return self._state is _State.TAKEN and not self.paused and self.process.running

    @property
    def ready(self) -> bool:
        """Whether the worker came as far as taking work."""
        return WORKER_READY in self.process.output()

    def pause(self) -> None:
        """Freeze the worker."""
        self.process.pause()
        self.paused = True

    def resume(self) -> None:
        """Let a frozen worker go on."""
        if self.paused:
            self.process.resume()
        self.paused = False

    def kill(self) -> None:
        """Kill the worker; the seat stays empty until `refill`."""
        self.process.close()
        self.paused, self._held, self._state = False, True, _State.EMPTY

    def dismiss(self, *signals: signal.Signals) -> None:
        """Ask the worker to leave, frozen or not; the seat stays empty until `refill`."""
        first, *more = signals
        self.process.send_signal(first)
        self.resume()
        for number in more:
            self.process.send_signal(number)
        self._leave_by, self._held, self._state = time.monotonic() + _LEAVES_WITHIN_S, True, _State.LEAVING

    def refill(self) -> None:
        """Let another worker take the seat as soon as it is empty."""
        self._held = False

    def tend(self) -> str | None:
        """Fill the seat if it is empty; return a sentence when a worker ended, or stayed, against the rules."""
        now, sentence = time.monotonic(), None
        if self._state is not _State.EMPTY:
            if self.process.running:
                return self._overdue(now)
            sentence = self._farewell(now)
        if not self._held and now >= self._not_before:
            self._start(now)
        return sentence

    def figures(self) -> Figures | None:
        """Return what the worker holds now; None when it has ended."""
        process = Path(f"/proc/{self.process.pid}")
        try:
            pages = int(process.joinpath("statm").read_text(encoding="ascii").split()[1])
            files = len(list(process.joinpath("fd").iterdir()))
        except (OSError, IndexError):
            return None
        return Figures(time.monotonic() - self._started_at, pages / 256, files)

    def _overdue(self, now: float) -> str | None:
        if self._state is not _State.LEAVING or self.paused or now < self._leave_by:
            return None
        tail = self.process.tail()
        self.kill()
        self.refill()
        return f"worker {self.node} did not end within {_LEAVES_WITHIN_S:.0f} s of SIGTERM: {tail}"

    def _farewell(self, now: float) -> str | None:
        """Look at how a worker ended that was not killed."""
        code, leaving, ready = self.process.returncode, self._state is _State.LEAVING, self.ready
        self._state = _State.EMPTY
        if not leaving:
            self._not_before = now + _RETRY_S
            self.refusals += not ready
        if not ready or (leaving and code == 0):
            return None
        how = "after SIGTERM" if leaving else "by itself"
        return f"worker {self.node} ended {how} with {code}: {self.process.tail()}"

    def _start(self, now: float) -> None:
        self.starts += 1
        self._process = self._mill.worker(concurrency=self._slots, name=self.node, drain_s=DRAIN_S, wait=False)
        self._started_at, self._state, self.paused = now, _State.TAKEN, False


def dismiss_all(seats: Sequence[Seat]) -> list[str]:
    """End all workers in order; return a sentence for each that did not end well."""
    for seat in seats:
        seat.dismiss(signal.SIGTERM)
        seat.process.wait(_LEAVES_WITHIN_S)
    return [sentence for seat in seats if (sentence := seat.tend())]
