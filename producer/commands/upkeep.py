"""`producer pause` and `resume`: hold a dataset back for a while."""

from __future__ import annotations

import typer

from app.errors import UsageError
from producer.commands.common import Bench, open_bench, say


def add_to(cli: typer.Typer) -> None:
    """Add the commands."""
    for command in (pause, resume):
        cli.command()(command)


def pause(
    dataset: str = typer.Argument(..., help="The dataset."),
    why: str = typer.Option("by hand", help="Shown in status."),
) -> None:
    """Stop workers from taking the dataset's samples; running requests finish."""
    bench = _knowing(dataset)
    bench.books.pause(dataset, why)
    say(f"{dataset} is paused; producer resume {dataset} goes on.")


def resume(dataset: str = typer.Argument(..., help="The dataset.")) -> None:
    """Let workers take the dataset's samples again."""
    bench = _knowing(dataset)
    bench.books.resume(dataset)
    say(f"{dataset} goes on.")


def _knowing(dataset: str) -> Bench:
    bench = open_bench()
    if dataset not in bench.books.datasets():
        raise UsageError(f"Redis knows no dataset {dataset!r}; producer status lists those that exist.")
    return bench
