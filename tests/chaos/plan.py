"""The plan of a chaos run: which fault comes when, for how long and at whom, as pure data made from a seed."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Mapping, Sequence

CALM_S = 8.0
"""Seconds at the beginning and after each round of faults in which nothing is injected."""
_GAP_S = (1.5, 6.0)
"""Seconds between two faults."""


class Fault(enum.StrEnum):
    """What can happen to a run."""

    KILL_WORKER = "kill-worker"
    STOP_WORKER = "stop-worker"
    """SIGTERM: running requests have MILL_DRAIN_S."""
    STOP_WORKER_TWICE = "stop-worker-twice"
    """The second SIGTERM hands back at once."""
    PAUSE_WORKER = "pause-worker"
    """SIGSTOP for less than a lease."""
    FREEZE_WORKER = "freeze-worker"
    """SIGSTOP for longer than the lease."""
    KILL_ENQUEUE = "kill-enqueue"
    THREE_ENQUEUES = "three-enqueues"
    """The same input three times at once."""
    KILL_SERVER = "kill-server"
    PAUSE_SERVER = "pause-server"
    POISON = "poison"
    """A prompt whose request kills each server that it comes to joins the inputs."""
    ANSWER_503 = "answer-503"
    ANSWER_500 = "answer-500"
    ANSWER_429 = "answer-429"
    ANSWER_DEAD = "answer-engine-dead"
    ANSWER_GARBAGE = "answer-garbage"
    ANSWER_CUT = "answer-cut"
    ANSWER_RESET = "answer-reset"
    ANSWER_NEVER = "answer-never"
    KILL_REDIS = "kill-redis"
    """It comes back with what its append-only file holds."""
    EMPTY_REDIS = "empty-redis"
    """It comes back with nothing; enqueue runs again."""
    BLIP_REDIS = "blip-redis"
    """CLIENT KILL: every connection breaks at once."""
    PAUSE_REDIS = "pause-redis"
    FILL_REDIS = "fill-redis"
    """CONFIG SET maxmemory below what is used."""
    READONLY_REDIS = "readonly-redis"
    """It follows a master that is not there, and refuses writes."""
    LOCK_REDIS = "lock-redis"
    """Its password is changed, and back."""
    TEAR_TAIL = "tear-tail"
    """Half a line at the end of the accepted records, as a worker leaves that dies in a write."""
    NUL_TAIL = "nul-tail"
    """NULs there, as a machine leaves that loses its power."""
    CUT_TAIL = "cut-tail"
    """The last accepted record loses its second half."""
    UNEND_TAIL = "unend-tail"
    """The last accepted record loses its newline."""
    DELETE_INDEX = "delete-index"
    REWRITE_FILE = "rewrite-file"
    """An editor saves the accepted records: the same lines in a new file."""
    HOLD_LOCK = "hold-lock"
    """A frozen writer keeps a dataset folder's lock."""
    REPAIR = "repair"
    """verify --repair runs beside everything."""
    KILL_REPAIR = "kill-repair"
    KILL_EXPORT = "kill-export"
    FILL_DISK = "fill-disk"


_AT_ONCE = (0.0, 0.0)
LASTS_S: Mapping[Fault, tuple[float, float]] = {
    Fault.KILL_WORKER: (0.2, 6.0),
    Fault.STOP_WORKER: (0.2, 3.0),
    Fault.STOP_WORKER_TWICE: (0.2, 3.0),
    Fault.PAUSE_WORKER: (0.5, 5.0),
    Fault.FREEZE_WORKER: (10.0, 14.0),
    Fault.KILL_ENQUEUE: (0.3, 2.5),
    Fault.THREE_ENQUEUES: _AT_ONCE,
    Fault.KILL_SERVER: (0.5, 8.0),
    Fault.PAUSE_SERVER: (1.0, 8.0),
    Fault.POISON: _AT_ONCE,
    Fault.ANSWER_503: (2.0, 6.0),
    Fault.ANSWER_500: (2.0, 6.0),
    Fault.ANSWER_429: (2.0, 6.0),
    Fault.ANSWER_DEAD: (2.0, 6.0),
    Fault.ANSWER_GARBAGE: (1.0, 4.0),
    Fault.ANSWER_CUT: (1.0, 4.0),
    Fault.ANSWER_RESET: (1.0, 4.0),
    Fault.ANSWER_NEVER: (1.0, 4.0),
    Fault.KILL_REDIS: (0.2, 14.0),
    Fault.EMPTY_REDIS: (0.2, 4.0),
    Fault.BLIP_REDIS: _AT_ONCE,
    Fault.PAUSE_REDIS: (1.0, 12.0),
    Fault.FILL_REDIS: (1.0, 12.0),
    Fault.READONLY_REDIS: (1.0, 12.0),
    Fault.LOCK_REDIS: (1.0, 12.0),
    Fault.TEAR_TAIL: (0.2, 3.0),
    Fault.NUL_TAIL: (0.2, 3.0),
    Fault.CUT_TAIL: (0.2, 3.0),
    Fault.UNEND_TAIL: (0.2, 3.0),
    Fault.DELETE_INDEX: _AT_ONCE,
    Fault.REWRITE_FILE: _AT_ONCE,
    Fault.HOLD_LOCK: (1.0, 8.0),
    Fault.REPAIR: _AT_ONCE,
    Fault.KILL_REPAIR: (0.3, 3.0),
    Fault.KILL_EXPORT: (0.3, 3.0),
    Fault.FILL_DISK: (2.0, 8.0),
}
"""Seconds from a fault's beginning to its end: for a killed process, until it is started again."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One fault of a plan."""

    at_s: float
    """Seconds after the run's start."""
    fault: Fault
    lasts_s: float
    dice: float
    """0 <= dice < 1: whom it hits, or how hard."""

    def choose(self, length: int) -> int:
        """Return an index below `length`."""
        return int(self.dice * length)


def make_plan(seed: int, seconds: float, faults: Sequence[Fault] = tuple(Fault)) -> list[Step]:
    """Return the faults of a run of so many seconds: the same for the same arguments.

    They come in rounds, each of which has every fault once, in a new order. Every fault ends within the run.
    """
    dice, steps, at_s = random.Random(seed), list[Step](), CALM_S
    while at_s < seconds:
        for fault in dice.sample(list(faults), len(faults)):
            lasts_s = dice.uniform(*LASTS_S[fault])
            if at_s + lasts_s < seconds:
                steps.append(Step(round(at_s, 2), fault, round(lasts_s, 2), dice.random()))
            at_s += dice.uniform(*_GAP_S)
        at_s += CALM_S
    return steps
