"""What a validation found, as a table for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from producer.texts import counted
from producer.validate.findings import Findings
from producer.validate.problems import Problem


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a validation."""

    paths: Sequence[Path]
    shape: str
    rows: int
    supervised_tokens: int | None
    """Tokens with loss mask 1; None for conversations."""
    findings: Findings
    threshold: float
    """The share of rows that may have a tolerable problem, between 0 and 1."""
    checked: Sequence[str]
    """What was looked at."""
    unchecked: Sequence[str]
    """What could not be looked at, and how it can."""
    left_out: Sequence[str] = ()
    """Why records of the dataset are rightly not in the file."""

    @property
    def failures(self) -> list[Problem]:
        """The problems that make the file unfit, in order."""
        return [problem for problem in Problem if self._fails(problem)]

    @property
    def is_sound(self) -> bool:
        """Whether nothing makes the file unfit."""
        return self.rows > 0 and not self.failures

    def _fails(self, problem: Problem) -> bool:
        count = self.findings.counts[problem]
        return count > (self.threshold * self.rows if problem.is_tolerable else 0)

    def sentences(self) -> list[str]:
        """Say it, one line each: the table, examples by row, and the verdict."""
        tokens = "" if self.supervised_tokens is None else f", {self.supervised_tokens:,} supervised tokens"
        names = ", ".join(str(path) for path in self.paths)
        said = [f"{names}: {counted(self.rows, 'row')} ({self.shape}){tokens}."]
        said += [f"Checked: {', '.join(self.checked)}."]
        said += [f"Not checked: {words}." for words in self.unchecked]
        said += self.left_out
        for problem in Problem:
            said += self._problem(problem)
        return [*said, self._verdict()]

    def _problem(self, problem: Problem) -> list[str]:
        count = self.findings.counts[problem]
        if not count:
            return []
        share = f"{100 * count / self.rows:.2f} %" if self.rows else "-"
        mark = "FAIL" if self._fails(problem) else "ok"
        lines = [f"{mark:<5}{count:>9,} {share:>9}  {problem}: {problem.words}."]
        for example in self.findings.examples[problem]:
            name = f"{example.path.name} " if len(self.paths) > 1 else ""
            where = f"{name}row {example.number:,}" if example.number else "not in the file"
            id_ = f" ({example.id})" if example.id else ""
            lines.append(f"{'':<16}{where}{id_}{': ' if example.detail else ''}{example.detail}")
        return lines

    def _verdict(self) -> str:
        if not self.rows:
            return "Unfit: there is no row."
        if self.failures:
            return f"Unfit: {', '.join(self.failures)}."
        return "Sound."
