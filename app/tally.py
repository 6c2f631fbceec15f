"""What Redis counts of finished samples: per second, since a run began, and since it knows the dataset.

These numbers may vanish with Redis: they make rates, forecasts and distributions, while counts come from the files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec

from app.broker import Client, text
from app.histogram import Histogram, bucket_of
from app.places import Keys
from app.records import Kind

KEEP_S = 900
"""Seconds of per-second tallies that are kept."""
_LATENCY, _LENGTH, _FAULT = "latency:", "length:", "fault:"
"""How the fields of a distribution begin; a bucket's number, or a kind of fault, follows."""

Seconds = Mapping[int, Mapping[str, int]]
"""Unix second -> {kind or "tokens": amount}."""


@dataclasses.dataclass(frozen=True)
class Done:
    """A sample that is on disk, for the books in Redis."""

    id: str
    kind: Kind
    tokens: int = 0
    """Completion tokens."""
    prompt_tokens: int = 0
    latency_s: float | None = None
    """Seconds of the call that was answered; None when none was."""
    round: int = 0
    """The recorded round; a payload of a later one is still to do."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters and distributions of one dataset's finished samples."""

    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    tokens: int = 0
    """Completion tokens of the accepted samples."""
    prompt_tokens: int = 0
    latency: Histogram = dataclasses.field(default_factory=Histogram)
    """Seconds of the answered calls."""
    lengths: Histogram = dataclasses.field(default_factory=Histogram)
    """Completion tokens of the accepted samples."""
    faults: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Kind of fault -> failed calls."""

    @property
    def settled(self) -> int:
        """Samples of any outcome."""
        return self.accepted + self.rejected + self.failed


@dataclasses.dataclass(frozen=True)
class Run:
    """The present run of work on a dataset."""

    began: float
    """Unix seconds, as all moments here, by Redis' clock."""
    resumed: float | None = None
    """When it was last resumed after a pause."""
    paused_s: float = 0.0
    """Seconds paused before that."""
    paused_at: float | None = None
    before: Stats = dataclasses.field(default_factory=Stats)
    """What had been counted when it began."""

    @property
    def steady(self) -> float:
        """Since when it has been going on without a pause."""
        return max(self.began, self.resumed or 0.0)

    def worked_s(self, now: float) -> float:
        """Return the seconds since it began, pauses left out."""
        paused = self.paused_s + (max(0.0, now - self.paused_at) if self.paused_at is not None else 0.0)
        return max(0.0, now - self.began - paused)


@dataclasses.dataclass(frozen=True)
class Counted:
    """All that is counted of one dataset."""

    seconds: Seconds = dataclasses.field(default_factory=dict)
    stats: Stats = dataclasses.field(default_factory=Stats)
    run: Run | None = None


class Tally:
    """Counts in Redis what has been finished and what went wrong."""

    def __init__(self, client: Client, keys: Keys, *, now: Callable[[], float]) -> None:
        self._client = client
        self._keys = keys
        self._now = now

    # Counting

    def add_faults(self, dataset: str, faults: Mapping[str, int]) -> None:
        """Add failed calls, by kind of fault."""
        with self._client.pipeline(transaction=False) as pipe:
            for kind, n in faults.items():
                pipe.hincrby(self._keys.stats(dataset), f"{_FAULT}{kind}", n)
            pipe.execute()

    def trim(self, dataset: str) -> None:
        """Forget tallies older than 15 minutes, and those from before Redis' clock was set back."""
        now = self._now()
        fields = cast("list[bytes]", self._client.hkeys(self._keys.rates(dataset)))
        old = [field for field in fields if abs(now - int(text(field).partition(":")[0])) > KEEP_S]
        if old:
            self._client.hdel(self._keys.rates(dataset), *old)

    # Runs

    def begin(self, dataset: str) -> None:
        """Begin a run: its rates start anew."""
        before = cast("dict[bytes, bytes]", self._client.hgetall(self._keys.stats(dataset)))
        known = {text(field): int(amount) for field, amount in before.items()}
        key, since = self._keys.run(dataset), repr(self._now())
        with self._client.pipeline(transaction=False) as pipe:
            pipe.delete(key)
            pipe.hset(key, items=["began", since, "before", msgspec.json.encode(known).decode()])
            pipe.execute()

    def mark_pause(self, dataset: str) -> None:
        """Note that the dataset is paused from now on."""
        self._client.hsetnx(self._keys.run(dataset), "paused_at", repr(self._now()))

    def mark_resume(self, dataset: str) -> None:
        """Note that the dataset goes on, if it was paused."""
        key, now = self._keys.run(dataset), self._now()
        since = cast("bytes | None", self._client.hget(key, "paused_at"))
        if since is None:
            return
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hdel(key, "paused_at")
            pipe.hincrbyfloat(key, "paused_s", max(0.0, now - float(since)))
            pipe.hset(key, "resumed", repr(now))
            pipe.execute()

    def mark_change(self) -> None:
        """Note that a worker has come or gone: what was measured before says less of what comes."""
        self._client.set(self._keys.changed, repr(self._now()))

    def changed(self) -> float | None:
        """Return when a worker last came or went."""
        at = cast("bytes | None", self._client.get(self._keys.changed))
        return float(at) if at else None

    # Looking

    def look(self, dataset: str) -> Counted:
        """Return all that is counted of the dataset."""
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hgetall(self._keys.rates(dataset))
            pipe.hgetall(self._keys.stats(dataset))
            pipe.hgetall(self._keys.run(dataset))
            rates, stats, run = pipe.execute()
        return Counted(
            seconds=_seconds(rates),
            stats=_stats({text(field): int(amount) for field, amount in stats.items()}),
            run=_run({text(field): text(value) for field, value in run.items()}),
        )

    def stats(self, datasets: Sequence[str]) -> dict[str, Stats]:
        """Return the counters and distributions of each dataset."""
        with self._client.pipeline(transaction=False) as pipe:
            for dataset in datasets:
                pipe.hgetall(self._keys.stats(dataset))
            replies = pipe.execute()
        return {
            dataset: _stats({text(field): int(amount) for field, amount in fields.items()})
            for dataset, fields in zip(datasets, replies, strict=True)
        }


def counts_of(item: Done) -> str:
    """Return what a finished sample adds to the counters and distributions, as finish.lua reads it."""
    counts = {item.kind.value: 1, "prompt_tokens": item.prompt_tokens}
    if item.kind is Kind.ACCEPTED and item.tokens:
        counts |= {"tokens": item.tokens, f"{_LENGTH}{bucket_of(item.tokens)}": 1}
    if item.latency_s is not None:
        counts |= {f"{_LATENCY}{bucket_of(item.latency_s)}": 1, "latency_ms": round(1000 * item.latency_s)}
    return " ".join(f"{field}={amount}" for field, amount in counts.items() if amount > 0)


def _seconds(fields: Mapping[bytes, bytes]) -> dict[int, dict[str, int]]:
    seconds: dict[int, dict[str, int]] = {}
    for field, amount in fields.items():
        second, _, what = text(field).partition(":")
        seconds.setdefault(int(second), {})[what] = int(amount)
    return seconds


def _stats(fields: Mapping[str, int]) -> Stats:
    def numbered(begin: str) -> dict[int, int]:
        return {int(field.removeprefix(begin)): n for field, n in fields.items() if field.startswith(begin)}

    tokens = fields.get("tokens", 0)
    return Stats(
        accepted=fields.get(Kind.ACCEPTED.value, 0),
        rejected=fields.get(Kind.REJECTED.value, 0),
        failed=fields.get(Kind.FAILED.value, 0),
        tokens=tokens,
        prompt_tokens=fields.get("prompt_tokens", 0),
        latency=Histogram(numbered(_LATENCY), fields.get("latency_ms", 0) / 1000),
        lengths=Histogram(numbered(_LENGTH), float(tokens)),
        faults={field.removeprefix(_FAULT): n for field, n in fields.items() if field.startswith(_FAULT)},
    )


def _run(fields: Mapping[str, str]) -> Run | None:
    if "began" not in fields:
        return None
    resumed, paused_at = fields.get("resumed"), fields.get("paused_at")
    return Run(
        began=float(fields["began"]),
        resumed=float(resumed) if resumed else None,
        paused_s=float(fields.get("paused_s", 0)),
        paused_at=float(paused_at) if paused_at else None,
        before=_stats(msgspec.json.decode(fields.get("before", "{}"), type=dict[str, int])),
    )
