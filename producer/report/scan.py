"""Reads every record of a dataset once and keeps distributions alone, however many there are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from app import jsonl
from app.histogram import Collector
from app.places import DatasetFolder
from app.records import RECORDED, Kind

_TELL_EVERY = 5000
"""Lines between two calls of `tell`."""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Turn(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


class _Head(msgspec.Struct):
    """What a report needs of a record; the decoder passes over all the rest."""

    usage: _Usage | None = None
    turns: list[_Turn] = []
    latency_s: float | None = None
    attempts: int | None = None
    model: str | None = None


_decode = msgspec.json.Decoder(_Head).decode


@dataclasses.dataclass
class Scan:
    """What all records of a dataset have in common."""

    lengths: Collector = dataclasses.field(default_factory=Collector)
    """Completion tokens of accepted samples."""
    prompts: Collector = dataclasses.field(default_factory=Collector)
    """Their prompt tokens."""
    latencies: Collector = dataclasses.field(default_factory=Collector)
    """Seconds of the answered calls, accepted or rejected."""
    reasoning: int = 0
    """Reasoning tokens of accepted samples, where the server tells them."""
    attempts: Counter[int] = dataclasses.field(default_factory=Counter)
    """Calls -> accepted samples that took so many."""
    models: Counter[str] = dataclasses.field(default_factory=Counter)
    """The servers' names of the model -> accepted samples."""

    def merge(self, other: Scan) -> None:
        """Add what another dataset has."""
        self.lengths.take(other.lengths.histogram())
        self.prompts.take(other.prompts.histogram())
        self.latencies.take(other.latencies.histogram())
        self.reasoning += other.reasoning
        self.attempts.update(other.attempts)
        self.models.update(other.models)


def size_of(folder: DatasetFolder) -> int:
    """Return how many bytes a scan reads."""
    return sum(path.stat().st_size for kind in RECORDED if (path := folder.lines(kind)).exists())


def scan(folder: DatasetFolder, *, tell: Callable[[int], None] = lambda _bytes: None) -> Scan:
    """Read every record; `tell` hears now and then how many bytes more have been read.

    Lines that are no records are passed over. Raises StoreError.
    """
    found = Scan()
    for kind in RECORDED:
        for head in _heads(folder, kind, tell):
            if kind is not Kind.FAILED:
                _count(found.latencies, head.latency_s)
            if kind is Kind.ACCEPTED:
                _add(found, head)
    return found


def _count(values: Collector, value: float | None) -> None:
    """Count a value, if there is one that can be."""
    if value is not None and value >= 0:
        values.add(value)


def _sum(counts: Iterable[int | None]) -> int | None:
    """Return the sum over a sample's turns; None where none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _add(found: Scan, head: _Head) -> None:
    usages = [turn.usage for turn in head.turns] or [head.usage or _Usage()]
    _count(found.lengths, _sum(usage.completion_tokens for usage in usages))
    _count(found.prompts, _sum(usage.prompt_tokens for usage in usages))
    found.reasoning += sum(usage.reasoning_tokens or 0 for usage in usages)
    if head.attempts:
        found.attempts[head.attempts] += 1
    if head.model:
        found.models[head.model] += 1


def _heads(folder: DatasetFolder, kind: Kind, tell: Callable[[int], None]) -> Iterator[_Head]:
    read, told = 0, 0
    for number, line in enumerate(jsonl.read_lines(folder.lines(kind)), start=1):
        read = line.offset + len(line.data) + 1
        if number % _TELL_EVERY == 0:
            tell(read - told)
            told = read
        try:
            yield _decode(line.data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # verify names them
    tell(read - told)
