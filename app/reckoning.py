"""Works out a snapshot: counts that always add up, rates, an honest ETA. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from app.index import Totals
from app.queue import Waiting
from app.records import Kind
from app.snapshot import NO_RATE, CompletionTokens, Counts, Part, Rate, State

WINDOWS_S = (60, 300, 900)
"""Seconds that rates look back; a longer window is taken while a shorter one holds too few samples."""
ENOUGH = 10
"""Finished samples from which a window's rate is trusted."""
_SHORTEST_SPAN_S = 1.0

Tallies = Mapping[int, Mapping[str, int]]
"""Unix second -> {kind or "tokens": amount}, as the queue keeps them."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all datasets share at the moment of a snapshot."""

    now: float
    reachable: bool = True
    workers: Sequence[Mapping[str, Any]] = ()
    obstacle: str | None = None
    """One sentence for what keeps every worker from working."""

    @property
    def takers(self) -> int:
        """Workers that take new samples."""
        return sum(worker.get("state") != "draining" for worker in self.workers)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was read of one dataset: Redis first, then the files."""

    totals: Totals
    waiting: Waiting | None = None
    """None: Redis could not be reached."""
    tallies: Tallies = dataclasses.field(default_factory=dict)
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


def measure(tallies: Tallies, *, session: float | None, now: float, widen: bool = True) -> Rate:
    """Return this session's rates over a minute, or longer while a minute holds fewer than ten finished samples.

    Tallies are per whole second, so the window begins at a whole second too; the running second counts as far as it
    has come. A second shared with an earlier session is left out.
    """
    begin = -math.inf if session is None else math.ceil(session)
    settled_ever = sum(_settled(tally) for second, tally in tallies.items() if second >= begin)
    for window in WINDOWS_S if widen else WINDOWS_S[:1]:
        start = max(begin, math.ceil(now) - window)
        seen = [tally for second, tally in tallies.items() if second >= start]
        if start == begin or sum(map(_settled, seen)) >= ENOUGH:
            break
    span = now - start
    if span < _SHORTEST_SPAN_S or not settled_ever:
        return Rate()
    return Rate(
        samples_per_s=_per_second(seen, Kind.ACCEPTED, span),
        tokens_per_s=_per_second(seen, "tokens", span),
        rejected_per_s=_per_second(seen, Kind.REJECTED, span),
        failed_per_s=_per_second(seen, Kind.FAILED, span),
        window_s=round(span, 3),
    )


def _settled(tally: Mapping[str, int]) -> int:
    return sum(tally.get(kind, 0) for kind in (Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED))


def _per_second(tallies: Iterable[Mapping[str, int]], what: str, span: float) -> float:
    return round(sum(tally.get(what, 0) for tally in tallies) / span, 3)


def dataset_part(found: Findings, scene: Scene) -> Part:
    """Return one dataset's numbers."""
    waiting = found.waiting or Waiting()
    counts = count(found.totals, found.waiting)
    rate = NO_RATE
    if not scene.reachable:
        rate = Rate()
    elif scene.workers:
        widen = counts.live > 0 and scene.obstacle is None and waiting.paused is None
        rate = measure(found.tallies, session=waiting.session, now=scene.now, widen=widen)
    state = _state(counts, waiting, scene)
    eta_s, eta_reason = _outlook(counts, rate, state, scene)
    return Part(
        state=state,
        counts=counts,
        percent=_percent(counts),
        completion_tokens=_tokens(found.totals),
        rate=rate,
        eta_s=eta_s,
        eta_reason=eta_reason,
        reasons=_reasons(found.totals),
        oldest_in_flight_s=waiting.oldest_in_flight_s,
        session_started_at=waiting.session,
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


def _outlook(counts: Counts, rate: Rate, state: State, scene: Scene) -> tuple[float | None, str | None]:
    """Return the seconds that the queued samples will take, or why nobody can know."""
    settled = rate.settled_per_s
    rules = (
        (not counts.left, "nothing to do"),
        (not scene.reachable, "without Redis nobody can tell what is queued"),
        (not counts.live, "nothing is queued"),
        (state is State.PAUSED, "paused"),
        (not scene.workers, "no worker is running"),
        (scene.obstacle is not None, scene.obstacle),
        (not scene.takers, "every worker is ending"),
        (counts.orphaned == counts.live, "the rest waits until a dead worker's lease runs out"),
        (settled is None, "no finished sample yet in this run"),
        (settled == 0.0, f"no sample finished in the last {rate.window_s or 0:.0f} seconds"),
    )
    for holds, reason in rules:
        if holds:
            return None, reason
    return round(counts.live / (settled or 1.0), 1), None


def _percent(counts: Counts) -> float | None:
    if not counts.samples:
        return None
    return math.floor(1000 * (counts.samples - counts.left) / counts.samples) / 10


def _tokens(totals: Totals) -> CompletionTokens:
    accepted = totals.by_kind.get(Kind.ACCEPTED)
    if accepted is None or not accepted.n:
        return CompletionTokens()
    return CompletionTokens(total=accepted.tokens, mean=round(accepted.tokens / accepted.n, 1))


def _reasons(totals: Totals) -> dict[str, dict[str, int]]:
    reasons: dict[str, dict[str, int]] = {kind.value: {} for kind in (Kind.REJECTED, Kind.FAILED, Kind.REFUSED)}
    for (kind, reason), n in sorted(totals.by_reason.items(), key=lambda item: -item[1]):
        if kind.value in reasons and n > 0:
            reasons[kind.value][reason] = n
    return reasons


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
            "No worker is running; start some with producer up, or celery -A app worker.",
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


def combine(parts: Sequence[Part], scene: Scene, notes: Sequence[str]) -> Part:
    """Return the sum of all datasets, with the notes that belong to none of them."""
    counts = _add_counts([part.counts for part in parts])
    state = next((state for state in State if any(part.state is state for part in parts)), State.EMPTY)
    # What is paused or lost neither finishes nor keeps the rest from finishing.
    moving = [part for part in parts if part.counts.live and part.state is not State.PAUSED]
    rate = _add_rates([part.rate for part in parts])
    ahead = Counts(
        left=counts.left,
        queued=sum(part.counts.queued or 0 for part in moving),
        in_flight=sum(part.counts.in_flight or 0 for part in moving),
        orphaned=sum(part.counts.orphaned or 0 for part in moving),
    )
    eta_s, eta_reason = _outlook(ahead, _add_rates([part.rate for part in moving]), state, scene)
    if counts.live and not moving:
        eta_reason = "paused"
    tokens = sum(part.completion_tokens.total for part in parts)
    ages = [part.oldest_in_flight_s for part in parts if part.oldest_in_flight_s is not None]
    starts = [part.session_started_at for part in parts if part.session_started_at is not None]
    return Part(
        state=state,
        counts=counts,
        percent=_percent(counts),
        completion_tokens=CompletionTokens(
            total=tokens, mean=round(tokens / counts.accepted, 1) if counts.accepted else None
        ),
        rate=rate,
        eta_s=eta_s,
        eta_reason=eta_reason,
        reasons=_add_reasons([part.reasons for part in parts]),
        oldest_in_flight_s=max(ages, default=None),
        session_started_at=min(starts, default=None),
        notes=list(notes),
    )


def _add_counts(counts: Sequence[Counts]) -> Counts:
    sums: dict[str, int | None] = {}
    for field in Counts.__struct_fields__:
        values = [cast("int | None", getattr(one, field)) for one in counts]
        sums[field] = None if None in values else sum(value or 0 for value in values)
    return Counts(**cast("dict[str, int]", sums))


def _add_rates(rates: Sequence[Rate]) -> Rate:
    known = [rate for rate in rates if rate.samples_per_s is not None]
    if not known:
        return Rate() if rates else NO_RATE
    fields = ("samples_per_s", "tokens_per_s", "rejected_per_s", "failed_per_s")
    sums = {field: round(sum(getattr(rate, field) or 0.0 for rate in known), 3) for field in fields}
    return Rate(**sums, window_s=max((rate.window_s for rate in known if rate.window_s is not None), default=None))


def _add_reasons(reasons: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = {kind.value: {} for kind in (Kind.REJECTED, Kind.FAILED, Kind.REFUSED)}
    for one in reasons:
        for kind, by_reason in one.items():
            for reason, n in by_reason.items():
                sums[kind][reason] = sums[kind].get(reason, 0) + n
    return sums
