"""The doctor's findings for people, 80 columns wide or in a terminal's table."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence

from producer.doctor.checks import Check, Level
from producer.doctor.estimate import Estimate, Spread
from producer.doctor.examine import Findings
from producer.doctor.recorded import Field
from producer.interval import Range
from producer.measures import duration, size
from producer.texts import counted, harmless

_COLUMNS = 80
_LEVEL_CHARS = 6
_STYLES = {Level.OK: "green", Level.NOTE: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}


def show(findings: Findings) -> None:
    """Write the findings to standard output."""
    if sys.stdout.isatty():
        _show_table(findings)
        return
    for line in lines(findings):
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def lines(findings: Findings) -> Iterator[str]:
    """Yield the findings as lines of at most 80 columns, but for words that are longer."""
    for heading, checks in _grouped(findings.checks):
        yield heading
        for check in checks:
            yield from _hanging(f"  {check.level.value:<{_LEVEL_CHARS}}", check.sentence)
    if findings.recorded:
        yield "what will be recorded"
        wide = max(len(one.name) for one in findings.recorded)
        shares = max(len(_share(one)) for one in findings.recorded)
        for one in findings.recorded:
            yield from _hanging(f"  {one.name:<{wide}}  {_share(one):>{shares}}  ", one.source)
    for text in _told(findings):
        yield from textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    yield _conclusion(findings)


def _hanging(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        harmless(text),
        _COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _grouped(checks: Sequence[Check]) -> Iterator[tuple[str, list[Check]]]:
    """Yield the checks under a heading each: this machine, Redis, every server."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.server or _HEADINGS.get(check.name.partition(".")[0], "this machine"), []).append(check)
    yield from groups.items()


_HEADINGS = {"redis": "Redis", "server": "model servers", "servers": "model servers"}


def _share(field: Field) -> str:
    return f"{field.present} of {field.answers}"


def _told(findings: Findings) -> Iterator[str]:
    if findings.canaries:
        yield "canaries: " + ", ".join(f"{what} {count}" for what, count in findings.canaries.items()) + "."
    if findings.source is not None:
        yield harmless(findings.source)
    if findings.estimate is not None:
        yield from sentences(findings.estimate)


def sentences(estimate: Estimate) -> Iterator[str]:
    """Yield what a run will take."""
    which = f"all {estimate.samples:,} samples" if estimate.whole else f"each {estimate.samples:,} samples"
    yield f"estimate for {which}, from {estimate.canaries} answers (means with 95 % confidence):"
    for name, spread in (("prompt", estimate.prompt_tokens), ("answer", estimate.completion_tokens)):
        yield f"  {name} tokens: {_spread(spread)}"
    yield f"  tokens: {_whole(estimate.total_tokens)}"
    if estimate.seconds is None:
        yield "  time: not known."
    else:
        yield f"  time: {duration(estimate.seconds.low)} to {duration(estimate.seconds.high)}{_assuming(estimate)}"
    yield f"  disk: {size(estimate.record_bytes.low)} to {size(estimate.record_bytes.high)} of records."


def _assuming(estimate: Estimate) -> str:
    """Say what has to hold for the two ends of the time."""
    most, seen = estimate.in_flight, round(estimate.seen_in_flight)
    if seen >= most:
        return f", if {most} requests at once are answered as fast as now."
    return (
        f": the first if {most} requests at once are answered as fast as {seen} were now, the second if the servers do "
        "no more than now."
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "not known: the server does not count them."
    return f"mean {_whole(spread.mean)[:-1]}; 95 % of the canaries have at most {spread.p95:,.0f}."


def _whole(values: Range | None) -> str:
    return "not known." if values is None else f"{_short(values.low)} to {_short(values.high)}."


def _short(number: float) -> str:
    """Return a count with no more digits than an estimate deserves."""
    if number < 10_000:
        return f"{number:,.0f}"
    for unit in ("thousand", "million"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:,.3g} billion"


def _conclusion(findings: Findings) -> str:
    levels = [check.level for check in findings.checks]
    fails, warns = levels.count(Level.FAIL), levels.count(Level.WARN)
    warned = f", {warns} to look at (warn)" if warns else ""
    if fails:
        return f"doctor: {counted(fails, 'finding')} would waste the run or keep it from beginning (fail){warned}."
    return f"doctor: nothing stands in the way{warned}."


def _show_table(findings: Findings) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only terminals need it
    from rich.table import Table  # noqa: PLC0415 - same
    from rich.text import Text  # noqa: PLC0415 - same

    console = Console(highlight=False, soft_wrap=False)
    for heading, checks in _grouped(findings.checks):
        console.print(Text(harmless(heading), style="bold"))
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=_LEVEL_CHARS, justify="right")
        grid.add_column(overflow="fold")
        for check in checks:
            grid.add_row(Text(check.level.value, style=_STYLES[check.level]), Text(harmless(check.sentence)))
        console.print(grid)
    if findings.recorded:
        table = Table("field", "answers", "comes from", title="what will be recorded", title_justify="left")
        for one in findings.recorded:
            table.add_row(Text(one.name), _share(one), Text(harmless(one.source)))
        console.print(table)
    for text in _told(findings):
        console.print(Text(text))
    console.print(Text(_conclusion(findings), style="bold green" if findings.ok else "bold red"))
