"""`producer status`, `monitor` and `verify`: how far it is, and whether the books balance."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from app import broker
from app.errors import EXIT_INCOMPLETE, BrokerError
from producer.commands.common import note, open_bench, say

if TYPE_CHECKING:
    from app.snapshot import Snapshot

STATUS_EXAMPLES = """\b
Examples:
  producer status
  producer status chat --json
"""
MONITOR_EXAMPLES = """\b
Examples:
  producer monitor
  producer monitor chat --until-done --interval 30
"""
VERIFY_EXAMPLES = """\b
Examples:
  producer verify
  producer verify chat --json
"""


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command(epilog=STATUS_EXAMPLES)(status)
    cli.command(epilog=MONITOR_EXAMPLES)(monitor)
    cli.command(epilog=VERIFY_EXAMPLES)(verify)


def status(
    dataset: str | None = typer.Argument(None, help="Only this dataset."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Show how far every dataset is, once.

    Exit code 1: samples failed or are missing, or work is left and something keeps it from going on.
    """
    from producer import status as view

    with _taker(dataset) as take:
        snapshot = take()
    if as_json:
        sys.stdout.buffer.write(view.status_json(snapshot))
        sys.stdout.buffer.flush()
    else:
        _print(snapshot)
    raise typer.Exit(view.exit_code(snapshot))


def monitor(
    dataset: str | None = typer.Argument(None, help="Only this dataset."),
    interval: float | None = typer.Option(None, min=0.2, help="Seconds between looks. [3; 10 without a terminal]"),
    until_done: bool = typer.Option(False, "--until-done", help="End when nothing is left to wait for."),
) -> None:
    """Show the same numbers live; q or Ctrl-C ends it. Without a terminal: a plain line at each look."""
    from producer.monitor import monitor as watch

    with _taker(dataset) as take:
        code = watch(take, interval_s=interval, until_done=until_done)
    raise typer.Exit(code)


def verify(
    dataset: str | None = typer.Argument(None, help="Only this dataset. [all]"),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Account for every input id from the files and Redis; exit code 1 unless all is complete."""
    from app.progress import find_datasets
    from producer import verify as accounts

    reports, known = {}, list[str]()
    with open_bench(check=False) as bench:
        try:
            with broker.translated(bench.url):
                known = bench.books.datasets()
        except BrokerError as error:  # files alone account for a finished dataset
            note(str(error))
        for name in [dataset] if dataset else sorted(find_datasets(bench.store.prepared_dir, known)[0]):
            with bench.ledger(name) as ledger:
                reports[name] = accounts.verify(bench.books, ledger, name)
    if as_json:
        sys.stdout.buffer.write(accounts.as_json(reports))
        sys.stdout.buffer.flush()
    else:
        for report in reports.values():
            say(report.render())
    if not reports:
        note("there is no dataset yet; producer enqueue makes one.")
    if not all(report.complete for report in reports.values()):
        raise typer.Exit(EXIT_INCOMPLETE)


@contextlib.contextmanager
def _taker(dataset: str | None) -> Iterator[Callable[[], Snapshot]]:
    from app.progress import take_snapshot

    wanted = [dataset] if dataset else None
    with open_bench(check=False) as bench:
        yield lambda: take_snapshot(bench.books, bench.store.prepared_dir, wanted, url=bench.url)


def _print(snapshot: Snapshot) -> None:
    from rich.console import Console

    from producer import status as view

    console = Console(soft_wrap=True, highlight=False)
    if console.is_terminal:
        console.print(view.render(snapshot, width=console.width))
    else:
        say(view.as_text(snapshot))
