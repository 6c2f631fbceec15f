"""`producer status`, `monitor` and `verify`: how far it is, and whether the books balance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from app import settings
from app.errors import EXIT_INCOMPLETE
from producer.commands.common import note, open_bench, say

if TYPE_CHECKING:
    from app.snapshot import Snapshot


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    for command in (status, monitor, verify):
        cli.command()(command)


def status(
    dataset: str | None = typer.Argument(None, help="Only this dataset."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Show how far every dataset is, once.

    Exit code 1: samples failed or are missing, or work is left and something keeps it from going on.
    """
    from producer import status as view

    snapshot = _taker(dataset)()
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

    raise typer.Exit(watch(_taker(dataset), interval_s=interval, until_done=until_done))


def verify(
    dataset: str | None = typer.Argument(None, help="Only this dataset. [all]"),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Account for every input id from the files and Redis; exit code 1 unless all is complete."""
    import json

    from app.progress import find_datasets
    from producer.verify import verify as account

    bench = open_bench()
    names = [dataset] if dataset else sorted(find_datasets(bench.store.prepared_dir, bench.books.datasets())[0])
    reports = {}
    for name in names:
        with bench.ledger(name) as ledger:
            reports[name] = account(bench.books, ledger, name)
    if as_json:
        say(json.dumps({name: json.loads(report.as_json()) for name, report in reports.items()}, indent=2))
    else:
        for report in reports.values():
            say(report.render())
    if not reports:
        note("there is no dataset yet; producer enqueue makes one.")
    if not all(report.complete for report in reports.values()):
        raise typer.Exit(EXIT_INCOMPLETE)


def _taker(dataset: str | None) -> Callable[[], Snapshot]:
    from app.progress import take_snapshot

    bench = open_bench(check=False)
    prepared = settings.load(settings.StoreSettings).prepared_dir
    return lambda: take_snapshot(bench.books, prepared, [dataset] if dataset else None, url=bench.url)


def _print(snapshot: Snapshot) -> None:
    from rich.console import Console

    from producer import status as view

    console = Console(soft_wrap=True, highlight=False)
    if console.is_terminal:
        console.print(view.render(snapshot, width=console.width))
    else:
        say(view.as_text(snapshot))
