"""`producer rehearse`: how a run will go, before a GPU is there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import typer

from app import settings
from app.errors import EXIT_INTERRUPTED, UsageError
from app.settings import QueueSettings, ServerSettings, WorkerSettings
from producer.commands import asking, reading
from producer.commands.common import ProgressLine, note, say, warn_of_unknown_settings

REHEARSE_HELP = """Run a part of SOURCE against a simulated model server, to size the real run before a GPU is rented.

Everything but the model server is real: enqueue, Redis, workers, files. All of it lives in a scratch folder, which is
gone afterwards: neither your Redis nor your results are touched, and nothing leaves this machine but the source's own
download. Say what you expect of the model and its server with the options below; the report says what that means.
"""
REHEARSE_EXAMPLES = """\b
Examples:
  producer rehearse prompts.jsonl
  producer rehearse prompts.jsonl --mean-tokens 4000 --max-tokens 16384 --server-tokens-per-second 9000
  producer rehearse gsm8k --rows 7473 --max-in-flight 256 --workers 2
  producer rehearse prompts.jsonl --failure-share 0.02 --keep rehearsal --json
"""


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command("rehearse", help=REHEARSE_HELP, epilog=REHEARSE_EXAMPLES)(rehearse)


def rehearse(
    source: str = reading.SOURCE,
    adapter: str | None = reading.ADAPTER,
    columns: str | None = reading.COLUMNS,
    filters: list[str] | None = reading.FILTER,
    shuffle: int | None = reading.SHUFFLE,
    limit: int = typer.Option(500, min=1, help="Rehearse at most this many rows."),
    rows: int | None = typer.Option(None, min=1, help="Rows of the whole run. [those of a file, where that is cheap]"),
    max_tokens: int | None = asking.MAX_TOKENS,
    max_in_flight: int | None = typer.Option(None, help="Requests in flight. [MILL_MAX_IN_FLIGHT, else 128]"),
    workers: int = typer.Option(1, min=1, max=64, help="Worker processes."),
    mean_tokens: float = typer.Option(800.0, help="Tokens of an answer on average, before --max-tokens cuts it."),
    sigma: float = typer.Option(0.9, min=0, max=3, help="Spread of the lognormal lengths; 0 makes all alike."),
    tokens_per_second: float = typer.Option(40.0, help="Speed of one answer, if it is alone."),
    server_tokens_per_second: float = typer.Option(4000.0, help="Speed of all answers together."),
    first_token_s: float = typer.Option(0.5, min=0, help="Seconds until an answer's first token."),
    failure_share: float = typer.Option(0.0, min=0, max=0.9, help="Share of the requests that the server fails."),
    speedup: float = typer.Option(20.0, min=1, max=1000, help="Let the simulated time run so many times faster."),
    keep: Path | None = typer.Option(None, metavar="DIR", help="Keep the records in this new folder."),
    as_json: bool = typer.Option(False, "--json", help="The report as one JSON object."),
) -> None:
    """Run a part of SOURCE against a simulated model server."""
    from producer.rehearsal.plan import Plan, check_keep, opened_from_anywhere
    from producer.rehearsal.run import rehearse as run
    from producer.rehearsal.text import report
    from producer.simulator.realistic import Traits

    warn_of_unknown_settings()
    traits = Traits(
        mean_tokens=_above_0("--mean-tokens", mean_tokens),
        sigma=sigma,
        tokens_per_second=_above_0("--tokens-per-second", tokens_per_second),
        server_tokens_per_second=_above_0("--server-tokens-per-second", server_tokens_per_second),
        first_token_s=first_token_s,
        failure_share=failure_share,
        speedup=speedup,
    )
    if keep is not None:
        check_keep(keep)
    generation = asking.generation_of(max_tokens=max_tokens)
    server = settings.load(ServerSettings, max_in_flight=max_in_flight)
    if generation.turns != "last":
        raise UsageError(
            f"MILL_TURNS={generation.turns} cannot be rehearsed: a sample would be several requests; unset it."
        )
    options = {"adapter": adapter, "columns": columns, "filters": filters}
    # What is wrong with the source is told before anything is started.
    reading.open_rows(reading.reading_of(source=source, limit=limit, system=generation.system, **options))
    plan = Plan(
        source=source,
        opened=opened_from_anywhere(source),
        reading=tuple(_words(adapter=adapter, columns=columns, filter=filters, shuffle=shuffle)),
        limit=limit,
        rows=rows or (None if filters else _rows_of(source)),
        generation=generation,
        worker=settings.load(WorkerSettings),
        request_timeout_s=None if server.request_timeout_s == "auto" else server.request_timeout_s,
        queue=settings.load(QueueSettings),
        max_in_flight=server.max_in_flight,
        workers=workers,
        traits=traits,
        keep=keep,
    )
    try:
        with contextlib.closing(ProgressLine()) as line:
            found = run(plan, tell=note, show=line.show)
    except KeyboardInterrupt:
        note("interrupted; nothing is left of the rehearsal.")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        say(json.dumps(dataclasses.asdict(found), default=str, indent=2))
        return
    for text in report(found):
        say(text)


def _rows_of(source: str) -> int | None:
    from producer import row_count

    return row_count.count(source, max_row_bytes=reading.max_row_bytes())


def _words(**options: str | int | list[str] | None) -> Iterator[str]:
    """Yield the options of `enqueue` that were given."""
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                yield f"--{name}"
                yield str(one)


def _above_0(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {value:g} cannot be used; give a number above 0.")
    return value
