"""The page of a report: one HTML document that needs nothing else, light and dark, readable on a phone and on paper."""

from __future__ import annotations

import datetime as dt
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec

import app as ground_floor
from app import history
from app.histogram import Histogram
from app.history import Point
from app.places import folder_name
from app.records import Kind
from app.snapshot import Part, State
from producer.report import charts
from producer.report.charts import Curve
from producer.report.gather import Report, Section
from producer.report.tables import Cell, Words, table
from producer.status import duration

_SHOWN_IDS = 5
_SHOWN_MODELS = 5
_STATES = {State.UNKNOWN: "unfinished"}
"""What the files can tell of a state."""
_NO_POINTS = "No points over time are stored: no worker ran for long enough."


def render(report: Report) -> str:
    """Return the document; the snapshot lies in it as JSON as well, for programs."""
    names = ", ".join(section.name for section in report.sections)
    style = resources.files("producer.report").joinpath("report.css").read_text(encoding="utf-8")
    numbers = msgspec.json.encode(report.snapshot).decode().replace("<", "\\u003c")
    sections = ([report.whole] if report.whole else []) + list(report.sections)
    body = "".join(_section(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(names)}: promptmill report'
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body><main>"
        f'<h1>Run report</h1><p class="faint">{_when(report.at)}, by promptmill {ground_floor.__version__}, out of the '
        f"files in {html.escape(str(report.folder))}</p>{_contents(sections)}{_notes(report.snapshot.totals.notes)}"
        f'{body}</main><script type="application/json" id="numbers">{numbers}</script></body></html>\n'
    )


def _contents(sections: Sequence[Section]) -> str:
    if len(sections) < 2:
        return ""
    links = "".join(f'<a href="#{_anchor(section)}">{html.escape(section.name)}</a>' for section in sections)
    return f'<nav aria-label="Datasets">{links}</nav>'


def _anchor(section: Section) -> str:
    return "all" if section.manifest is None else f"d-{html.escape(folder_name(section.name))}"


def _section(section: Section) -> str:
    part = section.part
    counts = part.counts
    shares = charts.shares(
        [
            ("accepted", "good", counts.accepted),
            ("rejected", "warn", counts.rejected),
            ("failed", "bad", counts.failed),
            ("left", "rest", counts.left),
        ]
    )
    state = f'<span class="state">{_STATES.get(part.state, part.state.value)}</span>'
    pieces = [
        f'<section><h2 id="{_anchor(section)}">{html.escape(section.name)}{state}</h2>',
        _notes(part.notes if section.manifest is not None else ()),
        shares,
        _figures(section),
        _charts(section),
        _failures(section),
        _settings(section),
        "</section>",
    ]
    return "".join(pieces)


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _figures(section: Section) -> str:
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}"
        f"{f'<small>{html.escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in _figure_items(section)
    )
    return f'<dl class="figures">{items}</dl>'


def _figure_items(section: Section) -> Iterator[tuple[str, str, str]]:
    part, scan = section.part, section.scan
    counts = part.counts
    yield "samples", f"{counts.samples:,}", "" if part.percent is None else f"{part.percent:.1f} % have an outcome"
    if counts.refused:
        yield "refused rows", f"{counts.refused:,}", "input that is no prompt"
    yield "output tokens", f"{part.tokens.total:,}", "of accepted samples"
    if scan.prompts.total:
        yield "prompt tokens", f"{scan.prompts.total:,.0f}", "of accepted samples"
    if scan.reasoning:
        yield "reasoning tokens", f"{scan.reasoning:,}", "among the output tokens"
    yield from _spread("tokens an answer", scan.lengths.histogram(), "")
    yield from _spread("latency", scan.latencies.histogram(), " s")
    yield from _speed(part)
    again = sum(n for calls, n in scan.attempts.items() if calls > 1)
    if again:
        yield "asked more than once", f"{again:,}", "and accepted in the end"


def _spread(name: str, values: Histogram, unit: str) -> Iterator[tuple[str, str, str]]:
    mean, half, p95 = values.mean, values.quantile(0.5), values.quantile(0.95)
    if mean is not None and half is not None and p95 is not None:
        yield name, f"{charts.number(mean)}{unit}", f"half below {charts.number(half)}, 95 % below {charts.number(p95)}"


def _speed(part: Part) -> Iterator[tuple[str, str, str]]:
    first, last = part.first_record_at, part.last_record_at
    if first is None or last is None or last <= first:
        return
    span = last - first
    tokens = charts.number(part.tokens.total / span)
    yield "first to last record", duration(span), f"{_when(first)} to {_when(last)}"
    yield "accepted a second", charts.number(part.counts.accepted / span), f"{tokens} tokens a second, pauses included"


def _charts(section: Section) -> str:
    points, scan = section.points, section.scan
    lengths, latencies, prompts = (values.histogram() for values in (scan.lengths, scan.latencies, scan.prompts))
    shown = "".join(
        [
            *_over_time(points),
            _distribution("Answer lengths", lengths, "tokens"),
            _distribution("Prompt lengths", prompts, "tokens"),
            _distribution("Latency of answered calls", latencies, "seconds"),
        ]
    )
    few = "" if len(points) > 1 else f'<p class="faint">{_NO_POINTS}</p>'
    return f'{few}<div class="charts">{shown}</div>' if shown else few


def _over_time(points: Sequence[Point]) -> Iterator[str]:
    times = [point.at for point in points]
    paces = history.rates_between(points)

    def paced(field: str) -> list[float | None]:
        # A pace belongs to the stretch that ends with its point.
        return [None, *(getattr(pace, field) for pace in paces)] if points else []

    def drawn(title: str, unit: str, *curves: Curve) -> str:
        return charts.over_time(title, times, curves, unit=unit)

    faults = paced("faults_per_s")
    yield drawn("Accepted samples", "a second", Curve("samples", "a", paced("samples_per_s"), area=True))
    yield drawn("Output tokens", "a second", Curve("tokens", "b", paced("tokens_per_s"), area=True))
    held = Curve("with workers", "a", [point.in_flight for point in points], area=True)
    yield drawn(
        "With workers", "samples", held, Curve("bound of the servers", "rest", [point.bound for point in points])
    )
    yield drawn("Left", "samples", Curve("left", "b", [point.left for point in points], area=True))
    latency = Curve("latency", "a", [point.latency_p95_s for point in points])
    yield drawn("Latency, 95 % below", "seconds", latency)
    if any(faults):
        yield drawn("Failed calls", "a second", Curve("failed calls", "bad", faults, area=True))


def _distribution(title: str, values: Histogram, unit: str) -> str:
    return charts.distribution(title, values.buckets(), unit=unit, mean=values.mean, p95=values.quantile(0.95))


def _failures(section: Section) -> str:
    rows: list[list[Cell]] = [
        [
            group.kind.value,
            group.reason,
            n,
            _when(group.first_at),
            _when(group.last_at),
            Words(group.error),
            Words("  ".join(list(group.ids)[-_SHOWN_IDS:][::-1])),
        ]
        for group, n in section.failures
    ]
    refused = section.part.reasons.get(Kind.REFUSED, {})
    rows += [[Kind.REFUSED.value, reason, n, "", "", "", ""] for reason, n in refused.items()]
    if section.manifest is None or not rows:
        return ""
    heads = ("outcome", "reason", "samples", "first", "newest", "the newest one's words", "newest samples")
    return f"<h3>Failed, rejected and refused</h3>{table(heads, rows)}"


def _settings(section: Section) -> str:
    known = section.manifest
    if known is None:
        return ""
    models = ", ".join(f"{html.escape(model)} ({n:,})" for model, n in section.scan.models.most_common(_SHOWN_MODELS))
    answered = f"<p>Answered by {models}.</p>" if models else ""
    settings: list[list[Cell]] = [
        [entry.fingerprint, _when(entry.since), Words("\n".join(_assignments(entry.content)))]
        for entry in reversed(known.settings)
    ]
    sources: list[list[Cell]] = [
        [Words(source.source), source.adapter, source.read, source.refused, _when(source.last_at)]
        for source in known.sources
    ]
    return (
        f"<h3>Settings</h3>{answered}{table(('fingerprint', 'since', 'content'), settings)}"
        f"<h3>Sources</h3>{table(('source', 'adapter', 'rows', 'refused', 'last read'), sources)}"
    )


def _assignments(content: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in content.items())


def _when(at: float | None) -> str:
    """Return a moment as local time."""
    if at is None:
        return ""
    return f"{dt.datetime.fromtimestamp(at, dt.UTC).astimezone():%Y-%m-%d %H:%M:%S}"
