"""Shows a snapshot once: as JSON, or as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from app import progress
from app.errors import EXIT_INCOMPLETE, EXIT_OK
from app.snapshot import Part, Rate, Rates, Snapshot, State
from producer.texts import counted

if TYPE_CHECKING:
    from rich.console import Group

_GAP = "   "
_NARROWEST = 20
_BAR_MAX = 40
STYLES = {
    State.RUNNING: "green",
    State.DONE: "green",
    State.STALLED: "bold red",
    State.INCOMPLETE: "bold red",
    State.UNKNOWN: "bold red",
    State.WAITING: "yellow",
    State.PAUSED: "yellow",
    State.EMPTY: "dim",
}
_SHOWN_REASONS = 5


def status_json(snapshot: Snapshot) -> bytes:
    """Return the snapshot as strict JSON, indented by two, ending in a newline."""
    return progress.encode(snapshot)


def exit_code(snapshot: Snapshot) -> int:
    """Return 0 while all is well, 1 when something failed, is incomplete or needs a person.

    1: samples failed or are neither done nor queued; samples are left and a model server is down or paused, or
    everything stalls, or Redis cannot be reached. 0: running, queued, paused, done, also with rejected or refused ones.
    """
    counts = snapshot.totals.counts
    sick = any(endpoint.state != "up" for endpoint in snapshot.endpoints)
    stuck = snapshot.totals.state in {State.STALLED, State.UNKNOWN} or sick or not snapshot.broker.reachable
    bad = counts.failed > 0 or bool(counts.missing) or (counts.left > 0 and stuck)
    return EXIT_INCOMPLETE if bad else EXIT_OK


def render(snapshot: Snapshot, *, width: int) -> Group:
    """Return what to show at `width` columns: a block per dataset, the sum of several, servers, workers, notes."""
    from rich.console import Group  # noqa: PLC0415 - slow to import, and --json does without
    from rich.text import Text  # noqa: PLC0415

    width = max(_NARROWEST, width)
    return Group(*(Text(line, style=style, no_wrap=True, overflow="crop") for line, style in _lines(snapshot, width)))


def as_text(snapshot: Snapshot, *, width: int = 100) -> str:
    """Return the same as plain text: no colour, no control characters."""
    return "".join(f"{line.rstrip()}\n" for line, _style in _lines(snapshot, max(_NARROWEST, width)))


_FINISHED = frozenset({State.DONE, State.EMPTY})
_WHOLE_BLOCKS = 3
"""Datasets up to which finished ones are shown in full."""
_Line = tuple[str, str]
"""A line's text and its style."""


def _lines(snapshot: Snapshot, width: int) -> Iterator[_Line]:
    if len(snapshot.datasets) > 1:
        yield from _block("all datasets", snapshot.totals, width, own_notes=False)
        yield "", ""
    # What runs or needs somebody comes first: a small screen shows the beginning.
    shown = sorted(snapshot.datasets.items(), key=lambda item: item[1].state in _FINISHED and not item[1].notes)
    for name, part in shown:
        if len(shown) > _WHOLE_BLOCKS and part.state in _FINISHED and not part.notes:
            counts = part.counts
            words = [printable(name), part.state.value, counted(counts.samples, "sample"), f"failed {counts.failed:,}"]
            yield from _styled(_wrap(words, width), STYLES[part.state])
            continue
        yield from _block(name, part, width)
        yield "", ""
    if not snapshot.datasets:
        yield from _styled(_wrap(["No dataset yet;", "producer enqueue makes one."], width, gap=" "), "")
    yield from _styled(_wrap(_surroundings(snapshot), width), "dim")
    for note in snapshot.totals.notes:
        yield from _styled(_wrap(f"! {note}".split(" "), width, gap=" "), "yellow")


def _block(name: str, part: Part, width: int, *, own_notes: bool = True) -> Iterator[_Line]:
    yield from _styled(_wrap([printable(name), part.state.value], width), STYLES[part.state])
    counts = part.counts
    done = f"{counts.samples - counts.left:,} of {counts.samples:,}"
    percent = "" if part.percent is None else f"{part.percent:.1f} %"
    yield from _styled(_wrap([_bar(part.percent or 0.0, min(_BAR_MAX, width - 20)), percent, done], width), "")
    yield from _styled(_wrap(_outcomes(part), width), "")
    yield from _styled(_wrap(_pace(part), width), "")
    for kind, reasons in part.reasons.items():
        if reasons:
            shown = [f"{reason} {n:,}" for reason, n in list(reasons.items())[:_SHOWN_REASONS]]
            more = len(reasons) - len(shown)
            yield from _styled(_wrap([f"{kind}:", *shown, *([f"and {more} more"] if more else [])], width), "dim")
    if part.call_faults:
        shown = [f"{kind} {n:,}" for kind, n in list(part.call_faults.items())[:_SHOWN_REASONS]]
        yield from _styled(_wrap(["failed calls:", *shown], width), "dim")
    for note in part.notes if own_notes else ():
        yield from _styled(_wrap(f"! {note}".split(" "), width, gap=" "), "yellow")


def _outcomes(part: Part) -> list[str]:
    counts = part.counts
    settled = [f"{field} {getattr(counts, field):,}" for field in ("accepted", "rejected", "failed", "refused")]
    waiting = [
        f"{word} {number_words(n)}" for word, n in (("queued", counts.queued), ("with workers", counts.in_flight))
    ]
    if counts.orphaned:
        waiting.append(f"orphaned {counts.orphaned:,}")
    return [*settled, *waiting, f"missing {number_words(counts.missing)}"]


def number_words(n: int | None) -> str:
    """Return a count, or that it is not known."""
    return "unknown" if n is None else f"{n:,}"


def _pace(part: Part) -> list[str]:
    now = part.rates.now
    items = [f"{rate_words(now.samples_per_s)} samples/s", f"{rate_words(now.tokens_per_s)} tokens/s"]
    longer = ((f"{name} {rate_words(rate.samples_per_s)}", rate) for name, rate in _longer_windows(part.rates))
    if shown := [words for words, rate in longer if rate.samples_per_s is not None]:
        items.append(f"({', '.join(shown)})")
    if part.tokens.mean is not None:
        items.append(_mean_and_p95("tokens", f"{part.tokens.mean:,.0f}", part.tokens.p95, "{:,.0f}"))
    if part.latency.mean_s is not None:
        items.append(_mean_and_p95("latency", f"{part.latency.mean_s:,.3g} s", part.latency.p95_s, "{:,.3g} s"))
    if part.counts.left:
        items.append(eta_words(part))
    return items


def _longer_windows(rates: Rates) -> tuple[tuple[str, Rate], ...]:
    return (("5 min", rates.five_minutes), ("run", rates.run))


def _mean_and_p95(what: str, mean: str, p95: float | None, form: str) -> str:
    return f"{what} mean {mean}" + ("" if p95 is None else f", p95 {form.format(p95)}")


def eta_words(part: Part) -> str:
    """Return the ETA and its range, or why there is none; nothing for what is finished."""
    if not part.counts.left and part.counts.left is not None:
        return ""
    eta = part.eta
    if eta.seconds is None:
        return f"ETA unknown: {printable(eta.reason or '')}"
    span = "" if eta.low_s is None or eta.high_s is None else f" ({duration(eta.low_s)} to {duration(eta.high_s)})"
    return f"ETA {duration(eta.seconds)}{span}"


def rate_words(rate: float | None) -> str:
    """Return a rate with three significant digits, `?` while unknown."""
    if rate is None:
        return "?"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss, with days before them where there are any."""
    whole = math.ceil(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


def _surroundings(snapshot: Snapshot) -> list[str]:
    redis = "ok" if snapshot.broker.reachable else "not reached"
    items = [f"Redis {redis}"]
    if snapshot.broker.reachable:
        busy = sum(int(worker.get("busy") or 0) for worker in snapshot.workers)
        slots = sum(int(worker.get("slots") or 0) for worker in snapshot.workers)
        items.append(f"workers {len(snapshot.workers)} ({busy:,} of {slots:,} slots busy)")
    for endpoint in snapshot.endpoints:
        bound = f" of {endpoint.bound:,}" if endpoint.bound is not None else ""
        where = printable(endpoint.url or endpoint.name)
        items.append(f"{where} {endpoint.state} ({endpoint.in_flight:,}{bound} in flight)")
    return items


def _bar(percent: float, cells: int) -> str:
    full = int(cells * percent / 100)
    return f"[{'#' * full}{'-' * (cells - full)}]" if cells > 2 else ""


def printable(text: str) -> str:
    """Return the text with every control character made `?`, so that foreign words cannot steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _styled(lines: Iterable[str], style: str) -> Iterator[_Line]:
    return ((line, style) for line in lines)


def _wrap(items: Sequence[str], width: int, *, gap: str = _GAP) -> Iterator[str]:
    """Put items side by side; one that does not fit begins a new line, one that is too long is cut at the edge."""
    line = ""
    for item in map(printable, items):
        if not item:
            continue
        joined = f"{line}{gap}{item}" if line else item
        if cells(joined) <= width:
            line = joined
            continue
        if line:
            yield line
        *whole, line = pieces(item, width)
        yield from whole
    if line:
        yield line


def pieces(item: str, width: int) -> list[str]:
    """Return an item in pieces of at most `width` columns, broken at spaces where it has some."""
    whole, piece = [], ""
    for word in item.split(" "):
        joined = f"{piece} {word}" if piece else word
        while cells(joined) > width:
            cut = piece or _head(joined, width)
            whole.append(cut)
            joined = joined[len(cut) :].lstrip(" ")
            piece = ""
        piece = joined
    return [*whole, piece]


def _head(text: str, width: int) -> str:
    """Return as many first characters as `width` columns hold (at least one)."""
    end = len(text)
    while end > 1 and cells(text[:end]) > width:
        end -= 1
    return text[:end]


def cells(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415

    return cell_len(text)
