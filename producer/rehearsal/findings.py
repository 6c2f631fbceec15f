"""What a rehearsal has found, all of it measured or worked out from what was measured and assumed."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from producer.interval import mean_range
from producer.rehearsal.looks import Stretch
from producer.rehearsal.plan import Plan

BUSY = 0.95
"""Share of a bound from which on the bound is what limits a run."""
_FULL_WORKER = 0.7
"""Share of a core that a worker process should not use more of."""


class Limit(enum.StrEnum):
    """What keeps a run from being faster."""

    SERVER = "server"
    """It generates as many tokens as it can."""
    IN_FLIGHT = "in_flight"
    """The server could do more, but no more requests may be in flight."""
    WORKERS = "workers"
    """More requests might be in flight than the workers keep there."""
    SAMPLES = "samples"
    """There are fewer samples than requests that may be in flight, so that neither was put to the test."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was seen of a run that went to its end; times are real."""

    read: int
    """Rows that were read."""
    refused: int
    outcomes: Mapping[str, int]
    """Samples by accepted, rejected and failed."""
    reasons: Mapping[str, int]
    """Samples by `rejected: why` and `failed: why`."""
    tokens: Sequence[int]
    """Of each answer."""
    latencies_s: Sequence[float]
    """Of each answer."""
    generated: float
    """Tokens that the server made in all, for requests too that were given up."""
    run_s: float
    """From the first request to the last record."""
    tail_s: float
    """From when no sample waited to the last record."""
    stretch: Stretch
    steady: bool
    """Whether the stretch is one in which samples always waited; else it is the whole run."""
    worker_cpu_s: float
    worker_peak_bytes: int
    """Of the largest."""
    redis_bytes: int
    """What the waiting samples took."""
    disk_bytes: int

    @property
    def samples(self) -> int:
        """Samples that were asked."""
        return sum(self.outcomes.values())


@dataclasses.dataclass(frozen=True)
class Answers:
    """How long the answers were, in tokens, and how long they took, in simulated seconds."""

    mean_tokens: float
    median_tokens: float
    longest_tokens: int
    mean_latency_s: float
    longest_latency_s: float


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast it went, in simulated and in real time."""

    samples_per_s: float
    output_tokens_per_s: float
    real_samples_per_s: float
    real_output_tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """What was the limit, and how close to it the run was."""

    by: Limit
    server_busy: float
    """Share of the tokens that the server could have generated."""
    in_flight_busy: float
    """Share of the requests that could have been in flight."""
    in_flight_for_whole_server: int
    """Requests in flight that would use the whole server."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the real run needs beside the server."""

    worker_cpu_ms_per_sample: float
    workers: int
    """Processes, none of them busier than 70 % of a core."""
    worker_peak_mb: float
    redis_bytes_per_waiting_sample: float
    disk_bytes_per_sample: float


@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole run."""

    rows: int
    samples: int
    seconds_low: float
    seconds_high: float
    disk_bytes: int
    redis_bytes: int
    """With as many samples waiting as MILL_MAX_PENDING allows."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """The report."""

    source: str
    speedup: float
    read: int
    refused: int
    samples: int
    outcomes: Mapping[str, int]
    reasons: Mapping[str, int]
    assumed: Mapping[str, float]
    answers: Answers | None
    """None where no sample was answered."""
    rate: Rate
    bound: Bound
    needs: Needs
    whole: Whole | None
    """None where the rows of the whole run are not known, or nothing was answered."""
    commands: Sequence[str]
    kept: Path | None


def find(plan: Plan, measured: Measured) -> Findings:
    """Work the report out."""
    rate = _rate(plan, measured)
    needs = _needs(measured, rate)
    traits = dataclasses.asdict(plan.traits)
    return Findings(
        source=plan.source,
        speedup=plan.traits.speedup,
        read=measured.read,
        refused=measured.refused,
        samples=measured.samples,
        outcomes=measured.outcomes,
        reasons=measured.reasons,
        assumed={
            **{name: value for name, value in traits.items() if name not in {"speedup", "seed"}},
            "max_tokens": plan.generation.max_tokens,
            "max_in_flight": plan.max_in_flight,
            "workers": plan.workers,
        },
        answers=_answers(plan, measured),
        rate=rate,
        bound=_bound(plan, measured),
        needs=needs,
        whole=_whole(plan, measured, rate, needs),
        commands=plan.commands(needs.workers),
        kept=plan.keep,
    )


def _answers(plan: Plan, measured: Measured) -> Answers | None:
    if not measured.tokens:
        return None
    return Answers(
        mean_tokens=statistics.fmean(measured.tokens),
        median_tokens=statistics.median(measured.tokens),
        longest_tokens=max(measured.tokens),
        mean_latency_s=statistics.fmean(measured.latencies_s) * plan.traits.speedup,
        longest_latency_s=max(measured.latencies_s) * plan.traits.speedup,
    )


def _rate(plan: Plan, measured: Measured) -> Rate:
    """Return the rates of the steady stretch: how fast tokens came, by how many of them a sample has.

    A count of the answers in the stretch would be too high, for the short ones come first.
    """
    speedup, delivered = plan.traits.speedup, sum(measured.tokens)
    real_tokens = measured.stretch.tokens_per_s * (delivered / measured.generated if measured.generated else 0.0)
    real_samples = real_tokens * measured.samples / delivered if delivered else measured.samples / measured.run_s
    return Rate(real_samples / speedup, real_tokens / speedup, real_samples, real_tokens)


def _bound(plan: Plan, measured: Measured) -> Bound:
    stretch, traits = measured.stretch, plan.traits
    server = stretch.tokens_per_s / traits.speedup / traits.server_tokens_per_second
    in_flight = stretch.in_flight / plan.max_in_flight
    if not measured.steady:
        by = Limit.SAMPLES
    elif server >= BUSY:
        by = Limit.SERVER
    else:
        by = Limit.IN_FLIGHT if in_flight >= BUSY else Limit.WORKERS
    mean = statistics.fmean(measured.tokens) if measured.tokens else traits.mean_tokens
    return Bound(by, server, in_flight, plan.in_flight_for(mean))


def _needs(measured: Measured, rate: Rate) -> Needs:
    cpu_s = measured.worker_cpu_s / measured.samples
    return Needs(
        worker_cpu_ms_per_sample=1000 * cpu_s,
        workers=max(1, math.ceil(rate.samples_per_s * cpu_s / _FULL_WORKER)),
        worker_peak_mb=measured.worker_peak_bytes / 1e6,
        redis_bytes_per_waiting_sample=measured.redis_bytes / measured.samples,
        disk_bytes_per_sample=measured.disk_bytes / measured.samples,
    )


def _whole(plan: Plan, measured: Measured, rate: Rate, needs: Needs) -> Whole | None:
    """Return the whole run's figures.

    The time's range is that of the mean answer's length, known from so many answers; the tail, in which no sample waits
    any more, is in its upper end.
    """
    if plan.rows is None or not rate.output_tokens_per_s or len(measured.tokens) < 2:
        return None
    samples = round(plan.rows * measured.samples / measured.read)
    answered = len(measured.tokens) / measured.samples
    seconds = mean_range(measured.tokens).times(samples * answered / rate.output_tokens_per_s)
    return Whole(
        rows=plan.rows,
        samples=samples,
        seconds_low=seconds.low,
        seconds_high=seconds.high + measured.tail_s * plan.traits.speedup,
        disk_bytes=round(samples * needs.disk_bytes_per_sample),
        redis_bytes=round(min(samples, plan.queue.max_pending) * needs.redis_bytes_per_waiting_sample),
    )
