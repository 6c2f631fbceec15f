"""`producer export`: training files out of the accepted records."""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer

from app import settings
from app.records import Kind
from producer.commands.common import ProgressLine, note, open_ledger, say

EXPORT_HELP = """Write a dataset's accepted records as a training file, each once.

The output's ending chooses the file: .jsonl (also .gz, .zst) or .parquet. `tokens` holds id, input_ids and loss_mask
from the exact ids that the server gave; records without them are counted and left out.
"""
EXPORT_EXAMPLES = """\b
Examples:
  producer export chat --format openai --output chat.jsonl
  producer export chat --format tokens --output chat.parquet
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("export", help=EXPORT_HELP, epilog=EXPORT_EXAMPLES)(export)


def export(
    dataset: str = typer.Argument(..., help="The dataset."),
    form: str = typer.Option(..., "--format", "-f", help="openai, sharegpt or tokens."),
    output: Path = typer.Option(..., "--output", "-o", help="The file to write."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing file."),
    limit: int | None = typer.Option(None, min=1, help="Write at most this many rows."),
    reasoning: str = typer.Option("drop", help="What becomes of reasoning in openai rows: drop or field."),
) -> None:
    """Write a dataset's accepted records as a training file, each once."""
    from producer.export.run import export as write

    with open_ledger(settings.load(settings.StoreSettings), dataset) as ledger:
        for mending in ledger.catch_up():
            note(str(mending))
        with contextlib.closing(ProgressLine()) as line:
            report = write(
                ledger,
                format=form,
                output=output,
                overwrite=overwrite,
                limit=limit,
                reasoning=reasoning,
                on_progress=lambda done, total: line.show(f"read {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"),
            )
        totals = ledger.totals()
    for sentence in report.sentences():
        say(sentence)
    lacks = {"not recorded yet": Kind.PENDING, "rejected": Kind.REJECTED, "failed": Kind.FAILED}
    words = [f"{totals.count(kind):,} {word}" for word, kind in lacks.items() if totals.count(kind)]
    if words:
        note(f"of the dataset's {totals.samples:,} samples, these are not in it: {', '.join(words)}.")
