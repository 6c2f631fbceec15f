"""The report of a rehearsal, for people."""

from __future__ import annotations

from collections.abc import Iterator

from producer.measures import duration, size
from producer.rehearsal.findings import Bound, Findings, Limit
from producer.texts import counted


def report(found: Findings) -> Iterator[str]:
    """Yield the report's lines."""
    yield from _rehearsed(found)
    yield from _speed(found)
    yield ""
    yield from limit(found.bound, int(found.assumed["max_in_flight"]))
    yield ""
    yield from _needs(found)
    if found.kept is not None:
        yield f"The records are in {found.kept}."
    yield ""
    yield "The real run:"
    yield from (f"  {line}" for line in found.commands)


def _rehearsed(found: Findings) -> Iterator[str]:
    outcomes = ", ".join(f"{count:,} {kind}" for kind, count in found.outcomes.items())
    yield f"{found.source}: {counted(found.read, 'row')} read, {found.refused:,} refused"
    yield f"  {counted(found.samples, 'sample')}: {outcomes}"
    for reason, count in sorted(found.reasons.items()):
        yield f"  {reason} {count:,}"
    mean, each, total, first_s = (
        _plain(found.assumed[name])
        for name in ("mean_tokens", "tokens_per_second", "server_tokens_per_second", "first_token_s")
    )
    sigma, most, failing = (found.assumed[name] for name in ("sigma", "max_tokens", "failure_share"))
    yield f"assumed: answers of {mean} tokens on average (lognormal, sigma {sigma:g}, cut at {most:,}),"
    yield (
        f"  {each} tokens/s each and {total} in all, first token after {first_s} s, "
        f"{failing:.1%} of the requests failing"
    )
    yield f"The simulated time ran {found.speedup:g} times faster than this machine's."


def _speed(found: Findings) -> Iterator[str]:
    rate, answers = found.rate, found.answers
    yield ""
    yield (
        f"speed     {rate.samples_per_s:,.2f} samples/s, {rate.output_tokens_per_s:,.0f} output tokens/s (this machine "
        f"did {rate.real_samples_per_s:,.0f} and {rate.real_output_tokens_per_s:,.0f})"
    )
    if answers is not None:
        yield (
            f"answers   {answers.mean_tokens:,.0f} tokens on average, median {answers.median_tokens:,.0f}, longest "
            f"{answers.longest_tokens:,}; {duration(answers.mean_latency_s)} on average, longest "
            f"{duration(answers.longest_latency_s)}"
        )
    whole = found.whole
    if whole is None:
        yield "whole run give --rows to see how long it takes and what it needs"
        return
    yield (
        f"whole run {whole.samples:,} samples of {counted(whole.rows, 'row')}: {duration(whole.seconds_low)} to "
        f"{duration(whole.seconds_high)}"
    )
    yield (
        f"disk      {size(whole.disk_bytes)} ({found.needs.disk_bytes_per_sample / 1000:,.1f} kB a sample, with its "
        "text and token ids)"
    )
    yield (
        f"Redis     {size(whole.redis_bytes)} while most samples wait "
        f"({found.needs.redis_bytes_per_waiting_sample / 1000:,.1f} kB each)"
    )


def limit(bound: Bound, in_flight: int) -> Iterator[str]:
    """Yield the lines on what limits the run."""
    enough = f"{bound.in_flight_for_whole_server:,} in flight would use the whole server"
    yield {
        Limit.SERVER: f"The server is the limit; {enough}.",
        Limit.IN_FLIGHT: f"The requests in flight are the limit; {enough}.",
        Limit.WORKERS: "The workers are the limit; more of them (--workers) would keep more requests in flight.",
        Limit.SAMPLES: f"There were too few samples to find the limit; give --limit several times {in_flight:,}.",
    }[bound.by]
    yield f"  busy: the server {bound.server_busy:.0%}, the {in_flight:,} requests in flight {bound.in_flight_busy:.0%}"


def _needs(found: Findings) -> Iterator[str]:
    needs = found.needs
    keep_up = "1 worker process keeps" if needs.workers == 1 else f"{needs.workers} worker processes keep"
    cpu_ms, peak_mb, speed = needs.worker_cpu_ms_per_sample, needs.worker_peak_mb, found.rate.samples_per_s
    yield f"A worker used {cpu_ms:.1f} ms of CPU for a sample, and at most {peak_mb:,.0f} MB:"
    yield f"  {keep_up} up with {speed:,.2f} samples/s at 70 % of a core or less"


def _plain(number: float) -> str:
    return f"{number:,.2f}".rstrip("0").rstrip(".")
