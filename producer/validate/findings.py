"""What was found so far: a count and a few examples of each problem."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from producer.validate.problems import Problem

EXAMPLES = 3
"""Kept of each problem."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One row with a problem."""

    path: Path
    number: int
    """1-based row; 0 where the row is not in the file."""
    id: str
    detail: str


class Findings:
    """Counts problems; a row has each at most once."""

    def __init__(self) -> None:
        self.counts = Counter[Problem]()
        self.examples: dict[Problem, list[Example]] = {}

    def add(self, problem: Problem, path: Path, number: int, id_: str = "", detail: str = "") -> None:
        """Count a problem and keep it as an example while there are few."""
        self.counts[problem] += 1
        kept = self.examples.setdefault(problem, [])
        if len(kept) < EXAMPLES:
            kept.append(Example(path, number, id_, detail))
