"""`producer bound`: see or change, while workers run, how many requests a model server has in flight at most."""

from __future__ import annotations

import typer

from app import settings
from app.errors import UsageError
from app.surroundings import read_endpoints
from producer.commands.common import Bench, note, open_bench, say

EXAMPLES = """\b
Examples:
  producer bound             what holds now
  producer bound 256         from now on at most 256 requests per model server, over all workers
  producer bound default     leave it to MILL_MAX_IN_FLIGHT again
"""
_DEFAULT = "default"
_MOST = 65536


def add_to(cli: typer.Typer) -> None:
    """Add the command."""
    cli.command(epilog=EXAMPLES)(bound)


def bound(
    n: str | None = typer.Argument(
        None, metavar="N|default", help="Requests in flight per model server; without it the bound is shown."
    ),
) -> None:
    """Show or change the bound on requests in flight; workers that run keep to a new one within a second."""
    wanted = None if n is None else _parse(n)
    with open_bench(check=n is not None) as bench:
        if n is not None:
            bench.books.set_bound(wanted)
        _tell(bench, changed=n is not None)


def _parse(word: str) -> int | None:
    """Return the number that is asked for, or None for the default."""
    if word == _DEFAULT:
        return None
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and 0 < int(word) <= _MOST):
        raise UsageError(f"{word!r} is no bound; give a number of requests from 1 to {_MOST}, or {_DEFAULT!r}.")
    return int(word)


def _tell(bench: Bench, *, changed: bool) -> None:
    """Say what holds, and whether the workers can make use of it."""
    workers = bench.books.workers()
    servers = max(1, len(read_endpoints(bench.books, workers)))
    chosen = bench.books.bound()
    own = sorted({int(worker["max_in_flight"]) for worker in workers if "max_in_flight" in worker})
    holds = chosen or (own[-1] if own else settings.load(settings.ServerSettings).max_in_flight)
    since = "from now on" if changed else "now"
    if chosen:
        why = f"set by producer bound; {_DEFAULT!r} takes it back"
    else:
        why = "MILL_MAX_IN_FLIGHT of the workers" if own else "MILL_MAX_IN_FLIGHT as set here"
    say(f"At most {holds} requests in flight per model server {since}, over all workers ({why}).")
    if not workers:
        note("no worker runs; the bound holds for those that will.")
        return
    if not chosen and len(own) > 1:
        values = ", ".join(str(one) for one in own)
        note(f"the workers were started with different MILL_MAX_IN_FLIGHT ({values}); each keeps to its own.")
    slots = sum(int(worker.get("slots", 0)) for worker in workers)
    if holds * servers > slots:
        needed = f"{holds} at " + ("the model server" if servers == 1 else f"each of {servers} model servers")
        have = f"{slots} slot{'s' if slots != 1 else ''} of {len(workers)} worker{'s' if len(workers) != 1 else ''}"
        note(f"{have} cannot keep {needed} busy; start more workers (producer scale N) or give them more slots (-c N).")
