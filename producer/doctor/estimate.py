"""What a run will take, from its canaries: tokens, time and disk as ranges, and nothing where nothing is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from app.preflight import Canary, Report
from producer.interval import Range, mean_range

FEWEST = 8
"""Canaries below which no range is given: they would say next to nothing."""
_PER = 1000
"""Samples that an estimate is for where the number of all is not known."""


class Spread(msgspec.Struct, frozen=True):
    """A number of tokens or bytes over the canaries."""

    mean: Range
    """Where the mean of all samples lies with 95 % confidence, if the canaries are like them."""
    p95: float
    """The canaries' 95th percentile."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the run will take."""

    samples: int
    """That it is for."""
    whole: bool
    """Whether these are all samples of the source."""
    canaries: int
    """Answers that it is made of."""
    prompt_tokens: Spread | None
    completion_tokens: Spread | None
    total_tokens: Range | None
    """Prompt and answer tokens of all samples."""
    seconds: Range | None
    """From: each request stays as fast with the bound full. To: the servers give no more than to the canaries."""
    record_bytes: Range
    """Of all records."""
    in_flight: int
    """Requests at once over all servers: the bound, or all samples where they are fewer."""
    seen_in_flight: float
    """Requests at once, on average, while the canaries were asked: the last ones have the servers for themselves."""


def estimate(report: Report, canaries: Sequence[Canary], samples: int | None) -> Estimate | None:
    """Return what that many samples will take (None: not known), from a dataset's canaries; None: too few answered."""
    answers = [one for one in canaries if one.verdict != "failed"]
    if len(answers) < FEWEST:
        return None
    count = _PER if samples is None else samples
    servers = sum(bool(server.canaries) for server in report.servers)
    prompt = spread([one.prompt_tokens for one in answers])
    completion = spread([one.completion_tokens for one in answers])
    bound = min(report.max_in_flight * servers, count)
    seen = sum(server.in_flight for server in report.servers)
    return Estimate(
        samples=count,
        whole=samples is not None,
        canaries=len(answers),
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=_both(prompt, completion, count),
        seconds=_seconds(answers, count, bound=bound, seen=seen),
        record_bytes=mean_range([float(one.record_bytes) for one in answers]).times(count),
        in_flight=bound,
        seen_in_flight=seen,
    )


def _both(prompt: Spread | None, completion: Spread | None, count: int) -> Range | None:
    if prompt is None or completion is None:
        return None
    low, high = prompt.mean.low + completion.mean.low, prompt.mean.high + completion.mean.high
    return Range(low, high).times(count)


def _seconds(answers: Sequence[Canary], count: int, *, bound: int, seen: float) -> Range | None:
    """Return the time of all samples: the mean of a request's seconds, over the requests that run at once.

    By Little's law the second is what as many samples take at the pace at which the canaries came.
    """
    times = [one.latency_s for one in answers if one.latency_s is not None]
    if len(times) < FEWEST or not bound or not seen:
        return None
    mean = mean_range(times)
    return Range(mean.low * count / bound, mean.high * count / min(seen, bound))


def spread(values: Sequence[int | None]) -> Spread | None:
    """Return the spread of numbers, of which None are not known; None: too few are."""
    known = sorted(float(value) for value in values if value is not None)
    if len(known) < FEWEST:
        return None
    return Spread(mean_range(known), known[math.ceil(0.95 * len(known)) - 1])
