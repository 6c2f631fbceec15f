"""Puts pieces of text side by side into lines of a terminal's width, and the most important lines into its height."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from producer.status import cells, pieces, printable

GAP = 3
"""Columns between two items."""
_CUT = " ..."
_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-:=+*#"


@dataclasses.dataclass(frozen=True)
class Span:
    """Text in one style."""

    text: str
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the screen; the smaller its rank, the later it is left out."""

    rank: int
    spans: tuple[Span, ...] = ()

    @property
    def text(self) -> str:
        """The line without its styles."""
        return "".join(span.text for span in self.spans)


def flow(
    items: Iterable[Span | str], width: int, *, rank: int, gap: int = GAP, indent: int = 0, most: int | None = None
) -> list[Line]:
    """Put items side by side; one that does not fit begins a new line, one that is too long is broken at its spaces.

    Lines after the first are indented, and one less important; of more than `most` lines the last one ends in `...`.
    """
    rows: list[list[Span]] = [[]]
    used = 0
    for item in items:
        span = item if isinstance(item, Span) else Span(item)
        text = printable(span.text)
        if not text:
            continue
        if used and used + gap + cells(text) <= width:
            rows[-1] += [Span(" " * gap), Span(text, span.style)]
            used += gap + cells(text)
            continue
        for piece in pieces(
            text, width if not used and len(rows) == 1 and cells(text) <= width else max(1, width - indent)
        ):
            if used:
                rows.append([Span(" " * indent)] if indent else [])
            rows[-1].append(Span(piece, span.style))
            used = cells(piece) + (indent if len(rows) > 1 else 0)
    if most is not None and len(rows) > most:
        rows = [*rows[:most]]
        rows[-1] = _shortened(rows[-1], width)
    return [Line(rank + (number > 0), tuple(row)) for number, row in enumerate(rows) if row]


def _shortened(row: list[Span], width: int) -> list[Span]:
    kept = list(row)
    while len(kept) > 1 and sum(cells(span.text) for span in kept) + len(_CUT) > width:
        kept.pop()
    while len(kept) > 1 and not kept[-1].text.strip():
        kept.pop()
    room = width - len(_CUT) - sum(cells(span.text) for span in kept[:-1])
    last = kept[-1]
    return [*kept[:-1], Span(f"{pieces(last.text, max(1, room))[0]}{_CUT}", last.style)]


def sentence(text: str, width: int, *, rank: int, style: str = "", most: int | None = None) -> list[Line]:
    """Return a sentence, wrapped at its spaces."""
    return flow([Span(word, style) for word in text.split(" ")], width, rank=rank, gap=1, indent=2, most=most)


def fit(lines: Sequence[Line], height: int, width: int) -> list[Line]:
    """Return the most important lines that the height holds, in their order; the last one says how many are hidden."""
    if len(lines) <= height:
        return list(lines)
    by_rank = sorted(range(len(lines)), key=lambda number: (lines[number].rank, number))
    kept = sorted(by_rank[: max(1, height - 1)])
    shown = [lines[number] for number in kept]
    if height < 2:
        return shown
    hidden = sum(bool(line.spans) for line in lines) - sum(bool(line.spans) for line in shown)
    words = f"... {hidden} more lines"
    longer = f"{words} in a larger window"
    more = Line(0, (Span(longer if len(longer) <= width else words[:width], "dim"),))
    return [*shown, more] if hidden else shown


def bar(shares: Sequence[tuple[int, Span]], total: int, width: int) -> tuple[Span, ...]:
    """Return a bar of `width` columns, each part as long as its share of the total and drawn in its character.

    What there is at all is at least one column; the last part takes what is left.
    """
    left, spans = width, list[Span]()
    for number, (n, mark) in enumerate(shares):
        last = number == len(shares) - 1
        long = left if last else min(left, max(1, round(width * n / total))) if n and total else 0
        spans.append(Span(mark.text * long, mark.style))
        left -= long
    return tuple(span for span in spans if span.text)


def sparkline(values: Sequence[float | None], width: int, *, plain: bool) -> str:
    """Return the values as columns of blocks, the newest last; spaces where nothing is known, nothing if all is so.

    More values than columns are averaged together; unknown ones at the beginning are left out.
    """
    known = next((number for number, value in enumerate(values) if value is not None), None)
    if known is None or width < 1:
        return ""
    cut = values[known:]
    per_cell = -(-len(cut) // width)
    groups = [cut[max(0, end - per_cell) : end] for end in range(len(cut), 0, -per_cell)][::-1]
    means = [_mean([value for value in group if value is not None]) for group in groups]
    top = max(mean for mean in means if mean is not None)
    marks = _PLAIN_SPARKS if plain else _SPARKS
    return "".join(
        " " if mean is None else marks[min(len(marks) - 1, int(mean / top * len(marks))) if top else 0]
        for mean in means
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
