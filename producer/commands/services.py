"""`producer up`, `scale`, `down` and `logs`: the broker, workers and Flower of this machine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import typer

from producer.commands.common import note, say, warn_of_unknown_settings

if TYPE_CHECKING:
    from producer.services import LocalServices, UpReport

UP_EXAMPLES = """\b
Examples:
  producer up
  producer up --workers 4 --concurrency 64
  producer up --no-flower --log-format json
  producer up --extract     a worker that makes hidden states
"""
SCALE_EXAMPLES = """\b
Examples:
  producer scale 4
  producer scale 0     stop all workers; the queue stays
"""
DOWN_EXAMPLES = """\b
Examples:
  producer down
"""
LOGS_EXAMPLES = """\b
Examples:
  producer logs
  producer logs -f mill1
  producer logs flower --lines 100
"""


class LogFormat(enum.StrEnum):
    """What workers log."""

    TEXT = "text"
    JSON = "json"


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command(epilog=UP_EXAMPLES)(up)
    cli.command(epilog=SCALE_EXAMPLES)(scale)
    cli.command(epilog=DOWN_EXAMPLES)(down)
    cli.command(epilog=LOGS_EXAMPLES)(logs)


def up(
    workers: int = typer.Option(1, min=0, help="Worker processes."),
    concurrency: int | None = typer.Option(None, min=1, help="Slots of each worker. [its share of the bound, + 8]"),
    flower: bool = typer.Option(True, "--flower/--no-flower", help="Start the dashboard."),
    extract: bool = typer.Option(
        False, "--extract", help="Start workers that make hidden states, not such that ask model servers."
    ),
    log_format: LogFormat | None = typer.Option(
        None, help="What the workers log: lines of text or of JSON. [as MILL_LOG_FORMAT says]"
    ),
) -> None:
    """Start Redis (unless MILL_REDIS_URL names one), workers and Flower in the background."""
    form = log_format.value if log_format else None
    if extract:
        services = _services()
        _report(services.up(workers=0, flower=flower, log_format=form))
        started = services.run_extractors(workers, concurrency=concurrency)
        say(f"started: {', '.join(started)}" if started else "its workers of hidden states run already")
        return
    _report(_services().up(workers=workers, concurrency=concurrency, flower=flower, log_format=form))


def scale(workers: int = typer.Argument(..., min=0, help="How many workers shall run.")) -> None:
    """Start or stop workers until that many run; a stopped one finishes its requests first."""
    _report(_services().scale(workers))


def down() -> None:
    """Stop Flower, the workers and the embedded Redis; queued samples are kept."""
    names = _services().down()
    say(f"stopped: {', '.join(names)}" if names else "nothing was running here")


def logs(
    name: str | None = typer.Argument(None, help="Only services whose name begins so."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on showing new lines."),
    lines: int = typer.Option(20, "--lines", "-n", min=0, help="Lines of each log to begin with."),
) -> None:
    """Show what the background services wrote."""
    from app import settings
    from producer.service_logs import logs as read_logs

    state = settings.load(settings.StoreSettings).state
    for service, line in read_logs(state, name, follow=follow, lines=lines):
        say(f"{service} | {line}")


def _services() -> LocalServices:
    from producer.services import LocalServices

    warn_of_unknown_settings()
    return LocalServices.from_settings(note)


def _report(report: UpReport) -> None:
    if report.started:
        say(f"started: {', '.join(report.started)}")
    for sentence in report.notes:
        say(sentence)
    if report.services.flower_url:
        say(f"dashboard: {report.services.flower_url}")
