"""Charts as SVG in a page's own colours: lines over time, bars of a distribution, one bar of shares."""

from __future__ import annotations

import dataclasses
import datetime as dt
import html
import math
from collections.abc import Sequence

from app.histogram import PER_DECADE

WIDTH, HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
_TICKS_UP = 4
_TICKS_ALONG = 5
_FEWEST_BARS = 12
_TIME_STEPS_S = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line of a chart; where nothing is known it is broken."""

    name: str
    style: str
    """A class of the style sheet: a, b, good, warn, bad."""
    values: Sequence[float | None]
    area: bool = False
    """Whether the ground below it is filled."""


def number(value: float) -> str:
    """Return a number as short as people write it."""
    if value >= 1_000_000:
        return f"{value / 1_000_000:,.3g}M".replace(",", "")
    if value >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def over_time(title: str, times: Sequence[float], curves: Sequence[Curve], *, unit: str) -> str:
    """Return a chart of curves over Unix times; nothing where no curve has two values."""
    known = [value for curve in curves for value in curve.values if value is not None]
    if len(known) < 2 or len(times) < 2 or times[-1] <= times[0]:
        return ""
    top, ticks = _scale(max(known))
    frame = _Frame(times[0], times[-1], top)
    parts = [_grid(frame, ticks), _time_axis(frame)]
    parts += [_drawn(frame, curve, run) for curve in curves for run in _runs(times, curve.values)]
    legend = _legend(curves) if len(curves) > 1 else ""
    highest = [(curve.name, max(values)) for curve in curves if (values := _known(curve))]
    said = "; ".join(f"{name}: highest {number(value)} {unit}" for name, value in highest)
    return _figure(title, unit, legend, f"{title}. {said}.", "".join(parts))


def distribution(
    title: str, buckets: Sequence[tuple[float, int]], *, unit: str, mean: float | None, p95: float | None
) -> str:
    """Return a chart of (upper bound, count) in buckets whose bounds grow by a factor; nothing where there are none."""
    if not buckets:
        return ""
    factor = 10 ** (1 / PER_DECADE)
    # Values that are all alike make a few bars, not a wall.
    spare = factor ** (max(0, _FEWEST_BARS - round(PER_DECADE * math.log10(buckets[-1][0] / buckets[0][0])) - 1) / 2)
    low, high = buckets[0][0] / factor / spare, buckets[-1][0] * spare
    first, last = math.log(low), math.log(high)
    top, ticks = _scale(max(n for _bound, n in buckets))
    frame = _Frame(first, last, top)
    parts = [_grid(frame, ticks)]
    total = sum(n for _bound, n in buckets)
    for bound, n in buckets:
        left, right = frame.x(math.log(bound / factor)), frame.x(math.log(bound))
        y = frame.y(n)
        words = f"{number(bound / factor)} to {number(bound)} {unit}: {n:,} ({100 * n / total:.1f} %)"
        parts.append(
            f'<rect class="bar" x="{left + 0.5:.1f}" y="{y:.1f}" width="{max(1.0, right - left - 1):.1f}" '
            f'height="{frame.bottom - y:.1f}"><title>{html.escape(words)}</title></rect>'
        )
    parts.append(_value_axis(frame, low, high))
    parts += [_mark(frame, value, name) for value, name in ((mean, "mean"), (p95, "95 %")) if value]
    said = "" if mean is None or p95 is None else f" Mean {number(mean)}, 95 % below {number(p95)} {unit}."
    return _figure(title, unit, "", f"{title} of {total:,}.{said}", "".join(parts))


def _mark(frame: _Frame, value: float, name: str) -> str:
    """Return a line at a value, with its name."""
    x = min(frame.right, max(frame.left, frame.x(math.log(value))))
    anchor, shift = ("end", -4) if x > WIDTH * 0.75 else ("start", 4)
    y = _TOP + (10 if name == "mean" else 24)
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{frame.bottom}"/>'
        f'<text class="note" x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{name} {number(value)}</text>'
    )


def shares(parts: Sequence[tuple[str, str, int]]) -> str:
    """Return one bar of (name, style, count), each as long as its share, with its legend."""
    total = sum(n for _name, _style, n in parts)
    if not total:
        return ""
    x, drawn = 0.0, []
    for name, style, n in parts:
        wide = 1000 * n / total
        if n:
            words = html.escape(f"{name} {n:,} ({100 * n / total:.2f} %)")
            drawn.append(
                f'<rect class="{style}" x="{x:.2f}" y="0" width="{max(2.0, wide):.2f}" height="22">'
                f"<title>{words}</title></rect>"
            )
        x += wide
    items = "".join(
        f'<li><i class="{style}"></i>{html.escape(name)} <b>{n:,}</b> <small>{100 * n / total:.1f} %</small></li>'
        for name, style, n in parts
    )
    said = html.escape(", ".join(f"{name} {n:,}" for name, _style, n in parts))
    return (
        f'<svg class="shares" viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'{"".join(drawn)}</svg><ul class="legend">{items}</ul>'
    )


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Where values lie in the picture."""

    first: float
    last: float
    top: float
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    bottom: float = HEIGHT - _BOTTOM

    def x(self, value: float) -> float:
        """Return the place along."""
        span = (self.last - self.first) or 1.0
        return self.left + (value - self.first) / span * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the place up."""
        return self.bottom - min(1.0, value / self.top) * (self.bottom - _TOP)


def _scale(highest: float) -> tuple[float, list[float]]:
    """Return a round number not below the highest value, and round numbers up to it."""
    if highest <= 0:
        return 1.0, [0.0, 1.0]
    rough = highest / _TICKS_UP
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    count = math.ceil(highest / step - 1e-9)
    return step * count, [step * place for place in range(count + 1)]


def _known(curve: Curve) -> list[float]:
    return [value for value in curve.values if value is not None]


def _runs(times: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(times, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _drawn(frame: _Frame, curve: Curve, run: Sequence[tuple[float, float]]) -> str:
    if len(run) == 1:
        (at, value) = run[0]
        return f'<circle class="dot {curve.style}" cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}" r="2"/>'
    path = " ".join(f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in run)
    line = f'<polyline class="line {curve.style}" points="{path}"/>'
    if not curve.area:
        return line
    begin, end = frame.x(run[0][0]), frame.x(run[-1][0])
    ground = f"{begin:.1f},{frame.bottom} {path} {end:.1f},{frame.bottom}"
    return f'<polygon class="area {curve.style}" points="{ground}"/>{line}'


def _grid(frame: _Frame, ticks: Sequence[float]) -> str:
    return "".join(
        f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{frame.y(tick):.1f}" y2="{frame.y(tick):.1f}"/>'
        f'<text x="{frame.left - 6}" y="{frame.y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in ticks
    )


def _time_axis(frame: _Frame) -> str:
    span = frame.last - frame.first
    step = next((step for step in _TIME_STEPS_S if span / step <= _TICKS_ALONG), _TIME_STEPS_S[-1])
    shift = dt.datetime.fromtimestamp(frame.first, dt.UTC).astimezone().utcoffset() or dt.timedelta()
    offset = shift.total_seconds()
    form = "%H:%M:%S" if step < 60 else "%H:%M" if span < 86400 else "%d %b %H:%M" if step < 86400 else "%d %b"
    parts, at = [], math.ceil((frame.first + offset) / step) * step - offset
    while at <= frame.last:
        x = frame.x(at)
        words = dt.datetime.fromtimestamp(at, dt.UTC).astimezone().strftime(form)
        anchor = "start" if x < frame.left + 25 else "end" if x > frame.right - 25 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{words}</text>')
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>')
        at += step
    return "".join(parts)


def _value_axis(frame: _Frame, low: float, high: float) -> str:
    candidates = [digit * 10.0**power for power in range(-3, 8) for digit in (1, 2, 5)]
    inside = [value for value in candidates if low * 0.999 <= value <= high * 1.001]
    if len(inside) > 2 * _TICKS_ALONG:
        inside = [value for value in inside if math.log10(value).is_integer()]
    parts = []
    for value in inside:
        x = frame.x(math.log(value))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>')
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom}" y2="{frame.bottom + 4}"/>')
    return "".join(parts)


def _legend(curves: Sequence[Curve]) -> str:
    items = "".join(f'<li><i class="{curve.style}"></i>{html.escape(curve.name)}</li>' for curve in curves)
    return f'<ul class="legend">{items}</ul>'


def _figure(title: str, unit: str, legend: str, said: str, drawn: str) -> str:
    return (
        f"<figure><figcaption>{html.escape(title)} <small>{html.escape(unit)}</small></figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(said)}">{drawn}</svg></figure>'
    )
