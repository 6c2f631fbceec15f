"""What a benchmark returns, and the table that is printed of it."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence

_WIDTHS = (50, 12, 11, 5)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number beside its target."""

    name: str
    values: Sequence[float]
    """One per repetition; the median is what counts."""
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    digits: int = 2

    @property
    def median(self) -> float:
        """The middle of all repetitions."""
        return statistics.median(self.values)

    @property
    def target(self) -> str:
        """The target in words; empty for a number that only explains another."""
        if self.at_least is not None:
            return f">= {self.at_least:,g}"
        return "" if self.at_most is None else f"<= {self.at_most:,g}"

    @property
    def met(self) -> str:
        """Whether the median keeps the target: ok, MISS, or nothing where there is none."""
        if self.at_least is not None:
            return "ok" if self.median >= self.at_least else "MISS"
        if self.at_most is not None:
            return "ok" if self.median <= self.at_most else "MISS"
        return ""


@dataclasses.dataclass(frozen=True)
class Options:
    """How long a benchmark may take."""

    repeat: int = 3
    """Repetitions, each with its baseline right before it."""
    full: bool = False
    """Use the sizes that the targets speak of instead of smaller ones."""


def print_heading() -> None:
    """Print the table's first line."""
    _print_row("figure", "target", "median", "", "all values")


def print_figure(figure: Figure) -> None:
    """Print one line of the table."""
    shown = [f"{value:,.{figure.digits}f}" for value in figure.values]
    median = f"{figure.median:,.{figure.digits}f}"
    name = f"{figure.name} [{figure.unit}]" if figure.unit else figure.name
    _print_row(name, figure.target, median, figure.met, " ".join(shown))


def print_load(when: str) -> None:
    """Print how busy the machine is: figures of a busy machine are worth little."""
    print(f"load {when}: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


def _print_row(*cells: str) -> None:
    first, *others = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False))
    print("  ".join([first, *others, *cells[len(_WIDTHS) :]]).rstrip(), flush=True)
