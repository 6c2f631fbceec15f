"""How far a run is, as values: the snapshot that status, monitor and the progress files show."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

SCHEMA_VERSION = 2
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


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long the answered calls took, waiting for a permit not included; since Redis knows the dataset."""

    mean_s: float | None = None
    p95_s: float | None = None
    count: int = 0
    sum_s: float = 0.0
    buckets: list[tuple[float, int]] = []
    """(Upper bound in seconds, calls up to it and above the bound before), empty ones left out."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens of the accepted samples, and what was sent for them."""

    total: int = 0
    """By the files."""
    mean: float | None = None
    """Per accepted sample, by the files; null while there is none."""
    p95: float | None = None
    """Since Redis knows the dataset."""
    prompt_total: int | None = None
    """Prompt tokens of all answered samples since Redis knows the dataset; null while it cannot be reached."""
    buckets: list[tuple[float, int]] = []
    """(Upper bound in tokens, accepted samples up to it and above the bound before), since Redis knows the dataset."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """What this run finished per second over one window; null while nothing is known, 0 while nobody works."""

    samples_per_s: float | None = None
    """Accepted samples alone."""
    tokens_per_s: float | None = None
    """Completion tokens of the accepted samples."""
    rejected_per_s: float | None = None
    failed_per_s: float | None = None
    window_s: float | None = None
    """Seconds looked back: those of the window, or those since the run began or was resumed."""


NO_RATE = Rate(samples_per_s=0.0, tokens_per_s=0.0, rejected_per_s=0.0, failed_per_s=0.0)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The same rates over three windows; those of several datasets share each window's beginning."""

    now: Rate = Rate()
    """The last minute."""
    five_minutes: Rate = Rate()
    run: Rate = Rate()
    """Since the run began, time paused by hand left out."""


class Eta(msgspec.Struct, frozen=True, kw_only=True):
    """When nothing queued or in flight will be left, if all goes on as now; all null while unknown."""

    seconds: float | None = None
    low_s: float | None = None
    """It will take less in about one case of twenty."""
    high_s: float | None = None
    """It will take longer in about one case of twenty."""
    at: float | None = None
    """The same moment as `seconds`, in Unix seconds."""
    reason: str | None = None
    """Why it is unknown."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one dataset, or of all together."""

    state: State
    counts: Counts
    percent: float | None = None
    """Samples with a final record, rounded down, so that only a finished dataset has 100; null without samples."""
    rates: Rates = Rates()
    latency: Latency = Latency()
    tokens: Tokens = Tokens()
    eta: Eta = Eta()
    reasons: dict[str, dict[str, int]] = {}
    """rejected, failed, refused -> reason -> ids on disk (those being asked again are among them)."""
    call_faults: dict[str, int] = {}
    """Kind of fault -> failed calls since Redis knows the dataset, those that were asked again included."""
    oldest_in_flight_s: float | None = None
    stalled_since: float | None = None
    """Unix seconds since which something outside has kept all workers from working; null while nothing does."""
    run_started_at: float | None = None
    """Unix seconds at which the present run of work began."""
    first_record_at: float | None = None
    """Unix seconds at which the first sample on disk was finished."""
    last_record_at: float | None = None
    """Unix seconds at which the newest sample on disk was finished."""
    notes: list[str] = []
    """Sentences worth a person's attention."""


HUNG = "hung: "
"""How the reason of an endpoint begins that takes connections and answers nothing."""


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
    gauges: dict[str, float] | None = None
    """What the server last said of its load: running and waiting requests of whoever sends them, kv (part of its
    key-value cache in use, 0 to 1, where it tells) and at (unix seconds); null where it has no /metrics."""
    latency_s: float | None = None
    """Mean seconds of the last answers, over all workers; null while there is none."""


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
