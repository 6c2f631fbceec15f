"""The whole screen of a view: what needs a person first, then datasets, model servers and workers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

from app.snapshot import Endpoint, Part, State
from app.surroundings import clock_time
from producer.monitor.layout import Line, Span, fit, flow, sentence
from producer.monitor.parts import ASCII, BLOCKS, HEAD, block, head, overview
from producer.monitor.picture import ALL, Picture
from producer.monitor.view import View
from producer.status import cells, duration

TITLE, NOTES, SERVERS, WORKERS, BLANK = 0, 2, 60, 70, 90
_NARROWEST = 20
_WHOLE_BLOCKS = 3
"""Datasets up to which finished ones are shown in full."""
_SHOWN_NOTES = 8
_NOTE_LINES = 3
_LATE_HEARTBEAT_S = 15.0
_OVER = frozenset({State.DONE, State.EMPTY})
_STATE_STYLES = {"up": "green", "down": "bold red", "paused": "bold red"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """The window that is drawn into."""

    width: int
    height: int
    interval_s: float
    unicode: bool = True
    """Whether it can show more than ASCII."""


def draw(view: View, frame: Frame) -> list[Line]:
    """Return at most `height` lines, none wider than `width`."""
    width = max(_NARROWEST, frame.width)
    lines = [_title(view, width, frame.interval_s)]
    if view.trouble:
        lines += sentence(view.trouble, width, rank=TITLE + 1, style="bold red", most=_NOTE_LINES)
    if view.picture is None:
        if not view.trouble:
            waited = f" ({view.age_s():.0f} s)" if view.age_s() >= 2 else ""
            lines += sentence(f"Reading the numbers{waited} ...", width, rank=TITLE + 1)
    else:
        lines += _body(view.picture, view, width, frame)
    while lines and not lines[-1].spans:
        lines.pop()
    return fit(lines, max(1, frame.height), width)


def _title(view: View, width: int, interval_s: float) -> Line:
    left = "promptmill"
    if view.picture is not None:
        left += f" {clock_time(view.picture.at, now=time.time())}"
        if view.age_s() > 2 * interval_s + 1:
            left += f", {duration(int(view.age_s()))} old" if view.age_s() >= 60 else f", {view.age_s():.0f} s old"
    right = "q quits"
    if view.source and cells(left) + cells(view.source) + cells(right) + 4 <= width:
        left += f"  {view.source}"
    space = width - cells(left) - len(right)
    if space < 1:
        return Line(TITLE, (Span(left[:width], "bold"),))
    return Line(TITLE, (Span(left, "bold"), Span(" " * space), Span(right, "dim")))


def _body(picture: Picture, view: View, width: int, frame: Frame) -> Iterator[Line]:
    yield from _notes(picture, width)
    yield Line(BLANK)
    if not picture.datasets:
        yield from sentence("No dataset yet; producer enqueue makes one.", width, rank=HEAD)
    yield from _datasets(picture, width, frame)
    yield from _servers(picture, width)
    yield from _workers(picture, view, width)


def _notes(picture: Picture, width: int) -> Iterator[Line]:
    """Yield what may need a person: of everything together first, then of single datasets."""
    if not picture.broker.reachable:
        for line in sentence(_of_the_files(picture), width, rank=NOTES, style="bold red"):
            yield Line(NOTES, line.spans)
    notes = list(picture.totals.notes)
    for name, part in picture.datasets.items():
        notes += [f"{name}: {note}" for note in part.notes if note not in notes]
    for note in notes[:_SHOWN_NOTES]:
        yield from sentence(f"! {note}", width, rank=NOTES + 1, style="yellow", most=_NOTE_LINES)
    if len(notes) > _SHOWN_NOTES:
        yield from sentence(
            f"! and {len(notes) - _SHOWN_NOTES} more; producer status shows all.", width, rank=NOTES + 2
        )


def _of_the_files(picture: Picture) -> str:
    """Say what the numbers are made of where Redis is not there, and how old they are."""
    if picture.told_at is None:
        return "These are the numbers of the files alone; no worker has left others."
    age = max(0.0, picture.at - picture.told_at)
    when = f"{clock_time(picture.told_at, now=time.time())}, {duration(int(age))} ago"
    return f"These are the numbers of the files; a worker last wrote them at {when}."


def _datasets(picture: Picture, width: int, frame: Frame) -> Iterator[Line]:
    parts: list[tuple[str, str, Part]] = [(name, name, part) for name, part in picture.datasets.items()]
    # What runs or needs somebody comes first.
    parts.sort(key=lambda item: item[2].state in _OVER and not item[2].notes)
    if len(parts) > 1:
        parts.insert(0, (ALL, "all datasets", picture.totals))
    for key, name, part in parts:
        if key and len(picture.datasets) > _WHOLE_BLOCKS and part.state in _OVER:
            yield from head(name, part, width)
            continue
        marks, paces = BLOCKS if frame.unicode else ASCII, picture.paces.get(key, [])
        if key:
            examples = picture.examples.get(key, [])
            yield from block(name, part, width, marks=marks, paces=paces, step_s=picture.step_s, examples=examples)
        else:
            yield from overview(name, part, width, marks=marks, paces=paces, step_s=picture.step_s)
        yield Line(BLANK)


def _servers(picture: Picture, width: int) -> Iterator[Line]:
    if not picture.endpoints:
        return
    for endpoint in picture.endpoints:
        yield from flow(_server(endpoint, picture.at), width, rank=SERVERS, indent=2)
    yield Line(BLANK)


def _server(endpoint: Endpoint, now: float) -> Iterator[Span]:
    yield Span(endpoint.url or endpoint.name)
    since = f" for {duration(now - endpoint.since)}" if endpoint.since and endpoint.state != "up" else ""
    yield Span(f"{endpoint.state}{since}", _STATE_STYLES.get(endpoint.state, ""))
    bound = "" if endpoint.bound is None else f" of {endpoint.bound:,}"
    yield Span(f"{endpoint.in_flight:,}{bound} in flight")
    if endpoint.latency_s is not None:
        yield Span(f"{endpoint.latency_s:,.3g} s")
    gauges = endpoint.gauges or {}
    said = [f"{word} {gauges[word]:,.0f}" for word in ("running", "waiting") if word in gauges]
    said += [f"cache {100 * gauges['kv']:.0f} %"] if "kv" in gauges else []
    if said:
        yield Span(f"itself: {', '.join(said)}", "dim")


def _workers(picture: Picture, view: View, width: int) -> Iterator[Line]:
    if not picture.workers:
        return
    versions = {str(worker.get("version") or "") for worker in picture.workers}
    for worker in picture.workers:
        yield from flow(_worker(worker, picture, view, several=len(versions) > 1), width, rank=WORKERS, indent=2)


def _worker(worker: dict[str, Any], picture: Picture, view: View, *, several: bool) -> Iterator[Span]:
    yield Span(str(worker.get("node") or worker.get("owner") or "worker").partition("/")[0])
    state = str(worker.get("state") or "")
    yield Span(state, "green" if state == "running" else "yellow")
    yield Span(f"{int(worker.get('busy') or 0):,} of {int(worker.get('slots') or 0):,} slots busy")
    beat = worker.get("at")
    if isinstance(beat, (int, float)) and math.isfinite(beat):
        age = max(0.0, picture.at - beat) + (view.age_s() if view.trouble else 0.0)
        yield Span(f"heartbeat {age:.0f} s ago", "bold red" if age > _LATE_HEARTBEAT_S else "dim")
    if several:
        yield Span(f"version {worker.get('version')}", "yellow")
