"""`producer pause` and `resume`: hold a dataset back for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from app.errors import UsageError
from producer.commands.common import Bench, open_bench, say

PAUSE_EXAMPLES = """\b
Examples:
  producer pause chat
  producer pause chat --why "the server gets a new model"
"""
RESUME_EXAMPLES = """\b
Examples:
  producer resume chat
"""


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    cli.command(epilog=PAUSE_EXAMPLES)(pause)
    cli.command(epilog=RESUME_EXAMPLES)(resume)


def pause(
    dataset: str = typer.Argument(..., help="The dataset."),
    why: str = typer.Option("by hand", help="Shown in status."),
) -> None:
    """Stop workers from taking the dataset's samples; running requests finish."""
    with _knowing(dataset) as bench:
        bench.books.pause(dataset, why)
    say(f"{dataset} is paused; producer resume {dataset} goes on.")


def resume(dataset: str = typer.Argument(..., help="The dataset.")) -> None:
    """Let workers take the dataset's samples again."""
    with _knowing(dataset) as bench:
        bench.books.resume(dataset)
    say(f"{dataset} goes on.")


@contextlib.contextmanager
def _knowing(dataset: str) -> Iterator[Bench]:
    with open_bench() as bench:
        if dataset not in bench.books.datasets():
            raise UsageError(f"Redis knows no dataset {dataset!r}; producer status lists those that exist.")
        yield bench
