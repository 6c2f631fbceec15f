"""The lines of a dataset: how far, how fast, when done, and what failed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from app.snapshot import Counts, Part, State
from app.surroundings import clock_time
from producer.monitor.layout import Line, Span, bar, flow, sparkline
from producer.monitor.picture import Example
from producer.status import STYLES, cells, eta_words, number_words, rate_words

HEAD, MORE_HEAD, BAR, PACE, OUTCOMES, FAILURES, DETAILS = 10, 12, 20, 30, 40, 50, 80
"""How important the lines are: the heads of all datasets come before the bar of the first."""
_OVER = frozenset({State.DONE, State.EMPTY})
_WIDEST_BAR = 100
_WIDEST_SPARK = 60
_NARROWEST_SPARK = 8
_FEWEST_VALUES = 4
_SHOWN_REASONS = 6


@dataclasses.dataclass(frozen=True)
class Marks:
    """The characters of bars and sparklines."""

    accepted: str
    rejected: str
    failed: str
    in_flight: str
    rest: str
    plain: bool


BLOCKS = Marks("█", "▓", "▚", "░", "·", plain=False)
ASCII = Marks("#", "r", "x", ">", ".", plain=True)


def head(name: str, part: Part, width: int) -> list[Line]:
    """Return a dataset's name, state, counts and ETA."""
    counts = part.counts
    done = f"{counts.samples - counts.left:,} of {counts.samples:,}"
    items = [
        Span(name, "bold"),
        Span(part.state.value, STYLES[part.state]),
        Span("" if part.percent is None else f"{part.percent:.1f} %", "bold"),
        Span(done),
        Span(eta_words(part) if counts.left else ""),
    ]
    return flow(items, width, rank=HEAD, indent=2)


def overview(
    name: str, part: Part, width: int, *, marks: Marks, paces: Sequence[float | None], step_s: float
) -> Iterator[Line]:
    """Yield how far it is, and how fast it goes."""
    late = DETAILS if part.state in _OVER else 0  # what is over matters less than what runs
    yield from head(name, part, width)
    yield Line(BAR + late, bar(_shares(part.counts, marks), part.counts.samples, min(width, _WIDEST_BAR)))
    yield from flow(_outcomes(part, marks), width, rank=OUTCOMES + late)
    if part.state is not State.EMPTY:
        for line in _pace(part, width, paces=paces, step_s=step_s, marks=marks):
            yield dataclasses.replace(line, rank=line.rank + late)


def block(
    name: str,
    part: Part,
    width: int,
    *,
    marks: Marks,
    paces: Sequence[float | None],
    step_s: float,
    examples: Sequence[Example],
) -> Iterator[Line]:
    """Yield all lines of a dataset."""
    yield from overview(name, part, width, marks=marks, paces=paces, step_s=step_s)
    yield from _failures(part, width, examples)
    yield from flow(_amounts(part), width, rank=DETAILS)
    yield from _reasons("rejected", part.reasons.get("rejected", {}), width)
    yield from _reasons("failed calls", part.call_faults, width)


def _shares(counts: Counts, marks: Marks) -> Sequence[tuple[int, Span]]:
    return (
        (counts.accepted, Span(marks.accepted, "green")),
        (counts.rejected, Span(marks.rejected, "yellow")),
        (counts.failed, Span(marks.failed, "red")),
        (counts.in_flight or 0, Span(marks.in_flight, "cyan")),
        (counts.left, Span(marks.rest, "dim")),
    )


def _outcomes(part: Part, marks: Marks) -> list[Span]:
    """Return the counts; those that the bar draws begin with its character."""
    counts = part.counts
    waiting = counts.left or part.state is State.UNKNOWN
    items = [
        Span(f"{marks.accepted} accepted {counts.accepted:,}", "green"),
        Span(f"{marks.rejected} rejected {counts.rejected:,}", "yellow" if counts.rejected else ""),
        Span(f"{marks.failed} failed {counts.failed:,}", "red" if counts.failed else ""),
    ]
    if waiting:
        in_flight = f"{marks.in_flight} with workers {number_words(counts.in_flight)}"
        items.append(Span(in_flight, "cyan" if counts.in_flight else ""))
        items.append(Span(f"{marks.rest} queued {number_words(counts.queued)}"))
    if counts.refused:
        items.append(Span(f"refused {counts.refused:,}"))
    if counts.orphaned:
        items.append(Span(f"orphaned {counts.orphaned:,}", "yellow"))
    if counts.missing:
        items.append(Span(f"missing {counts.missing:,}", "bold red"))
    return items


def _pace(part: Part, width: int, *, paces: Sequence[float | None], step_s: float, marks: Marks) -> list[Line]:
    now, longer, run = part.rates.now, part.rates.five_minutes, part.rates.run
    items = [
        Span(f"{rate_words(now.samples_per_s)} samples/s", "bold"),
        Span(f"{rate_words(now.tokens_per_s)} tokens/s"),
        Span("" if longer.samples_per_s is None else f"5 min {rate_words(longer.samples_per_s)}"),
        Span("" if run.samples_per_s is None else f"run {rate_words(run.samples_per_s)}"),
    ]
    if part.state in _OVER:
        items = [] if run.samples_per_s is None else [Span(f"run {rate_words(run.samples_per_s)} samples/s")]
    elif now.samples_per_s is None and part.state is State.UNKNOWN:
        items = items[2:]
    lines = flow(items, width, rank=PACE)
    spark = _spark(paces, step_s, marks, room=width - cells(lines[-1].text) - 3 if lines else width)
    if spark is not None and lines:
        lines[-1] = Line(lines[-1].rank, (*lines[-1].spans, Span("   "), *spark))
    elif (spark := _spark(paces, step_s, marks, room=width)) is not None:
        lines.append(Line(PACE + 1, spark))
    return lines


def _spark(paces: Sequence[float | None], step_s: float, marks: Marks, *, room: int) -> tuple[Span, ...] | None:
    """Return the sparkline with its length of time and its top, if there is room."""
    known = [value for value in paces if value is not None]
    first = next((number for number, value in enumerate(paces) if value is not None), None)
    if first is None or len(known) < _FEWEST_VALUES or not any(known):
        return None  # nothing to draw; work that was over before the first point was stored is no rate of 0
    if paces[-1] is None:  # the step of now, which has only begun
        paces = paces[:-1]
    minutes = (len(paces) - first) * step_s / 60
    words = f" {minutes:.0f} min, top {rate_words(max(known))}/s"
    width = min(_WIDEST_SPARK, room - len(words))
    if width < _NARROWEST_SPARK:
        return None
    return Span(sparkline(paces, width, plain=marks.plain), "green"), Span(words, "dim")


def _failures(part: Part, width: int, examples: Sequence[Example]) -> Iterator[Line]:
    counted = part.reasons.get("failed", {})
    known = {example.reason: example for example in examples}
    for reason, n in list(counted.items())[:_SHOWN_REASONS]:
        example = known.get(reason)
        when = f" ({clock_time(example.last_at, now=time.time())})" if example and example.last_at else ""
        said = f": {example.error}" if example and example.error else ""
        words = f"failed {reason} {n:,}{when}{said}"
        yield from flow([Span(words, "red")], width, rank=FAILURES, indent=2, most=2)
    if len(counted) > _SHOWN_REASONS:
        yield from flow([f"and {len(counted) - _SHOWN_REASONS} more kinds of failures"], width, rank=FAILURES + 1)


def _amounts(part: Part) -> list[str]:
    items = []
    tokens, latency = part.tokens, part.latency
    if tokens.mean is not None:
        p95 = "" if tokens.p95 is None else f", 95 % below {tokens.p95:,.0f}"
        items.append(f"tokens {tokens.total:,}: mean {tokens.mean:,.0f}{p95}")
    if latency.mean_s is not None:
        p95 = "" if latency.p95_s is None else f", 95 % below {latency.p95_s:,.3g} s"
        items.append(f"latency mean {latency.mean_s:,.3g} s{p95}")
    return items


def _reasons(what: str, counted: dict[str, int], width: int) -> list[Line]:
    if not counted:
        return []
    shown = [Span(f"{reason} {n:,}", "dim") for reason, n in list(counted.items())[:_SHOWN_REASONS]]
    more = [Span(f"and {len(counted) - len(shown)} more", "dim")] if len(counted) > len(shown) else []
    return flow([Span(f"{what}:", "dim"), *shown, *more], width, rank=DETAILS + 5, indent=2)
