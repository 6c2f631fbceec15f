"""The view without a terminal: one line per dataset and interval, each of which stands alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TextIO

from app.snapshot import Part
from app.surroundings import clock_time
from producer import status
from producer.monitor.over import Over
from producer.monitor.view import Feed, View


def show(feed: Feed, interval_s: float, over: Over, stream: TextIO) -> int:
    """Write lines until the work is over; return status' exit code."""
    _write(stream, f"Watching every {interval_s:g} s; Ctrl-C ends it.")
    told: list[str] = []
    while True:
        started = time.monotonic()
        view = feed.take()
        for line in plain_lines(view, interval_s=interval_s):
            _write(stream, line)
        picture = view.picture
        if picture is not None:
            notes = _notes(view)
            for note in notes:
                if note not in told:
                    _write(stream, f"{_clock(picture.at)} {status.printable(note)}")
            told = notes
            if over(picture):
                _write(stream, f"Ended: {_progress(picture.totals)}, failed {picture.totals.counts.failed:,}.")
                return status.exit_code(picture)
        time.sleep(max(0.0, interval_s - (time.monotonic() - started)))


def plain_lines(view: View, *, interval_s: float) -> Iterator[str]:
    """Yield one line per dataset that stands alone, and one that says what is wrong."""
    snapshot = view.picture
    if view.trouble:
        yield f"{_clock(time.time())} {status.printable(view.trouble)}"
    if snapshot is None:
        if not view.trouble:
            yield f"{_clock(time.time())} waiting for {view.source or 'the numbers'} for {view.age_s():.0f} s"
        return
    late = view.age_s() > 2 * interval_s + 1
    for name, part in snapshot.datasets.items():
        items = [
            f"{status.printable(name)} {part.state.value}: {_progress(part)}",
            f"{status.rate_words(part.rates.now.samples_per_s)} samples/s",
            f"{status.rate_words(part.rates.now.tokens_per_s)} tok/s",
            f"failed {part.counts.failed:,}",
            status.eta_words(part),
        ]
        missing = part.counts.missing
        if missing:
            items.append(f"missing {missing:,} (run producer enqueue again)")
        if snapshot.told_at is not None:
            items.append(f"by the files of {_clock(snapshot.told_at)}")
        if late:
            items.append(f"{view.age_s():.0f} s old")
        yield f"{_clock(snapshot.at)} {', '.join(filter(None, items))}"
    if not snapshot.datasets:
        yield f"{_clock(snapshot.at)} no dataset yet"


def _notes(view: View) -> list[str]:
    picture = view.picture
    if picture is None:
        return []
    notes = list(picture.totals.notes)
    if not picture.broker.reachable and picture.told_at is not None:
        notes.append(f"These are the numbers of the files; a worker last wrote them at {_clock(picture.told_at)}.")
    return notes


def _clock(at: float) -> str:
    return clock_time(at, now=time.time())


def _progress(part: Part) -> str:
    counts = part.counts
    percent = "" if part.percent is None else f" ({part.percent:.1f} %)"
    return f"{counts.samples - counts.left:,}/{counts.samples:,}{percent}"


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()
