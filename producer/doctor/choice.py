"""Which samples of a source are the canaries, and how many samples it has."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from app.records import Sample
from producer import row_count
from producer.reading import Opened, Reading

FIRST_ROWS = 5000
"""Rows of which the canaries are drawn: a source may be terabytes."""
_SEED = 0

Open = Callable[[Reading, int], Opened]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The canaries of a source."""

    samples: list[Sample]
    description: str
    read: int
    """Rows that they were drawn from."""
    found: int
    """Samples among these rows."""
    rows: int | None
    """Rows of the whole source, as far as they will be read; None: not known."""

    @property
    def total(self) -> int | None:
        """How many samples the whole source has, going by the rows that were read; None: not known."""
        if self.rows is None or not self.read:
            return None
        return round(self.rows * self.found / self.read)


def choose(reading: Reading, number: int, *, rows: int | None, max_row_bytes: int, open_rows: Open) -> Chosen:
    """Draw so many samples evenly from the source's first rows; the same ones each time.

    `rows`: how many the whole source has, as somebody said. Raises UsageError and SourceError as reading does.
    """
    bound = FIRST_ROWS if reading.limit is None else min(FIRST_ROWS, reading.limit)
    opened = open_rows(reading, bound)
    draw = random.Random(_SEED)  # noqa: S311 - a choice, no secret
    kept: list[Sample] = []
    found = 0
    for batch in opened.batches:
        for sample in batch.samples:
            found += 1
            if len(kept) < number:
                kept.append(sample)
            elif (at := draw.randrange(found)) < number:
                kept[at] = sample
    read = opened.rows.read
    known = rows
    if known is None and read + opened.selection.left_out_rows < bound:
        known = read  # that was all of it
    elif known is None and not reading.filters:
        known = row_count.count(reading.source, max_row_bytes=max_row_bytes)
    if known is not None and reading.limit is not None:
        known = min(known, reading.limit)
    return Chosen(kept, opened.description, read, found, known)
