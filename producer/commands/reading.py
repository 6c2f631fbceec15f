"""The options that say how an input is read, the same for `enqueue`, `preview`, `doctor` and `rehearse`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import typer

from app import settings
from app.settings import QueueSettings
from producer.commands.common import ProgressLine
from producer.dedupe import Dedupe
from producer.texts import counted

if TYPE_CHECKING:
    from producer.reading import Opened, Reading

SOURCE: Any = typer.Argument(..., metavar="SOURCE", help="A file, a folder, hf:org/name, or a preset's name.")
ADAPTER: Any = typer.Option(
    None,
    metavar="NAME",
    help="How rows are read: auto, a row shape by name, or your own module:function. [the preset's, else auto]",
)
COLUMNS: Any = typer.Option(
    None,
    metavar="T=C,...",
    help="Columns by other names, as prompt=question,id=uid (prompt, messages, system, tools, id).",
)
FILTER: Any = typer.Option(
    None,
    "--filter",
    metavar="EXPR",
    help="Read only rows with COLUMN=VALUE (also != ~ !~ < <= > >=); may be repeated, all must hold.",
)
SHUFFLE: Any = typer.Option(
    None, metavar="SEED", help="Read the rows in an order made of this seed; with --limit an even choice of all."
)
LIMIT: Any = typer.Option(None, min=1, help="Read at most this many rows, of those that --filter leaves.")
SAMPLES_PER_PROMPT: Any = typer.Option(1, min=1, max=1000, help="Ask each prompt this many times.")
SYSTEM: Any = typer.Option(None, help="A system prompt for samples that have none.")
DROP_SYSTEM: Any = typer.Option(False, "--drop-system", help="Leave the rows' own system prompts out.")
DEDUPE: Any = typer.Option(
    Dedupe.EXACT, help="Refuse repeated prompts, also nearly equal ones, or none of them.", show_default=True
)


def reading_of(**options: Any) -> Reading:
    """Return what the options say; `filters` may be None."""
    from producer.reading import Reading

    options["filters"] = tuple(options["filters"] or ())
    return Reading(**options)


def max_row_bytes() -> int:
    """Return the size of the largest row that the settings allow."""
    return int(settings.load(QueueSettings).max_row_mb * 2**20)


def open_rows(reading: Reading, *, first_rows: int | None = None, fingerprint: str = "") -> Opened:
    """Open the input within the row size that the settings allow. Raises UsageError for what cannot be read."""
    from producer.reading import open_reading

    with contextlib.ExitStack() as stack:
        line = ProgressLine()
        if reading.shuffle is not None:
            stack.callback(line.close)
        return open_reading(
            reading,
            max_row_bytes=max_row_bytes(),
            first_rows=first_rows,
            settings=fingerprint,
            on_wait=lambda rows: line.show(f"--shuffle reads the whole source first: {rows:,} rows so far"),
        )


def left_out(opened: Opened) -> str:
    """Return the sentence on rows that --filter left out, which are neither read nor refused."""
    filters = "; ".join(f"{text}: {count:,}" for text, count in opened.selection.left_out.items())
    return f"--filter left out {counted(opened.selection.left_out_rows, 'row')} ({filters})."
