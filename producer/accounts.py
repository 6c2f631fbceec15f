"""What verify tells of a dataset, as values, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from producer.scan import Bad


class Counts(msgspec.Struct, kw_only=True):
    """How many ids are what, in the words of status, and adding up as they do there.

    read = refused + samples; samples = accepted + rejected + failed + left; left = queued + in_flight + missing.
    What only Redis knows is null without it.
    """

    read: int = 0
    refused: int = 0
    samples: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    left: int = 0
    """Samples without a final record."""
    queued: int | None = 0
    """With a payload in Redis and no living worker that asks them."""
    in_flight: int | None = 0
    missing: int | None = 0
    """Neither recorded nor in Redis."""
    orphaned: int | None = 0
    """Of `queued`, those whose worker died."""
    without_ticket: int | None = 0
    """Of `queued`, those that no ticket, queued or delivered, will ever ask for."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found; complete means that every sample is accepted or rejected, once, in sound files."""

    dataset: str
    at: float
    """Unix seconds."""
    counts: Counts
    problems: list[str]
    """One sentence each: what is wrong, how much of it, and what to do."""
    notes: list[str]
    """Sentences that need nothing done."""
    missing: list[str]
    """The first ids that are neither recorded nor in Redis."""
    duplicates: list[str]
    """The first ids that more than one accepted line has."""
    bad_lines: list[Bad]
    """The first lines that are no sound records."""
    repairs: list[str] = dataclasses.field(default_factory=list)
    """What was done before this look, or would be; one sentence each."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do or to mend."""
        return not self.problems

    def render(self) -> str:
        """Return the report as plain text."""
        counts = ", ".join(
            f"{name.replace('_', ' ')} {'unknown' if n is None else format(n, ',')}"
            for name, n in msgspec.structs.asdict(self.counts).items()
        )
        lines = [f"+ {repair}" for repair in self.repairs]
        lines += [f"{self.dataset}: {'complete' if self.complete else 'NOT complete'}", counts]
        lines += [f"! {problem}" for problem in self.problems]
        lines += [f"  {bad.file}, byte {bad.offset}: {bad.reason}" for bad in self.bad_lines]
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, Any]:
        """Return the report's fields for JSON, with `complete` before them."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"complete": self.complete, **fields}


def as_json(reports: Mapping[str, Report]) -> bytes:
    """Return reports by dataset as strict, indented JSON."""
    documents = {dataset: report.document() for dataset, report in reports.items()}
    return msgspec.json.format(msgspec.json.encode(documents), indent=2) + b"\n"
