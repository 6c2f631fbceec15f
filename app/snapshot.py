"""How far a run is, as values: the snapshot that status, monitor and the progress files show."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

SCHEMA_VERSION = 1
"""Version of the snapshot's JSON form; raised whenever a field changes its meaning."""


class State(enum.StrEnum):
    """What a dataset is doing; of several datasets the first in this order speaks for all."""

    RUNNING = "running"
    STALLED = "stalled"
    """Workers run, and something outside keeps all of them from working."""
    WAITING = "waiting"
    """Samples are queued and no worker takes them."""
    PAUSED = "paused"
    UNKNOWN = "unknown"
    """Redis cannot be reached from here, and not all samples are recorded."""
    INCOMPLETE = "incomplete"
    """Samples are neither recorded nor queued, and none is queued."""
    DONE = "done"
    EMPTY = "empty"
    """No samples at all."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """read = refused + samples; samples = accepted + rejected + failed + left; left = queued + in_flight + missing.

    What only Redis knows is null while it cannot be reached.
    """

    read: int = 0
    refused: int = 0
    samples: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    """Given up; those that are being asked again count as queued or in flight, as rejected ones do."""
    left: int = 0
    """Samples without a final record."""
    queued: int | None = 0
    in_flight: int | None = 0
    missing: int | None = 0
    """Neither recorded nor in Redis."""
    orphaned: int | None = 0
    """Of `queued`, those whose worker died; they come back when its lease runs out."""

    @property
    def live(self) -> int:
        """Samples that workers have or will get."""
        return (self.queued or 0) + (self.in_flight or 0)


class CompletionTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens of the accepted samples."""

    total: int = 0
    mean: float | None = None
    """Per accepted sample; null while there is none."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What this run finished per second; null while nothing is known, 0 while nobody works."""

    samples_per_s: float | None = None
    """Accepted samples alone."""
    tokens_per_s: float | None = None
    """Completion tokens of accepted samples, as seen."""
    rejected_per_s: float | None = None
    failed_per_s: float | None = None
    window_s: float | None = None
    """Seconds looked back; less than a minute right after a run's start."""

    @property
    def settled_per_s(self) -> float | None:
        """Samples of any outcome per second: how fast the work shrinks."""
        if self.samples_per_s is None:
            return None
        return self.samples_per_s + (self.rejected_per_s or 0.0) + (self.failed_per_s or 0.0)


NO_RATE = Rate(samples_per_s=0.0, tokens_per_s=0.0, rejected_per_s=0.0, failed_per_s=0.0)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one dataset, or of all together."""

    state: State
    counts: Counts
    percent: float | None = None
    """Samples with a final record, rounded down, so that only a finished dataset has 100; null without samples."""
    completion_tokens: CompletionTokens = CompletionTokens()
    rate: Rate = Rate()
    eta_s: float | None = None
    """Seconds until nothing queued or in flight is left; null while unknown."""
    eta_reason: str | None = None
    """Why there is no ETA."""
    reasons: dict[str, dict[str, int]] = {}
    """rejected, failed, refused -> reason -> ids on disk (those being asked again are among them)."""
    oldest_in_flight_s: float | None = None
    session_started_at: float | None = None
    """Unix seconds since which rates count."""
    notes: list[str] = []
    """Sentences worth a person's attention."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model server as the workers see it."""

    name: str
    url: str
    state: str
    """up, down or paused."""
    since: float | None = None
    """Unix seconds of the last change of state."""
    reason: str = ""
    in_flight: int = 0
    bound: int | None = None
    """How many requests in flight the workers keep to together; null until one has told."""


class BrokerState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether Redis answered."""

    reachable: bool
    url: str
    """Without user and password."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that status, monitor and the progress files show."""

    schema: int = SCHEMA_VERSION
    at: float
    """Unix seconds."""
    broker: BrokerState
    totals: Part
    datasets: dict[str, Part]
    workers: list[dict[str, Any]] = []
    """The living workers' heartbeats."""
    endpoints: list[Endpoint] = []
