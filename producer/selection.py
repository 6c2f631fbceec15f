"""Which rows of a source a pass reads, and in which order: `--filter`, then `--shuffle`, then `--limit`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from app.errors import SourceError, UsageError
from producer.adapters.registry import columns_of
from producer.filters import Filter
from producer.formats.rows import Row
from producer.shuffle import shuffled

_HEAD_ROWS = 500
_TELL_EVERY = 500
_HEAD_BYTES = 16 * 1024 * 1024


class Rows(Protocol):
    """Where a pass gets its rows from."""

    @property
    def description(self) -> str:
        """Where the rows come from, without credentials."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""


class Selection:
    """The rows of a source that fulfil all conditions, shuffled and cut to a number.

    Rows that a condition leaves out are not read in the sense of the books: they are counted here alone. Rows that
    cannot be read as JSON are left in, so that they are refused with their reason.
    """

    def __init__(
        self,
        source: Rows,
        *,
        filters: Sequence[Filter] = (),
        shuffle: int | None = None,
        limit: int | None = None,
        on_wait: Callable[[int], None] = lambda _rows: None,
    ) -> None:
        """`shuffle` is a seed; `limit` counts the rows that the conditions leave.

        `on_wait` hears now and then how many rows a shuffle has read, before it gives the first.
        """
        self.description = source.description
        self._source = source
        self._filters = filters
        self._seed = shuffle
        self._limit = limit
        self._on_wait = on_wait
        self.left_out = {condition.text: 0 for condition in filters}
        """For each condition, the rows that it was the first not to hold for."""

    @property
    def left_out_rows(self) -> int:
        """How many rows the conditions have left out so far."""
        return sum(self.left_out.values())

    def rows(self) -> Iterator[Row]:
        """Yield the chosen rows.

        Raises SourceError where the source breaks off, and UsageError when none of the first rows has the column of a
        condition.
        """
        rows = self._kept() if self._filters else self._source.rows()
        if self._seed is not None:
            rows = shuffled(self._told(rows), self._seed, self._limit)
        return itertools.islice(rows, self._limit)

    def _told(self, rows: Iterator[Row]) -> Iterator[Row]:
        for count, row in enumerate(rows, start=1):
            yield row
            if count % _TELL_EVERY == 0:
                self._on_wait(count)

    def _kept(self) -> Iterator[Row]:
        rows = self._source.rows()
        head, trouble = _head(rows)
        values = [row.value for row in head if row.value is not None]
        for condition in self._filters:
            if values and not any(map(condition.is_known_to, values)):
                raise UsageError(
                    f"--filter {condition.text!r}: no row has the column {condition.column!r}; the columns are "
                    f"{columns_of(values)}."
                )
        for row in itertools.chain(head, rows if trouble is None else ()):
            if row.value is None or self._holds(row):
                yield row
        if trouble is not None:
            raise trouble

    def _holds(self, row: Row) -> bool:
        for condition in self._filters:
            if not condition.holds(row.value or {}):
                self.left_out[condition.text] += 1
                return False
        return True


def _head(rows: Iterator[Row]) -> tuple[list[Row], SourceError | None]:
    """Return the first rows, enough to know the columns, and the error that ended them early, if one did."""
    head: list[Row] = []
    size = 0
    try:
        for row in itertools.islice(rows, _HEAD_ROWS):
            head.append(row)
            size += row.size
            if size > _HEAD_BYTES:
                break
    except SourceError as error:
        return head, error
    return head, None
