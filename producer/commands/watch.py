"""`producer status` and `monitor`: how far it is."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from app.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from producer.commands.common import Bench, open_bench, say, warn_of_unusable_settings

if TYPE_CHECKING:
    from app.snapshot import Snapshot
    from producer.monitor.picture import PictureTaker

STATUS_EXAMPLES = """\b
Examples:
  producer status
  producer status chat --json
  producer status --json --watch 10    one JSON document a line, for programs
"""
MONITOR_EXAMPLES = """\b
Examples:
  producer monitor
  producer monitor chat --until-done --interval 30
  producer monitor --from prepared/
  producer monitor --ssh me@gpu1 --remote-dir run --remote-command .venv/bin/producer
  producer monitor --ssh gpu1 --ssh-command "ssh -p 2222"
"""


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command(epilog=STATUS_EXAMPLES)(status)
    cli.command(epilog=MONITOR_EXAMPLES)(monitor)


def status(
    dataset: str | None = typer.Argument(None, help="Only this dataset."),
    as_json: bool = typer.Option(False, "--json", help="As JSON, for machines."),
    watch: float | None = typer.Option(None, min=0.2, help="With --json: again every so many seconds, a line each."),
) -> None:
    """Show how far every dataset is, once.

    Exit code 1: samples failed or are missing, or work is left and something keeps it from going on.
    """
    from producer import status as view

    if watch is not None and not as_json:
        raise UsageError("--watch needs --json; people watch with producer monitor.")
    if watch is not None:
        raise typer.Exit(_stream(dataset, watch))
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
    from_folder: Path | None = typer.Option(
        None, "--from", help="Read this folder of datasets alone, without Redis.", exists=True, file_okay=False
    ),
    ssh: str | None = typer.Option(None, help="Watch on another machine: HOST or USER@HOST.", metavar="HOST"),
    ssh_command: str = typer.Option("ssh", help="ssh with options of your own."),
    remote_command: str = typer.Option("producer", help="How producer is called there."),
    remote_dir: str | None = typer.Option(None, help="The folder to run it in there.", metavar="DIR"),
) -> None:
    """Show the numbers live; q or Ctrl-C ends it. Without a terminal: a plain line at each look."""
    from producer.monitor.remote import Machine, RemoteFeed
    from producer.monitor.run import monitor as show
    from producer.monitor.run import usual_interval_s
    from producer.monitor.view import LocalFeed

    interval_s = interval or usual_interval_s()
    if ssh is not None:
        if from_folder is not None:
            raise UsageError("--ssh and --from cannot be used together; --remote-dir names the folder there.")
        machine = Machine(ssh, ssh=ssh_command, command=remote_command, folder=remote_dir)
        feed = RemoteFeed(machine, interval_s=interval_s, dataset=dataset)
        raise typer.Exit(show(feed, interval_s=interval_s, pause_s=0.0, until_done=until_done))
    with _picture_taker(dataset, from_folder) as take:
        source = "" if from_folder is None else f"files in {from_folder}"
        code = show(LocalFeed(take, source=source), interval_s=interval_s, until_done=until_done)
    raise typer.Exit(code)


def _stream(dataset: str | None, every_s: float) -> int:
    """Write a picture a line until nobody reads them."""
    import msgspec

    from producer.pipes import silence

    out = sys.stdout.buffer
    try:
        with _picture_taker(dataset, None) as take:
            while True:
                began = time.monotonic()
                out.write(msgspec.json.encode(take()) + b"\n")
                out.flush()
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))
    except BrokenPipeError:
        silence(sys.stdout)
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@contextlib.contextmanager
def _picture_taker(dataset: str | None, folder: Path | None) -> Iterator[PictureTaker]:
    from app.progress import take_snapshot
    from producer.monitor.picture import PictureTaker

    if folder is None:
        with open_bench(check=False) as bench:
            warn_of_unusable_settings()
            yield PictureTaker(lambda: _take_in(bench, dataset), bench.store.prepared_dir)
        return
    wanted = [dataset] if dataset else None
    yield PictureTaker(lambda: take_snapshot(None, folder, wanted), folder)


@contextlib.contextmanager
def _taker(dataset: str | None) -> Iterator[Callable[[], Snapshot]]:
    with open_bench(check=False) as bench:
        warn_of_unusable_settings()
        yield lambda: _take_in(bench, dataset)


def _take_in(bench: Bench, dataset: str | None) -> Snapshot:
    from app.progress import take_snapshot

    return take_snapshot(bench.books, bench.store.prepared_dir, [dataset] if dataset else None, url=bench.url)


def _print(snapshot: Snapshot) -> None:
    from rich.console import Console

    from producer import status as view

    console = Console(soft_wrap=True, highlight=False)
    if console.is_terminal:
        console.print(view.render(snapshot, width=console.width))
    else:
        say(view.as_text(snapshot))
