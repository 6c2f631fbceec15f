"""How an input is read: what a command line says about rows, opened up to its first rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.errors import SourceError
from producer import filters, presets
from producer.adapters import renamed
from producer.adapters.registry import AUTO, choose
from producer.dedupe import Dedupe
from producer.presets import Choice
from producer.samples import Batch, Pass
from producer.selection import Selection
from producer.sources import RowSource, open_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read, and how rows become samples."""

    source: str
    """A file, a folder, `hf:...`, or a preset's name; a file or folder of that name goes first."""
    adapter: str | None = None
    """None is the preset's own, else auto."""
    columns: str | None = None
    """Such as `prompt=question,id=uid`."""
    filters: tuple[str, ...] = ()
    shuffle: int | None = None
    """The seed of the order; None is the source's order."""
    limit: int | None = None
    """The most rows that are read, of those that the filters leave."""
    system: str | None = None
    drop_system: bool = False
    dedupe: Dedupe = Dedupe.EXACT
    samples_per_prompt: int = 1

    def content(self) -> dict[str, Any]:
        """Return what of this changes a sample's content, for the manifest; which rows are chosen is not part of it.

        A preset's own adapter reads its rows as auto would, so that several presets fit into one dataset.
        """
        content: dict[str, Any] = {"adapter": self.adapter or AUTO, "samples_per_prompt": self.samples_per_prompt}
        if self.columns is not None:
            content["columns"] = self.columns
        if self.drop_system:
            content["drop_system"] = True
        return content


@dataclasses.dataclass(frozen=True)
class Opened:
    """An input whose first rows are as its adapter expects them."""

    source: str
    """The source as the command line has it."""
    description: str
    """Where the rows come from, without credentials."""
    adapter: str
    """The adapter's word."""
    choice: Choice | None
    """The preset, if the source named one."""
    selection: Selection
    rows: Pass
    batches: Iterator[Batch]

    def remarks(self) -> list[str]:
        """Return what the user should know of how the rows are read."""
        told = []
        hidden = presets.find(self.source) if self.choice is None else None
        if hidden is not None:
            told.append(
                f"reads {self.description}, not the preset {hidden.preset.name}; that one is "
                f"{hidden.reference.description}."
            )
        if self.choice is not None:
            told.append(f"preset {self.choice.preset.name}: {self.description}, licence {self.choice.preset.licence}.")
        shapes = self.rows.shapes
        if self.adapter == AUTO and shapes:
            counted = ", ".join(f"{name} ({count:,})" for name, count in shapes.most_common())
            told.append(f"adapter auto reads the first rows as {next(iter(shapes)) if len(shapes) == 1 else counted}.")
        return told


def open_reading(
    reading: Reading,
    *,
    max_row_bytes: int,
    first_rows: int | None = None,
    settings: str = "",
    on_wait: Callable[[int], None] = lambda _rows: None,
) -> Opened:
    """Open an input and read its first rows, before anything is made.

    `first_rows` bounds what is read before any choice among the rows; `on_wait` hears how many rows a shuffle has read.
    Raises UsageError and SourceError.
    """
    columns = renamed.parse(reading.columns) if reading.columns is not None else None
    conditions = [filters.parse(text) for text in reading.filters]
    choice = preset_of(reading.source)
    word = reading.adapter or (choice.preset.adapter if choice and columns is None else AUTO)
    adapter = choose(word, columns)
    source = _open(reading.source, choice, max_row_bytes=max_row_bytes, limit=first_rows)
    selection = Selection(source, filters=conditions, shuffle=reading.shuffle, limit=reading.limit, on_wait=on_wait)
    rows = Pass(
        selection,
        adapter=adapter,
        system=reading.system,
        drop_system=reading.drop_system,
        samples_per_prompt=reading.samples_per_prompt,
        dedupe=reading.dedupe,
        settings=settings,
    )
    return Opened(reading.source, source.description, word, choice, selection, rows, rows.batches())


def preset_of(source: str) -> Choice | None:
    """Return the preset that a source names, unless there is a file or folder of that name."""
    choice = presets.find(source)
    return None if choice is None or _exists(source) else choice


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except OSError:
        return False


def _open(source: str, choice: Choice | None, *, max_row_bytes: int, limit: int | None) -> RowSource:
    if choice is not None:
        return open_source(choice.reference, max_row_bytes=max_row_bytes, limit=limit)
    guess = presets.near(source) if "/" not in source and "." not in source and not _exists(source) else None
    if guess is not None:
        raise SourceError(
            f"There is no file or preset {source!r} (did you mean {guess}?); producer presets lists them."
        )
    return open_source(source, max_row_bytes=max_row_bytes, limit=limit)
