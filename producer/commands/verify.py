"""`producer verify`: whether the books balance, and mending them where they do not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING

import typer

from app import broker, settings
from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, BrokerError, UsageError
from producer.commands.common import Bench, ProgressLine, check_settings, note, open_bench, say

if TYPE_CHECKING:
    from producer.accounts import Report
    from producer.repair import Tools

EXAMPLES = """\b
Examples:
  producer verify
  producer verify chat --json
  producer verify chat --repair --dry-run    say what would be mended
  producer verify chat --repair
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command(epilog=EXAMPLES)(verify)


def verify(
    dataset: str | None = typer.Argument(None, help="Only this dataset. [all]"),
    repair: bool = typer.Option(
        False, "--repair", help="Mend what can be mended, then verify; what is cut out goes to quarantine.jsonl."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="With --repair: only say what would be done."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
) -> None:
    """Account for every input id from the files and Redis; exit code 1 unless all is there and complete.

    --repair first gives lost tickets back, moves lines that are no records or repeat one out of the files, and
    makes a wrong index anew. It is safe while workers run, and safe to interrupt: run it again.
    """
    from app.progress import find_datasets
    from producer import accounts

    if dry_run and not repair:
        raise UsageError("--dry-run says what --repair would do; give both.")
    if repair:
        check_settings()
    reports, known = {}, list[str]()
    with open_bench(check=False) as opened, contextlib.closing(ProgressLine()) as progress:
        bench = opened
        try:
            with broker.translated(bench.url):
                known = bench.books.datasets()
        except BrokerError as error:  # files alone account for a finished dataset
            note(str(error))
            bench = opened.for_hanging()
        names = [dataset] if dataset else sorted(find_datasets(bench.store.prepared_dir, known)[0])
        try:
            for name in names:
                reports[name] = _look_at(bench, name, progress, repair=repair, dry_run=dry_run)
        except KeyboardInterrupt:
            note("interrupted; the files are whole, and the same command goes on.")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        sys.stdout.buffer.write(accounts.as_json(reports))
        sys.stdout.buffer.flush()
    else:
        for report in reports.values():
            say(report.render())
    if not reports:
        note(
            f"nothing was verified: there is no dataset in {bench.store.prepared_dir} (MILL_PREPARED_DIR); producer "
            "enqueue makes one."
        )
    if not reports or not all(report.complete for report in reports.values()):
        raise typer.Exit(EXIT_INCOMPLETE)


def _look_at(bench: Bench, name: str, progress: ProgressLine, *, repair: bool, dry_run: bool) -> Report:
    """Verify one dataset, after mending it if told so."""
    from producer.verify import verify as account_for

    with bench.ledger(name) as ledger:
        repairs = list[str]()
        if repair:
            from producer.repair import repair as mend

            repairs = mend(ledger, name, _tools(bench, name, progress), dry_run=dry_run)
        report = account_for(bench.books, ledger, name, on_progress=progress.show)
    progress.close()
    return dataclasses.replace(report, repairs=repairs)


def _tools(bench: Bench, name: str, progress: ProgressLine) -> Tools:
    from app.celery import app, publish
    from app.feeder import Feeder
    from producer.repair import Tools

    put_tickets = functools.partial(publish, app)
    max_pending = settings.load(settings.QueueSettings).max_pending
    feeder = Feeder(
        bench.books,
        put_tickets,
        url=bench.url,
        dataset=name,
        max_pending=max_pending,
        on_wait=lambda why: progress.show(f"{why}, waiting for room"),
    )
    return Tools(bench.books, feeder, put_tickets, on_progress=progress.show)
