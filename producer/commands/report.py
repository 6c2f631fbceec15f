"""`producer report`: one page about a run."""

from __future__ import annotations

from pathlib import Path

import typer

from producer.commands.common import ProgressLine, say

EXAMPLES = """\b
Examples:
  producer report
  producer report chat math --output run.html
  producer report --from /backup/prepared
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command(epilog=EXAMPLES)(report)


def report(
    datasets: list[str] | None = typer.Argument(None, metavar="[DATASET]...", help="Only these datasets."),
    output: Path = typer.Option(Path("report.html"), "--output", "-o", help="The file to write.", dir_okay=False),
    from_folder: Path | None = typer.Option(
        None, "--from", help="The folder of datasets. [as MILL_PREPARED_DIR says]", exists=True, file_okay=False
    ),
) -> None:
    """Write an HTML page of a run: throughput, lengths, latency, outcomes, failures, settings.

    It is made of the files alone and needs neither Redis nor a network.
    """
    from app import jsonl, settings
    from producer.report.gather import gather
    from producer.report.page import render

    prepared = from_folder or settings.load(settings.StoreSettings).prepared_dir
    line = ProgressLine()

    def tell(name: str, read: int, total: int) -> None:
        line.show(f"{name}: {100 * read / total:.0f} % of {total / 1e6:,.0f} MB read")

    try:
        page = render(gather(prepared, datasets or [], tell=tell))
    finally:
        line.close()
    jsonl.replace_file(output, page.encode("utf-8"))
    say(f"{output}: {len(page) / 1000:,.0f} kB; any browser shows it")
