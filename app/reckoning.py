"""Works out a snapshot: counts that always add up, rates, distributions, an honest ETA. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from app.histogram import Histogram, add_up, merge
from app.index import Totals
from app.outlook import Ahead, Scene, eta_of, quiet_since
from app.pace import rates_of
from app.queue import Waiting
from app.records import Kind
from app.snapshot import NO_RATE, Counts, Latency, Part, Rates, State, Tokens
from app.tally import Counted


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was read of one dataset: Redis first, then the files."""

    totals: Totals
    waiting: Waiting | None = None
    """None: Redis could not be reached."""
    counted: Counted = dataclasses.field(default_factory=Counted)
    first_record_at: float | None = None
    last_record_at: float | None = None
    """Unix seconds at which the first and the newest sample on disk was finished."""
    notes: Sequence[str] = ()


def count(totals: Totals, waiting: Waiting | None) -> Counts:
    """Bring the files' and Redis' numbers together so that they add up.

    Redis is read first, so a sample that finishes between the two reads is in both: what waits is cut to what the
    files still call open. A folder that knows no sample at all believes Redis.
    """
    again = {Kind.FAILED: 0, Kind.REJECTED: 0}
    if waiting is not None:
        again[Kind.FAILED] = min(waiting.again_failed, totals.count(Kind.FAILED))
        again[Kind.REJECTED] = min(waiting.again_rejected, totals.count(Kind.REJECTED))
    left = totals.count(Kind.PENDING) + sum(again.values())
    if waiting is not None and not totals.samples:
        left = waiting.prompts
    settled = {
        "accepted": totals.count(Kind.ACCEPTED),
        "rejected": totals.count(Kind.REJECTED) - again[Kind.REJECTED],
        "failed": totals.count(Kind.FAILED) - again[Kind.FAILED],
    }
    samples = sum(settled.values()) + left
    refused = totals.count(Kind.REFUSED)
    known = {"read": refused + samples, "refused": refused, "samples": samples, "left": left, **settled}
    if waiting is None:
        return Counts(**known, queued=None, in_flight=None, missing=None, orphaned=None)
    live = min(waiting.prompts, left)
    in_flight = min(waiting.in_flight, live)
    queued = live - in_flight
    orphaned = min(waiting.orphaned, queued)
    return Counts(**known, queued=queued, in_flight=in_flight, missing=left - live, orphaned=orphaned)


def dataset_part(found: Findings, scene: Scene) -> Part:
    """Return one dataset's numbers."""
    waiting = found.waiting or Waiting()
    counts = count(found.totals, found.waiting)
    state = _state(counts, waiting, scene)
    run, ahead = found.counted.run, Ahead(counts, state, found.counted, waiting.ages, found.last_record_at)
    return Part(
        state=state,
        counts=counts,
        percent=_percent(counts),
        rates=_rates([found], scene, live=counts.live),
        latency=_latency(found.counted.stats.latency),
        tokens=_tokens([found], scene),
        eta=eta_of([ahead], scene),
        reasons=_reasons(found.totals),
        call_faults=_most_first(found.counted.stats.faults),
        oldest_in_flight_s=max(waiting.ages, default=None),
        stalled_since=_stalled_since(ahead, found, scene),
        run_started_at=run.began if run else None,
        first_record_at=found.first_record_at,
        last_record_at=found.last_record_at,
        notes=[*_notes(counts, waiting, state, scene), *found.notes],
    )


def _state(counts: Counts, waiting: Waiting, scene: Scene) -> State:
    rules = (
        (not counts.samples, State.EMPTY),
        (not counts.left, State.DONE),
        (not scene.reachable, State.UNKNOWN),
        (not counts.live, State.INCOMPLETE),
        (waiting.paused is not None, State.PAUSED),
        (not scene.takers and not counts.in_flight, State.WAITING),
        (scene.obstacle is not None, State.STALLED),
    )
    return next((state for holds, state in rules if holds), State.RUNNING)


def _rates(found: Sequence[Findings], scene: Scene, *, live: int) -> Rates:
    """Return the rates of one dataset or of several together; 0 now while nobody works."""
    if not scene.reachable:
        return Rates()
    ends = [one.last_record_at for one in found if one.last_record_at is not None]
    rates = rates_of([one.counted for one in found], now=scene.now, end=None if live else max(ends, default=None))
    return rates if scene.workers else Rates(now=NO_RATE, five_minutes=rates.five_minutes, run=rates.run)


def _latency(latencies: Histogram) -> Latency:
    mean, p95 = latencies.mean, latencies.quantile(0.95)
    return Latency(
        mean_s=None if mean is None else round(mean, 3),
        p95_s=None if p95 is None else round(p95, 3),
        count=latencies.count,
        sum_s=round(latencies.total, 3),
        buckets=latencies.buckets(),
    )


def _tokens(found: Sequence[Findings], scene: Scene) -> Tokens:
    accepted = [one.totals.by_kind[Kind.ACCEPTED] for one in found if one.totals.count(Kind.ACCEPTED)]
    total, n = sum(tally.tokens for tally in accepted), sum(tally.n for tally in accepted)
    lengths = merge(one.counted.stats.lengths for one in found)
    p95 = lengths.quantile(0.95)
    return Tokens(
        total=total,
        mean=round(total / n, 1) if n else None,
        p95=None if p95 is None else round(p95, 1),
        prompt_total=sum(one.counted.stats.prompt_tokens for one in found) if scene.reachable else None,
        buckets=lengths.buckets(),
    )


def _stalled_since(ahead: Ahead, found: Findings, scene: Scene) -> float | None:
    if ahead.state is State.STALLED:
        return scene.obstacle_since or found.last_record_at
    return quiet_since(ahead, scene) if ahead.state is State.RUNNING else None


def _percent(counts: Counts) -> float | None:
    if not counts.samples:
        return None
    return math.floor(1000 * (counts.samples - counts.left) / counts.samples) / 10


def _reasons(totals: Totals) -> dict[str, dict[str, int]]:
    reasons: dict[str, dict[str, int]] = {kind.value: {} for kind in (Kind.REJECTED, Kind.FAILED, Kind.REFUSED)}
    for (kind, reason), n in sorted(totals.by_reason.items(), key=lambda item: -item[1]):
        if kind.value in reasons and n > 0:
            reasons[kind.value][reason] = n
    return reasons


def _most_first(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _notes(counts: Counts, waiting: Waiting, state: State, scene: Scene) -> list[str]:
    rules = (
        (state is State.EMPTY, "Nothing to do: no sample is known."),
        (
            state is State.UNKNOWN,
            f"{counts.left:,} samples are not recorded; without Redis nobody can tell whether they are queued.",
        ),
        (bool(counts.missing), f"{_are(counts.missing)} neither done nor queued; run producer enqueue again."),
        (waiting.paused is not None and counts.left > 0, f"Paused: {waiting.paused}."),
        (
            state is State.WAITING and not scene.workers,
            f"No worker is running; start some with {scene.started_by}.",
        ),
        (
            bool(counts.orphaned),
            f"{_are(counts.orphaned)} with a worker that died; they come back when its lease runs out.",
        ),
        (counts.failed > 0, f"{counts.failed:,} failed; producer retry asks them again."),
    )
    return [note for holds, note in rules if holds]


def _are(n: int | None) -> str:
    return "1 sample is" if n == 1 else f"{n or 0:,} samples are"


def combine(parts: Sequence[Part], found: Sequence[Findings], scene: Scene, notes: Sequence[str]) -> Part:
    """Return the sum of all datasets, with the notes that belong to none of them."""
    counts = _add_counts([part.counts for part in parts])
    ahead = [
        Ahead(part.counts, part.state, one.counted, one.waiting.ages if one.waiting else (), one.last_record_at)
        for part, one in zip(parts, found, strict=True)
    ]
    stalled = [part.stalled_since for part in parts if part.state in {State.RUNNING, State.STALLED}]
    return Part(
        state=next((state for state in State if any(part.state is state for part in parts)), State.EMPTY),
        counts=counts,
        percent=_percent(counts),
        rates=_rates(found, scene, live=counts.live),
        latency=_latency(merge(one.counted.stats.latency for one in found)),
        tokens=_tokens(found, scene),
        eta=eta_of(ahead, scene),
        reasons=_add_reasons([part.reasons for part in parts]),
        call_faults=_most_first(add_up(part.call_faults for part in parts)),
        oldest_in_flight_s=max(_known(part.oldest_in_flight_s for part in parts), default=None),
        # It stalls as a whole once the last one does.
        stalled_since=None if None in stalled else max(_known(stalled), default=None),
        run_started_at=min(_known(part.run_started_at for part in parts), default=None),
        first_record_at=min(_known(part.first_record_at for part in parts), default=None),
        last_record_at=max(_known(part.last_record_at for part in parts), default=None),
        notes=list(notes),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _add_counts(counts: Sequence[Counts]) -> Counts:
    sums: dict[str, int | None] = {}
    for field in Counts.__struct_fields__:
        values = [cast("int | None", getattr(one, field)) for one in counts]
        sums[field] = None if None in values else sum(value or 0 for value in values)
    return Counts(**cast("dict[str, int]", sums))


def _add_reasons(reasons: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    kinds = [kind.value for kind in (Kind.REJECTED, Kind.FAILED, Kind.REFUSED)]
    return {kind: add_up(one.get(kind, {}) for one in reasons) for kind in kinds}
