"""What differs between two datasets of the same prompts: outcomes, lengths, latencies and the answers themselves."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from app.histogram import Collector
from app.index import Entry
from app.ledger import Ledger
from app.records import ANSWERED, RECORDED, Kind, Message, Usage

_QUANTILES = (0.05, 0.5, 0.95)
_TELL_EVERY = 1000


class _Record(msgspec.Struct):
    messages: list[Message] = []
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    latency_s: float | None = None
    usage: Usage = Usage()


_decode = msgspec.json.Decoder(_Record).decode


class Spread(msgspec.Struct, frozen=True):
    """How a number is distributed over one dataset's answers."""

    n: int
    mean: float | None
    p5: float | None
    p50: float | None
    p95: float | None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two datasets."""

    dataset: str
    accepted: int
    rejected: int
    failed: int
    only: int
    """Recorded samples that the other one has not recorded."""
    tokens: Spread
    """Of the answers of the samples that both have answered; so is the next."""
    latency_s: Spread


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A sample whose two answers are very different."""

    id: str
    outcomes: tuple[str, str]
    tokens: tuple[int, int]
    prompt: str
    answers: tuple[str, str]


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """All that differs between two datasets."""

    a: Side
    b: Side
    both: int
    """Samples that both have recorded."""
    answered: int
    """Samples that both have an answer of, accepted or rejected."""
    equal: int
    """Of those, the ones whose contents and tool calls are the same."""
    outcomes: list[tuple[str, str, int]]
    """(outcome in A, outcome in B, samples), the changes first."""
    examples: list[Example]
    """The answers whose lengths differ most, the biggest difference first."""


class _Pair(NamedTuple):
    id: str
    a: Entry | None
    b: Entry | None


def compare(
    a: tuple[str, Ledger], b: tuple[str, Ledger], *, examples: int, on_progress: Callable[[str], None]
) -> Differences:
    """Compare two datasets by the ids of their samples, in id order and bounded memory.

    Raises StoreError when a folder cannot be read.
    """
    names, ledgers = (a[0], b[0]), (a[1], b[1])
    for ledger in ledgers:
        ledger.catch_up()
    kinds, only, outcomes = [Counter[Kind](), Counter[Kind]()], [0, 0], Counter[tuple[str, str]]()
    answers = _Answers(ledgers, examples)
    both = 0
    for number, pair in enumerate(_pairs(ledgers)):
        if not number % _TELL_EVERY:
            on_progress(f"compared {number:,} samples")
        for side, entry in enumerate(pair[1:]):
            if entry is not None:
                kinds[side][entry.kind] += 1
        if pair.a is None or pair.b is None:
            only[pair.a is None] += 1
            continue
        both += 1
        outcomes[_outcome(pair.a), _outcome(pair.b)] += 1
        if pair.a.kind in ANSWERED and pair.b.kind in ANSWERED:
            answers.take(pair.id, (pair.a, pair.b))
    sides = [_side(names[n], kinds[n], only[n], answers.tokens[n], answers.latency[n]) for n in range(2)]
    rows = sorted(outcomes.items(), key=lambda row: (row[0][0] == row[0][1], -row[1], row[0]))
    return Differences(
        a=sides[0],
        b=sides[1],
        both=both,
        answered=answers.n,
        equal=answers.equal,
        outcomes=[(before, after, n) for (before, after), n in rows],
        examples=answers.examples(),
    )


def _side(name: str, kinds: Counter[Kind], only: int, tokens: Collector, latency: Collector) -> Side:
    return Side(
        dataset=name,
        accepted=kinds[Kind.ACCEPTED],
        rejected=kinds[Kind.REJECTED],
        failed=kinds[Kind.FAILED],
        only=only,
        tokens=_spread(tokens),
        latency_s=_spread(latency),
    )


def _spread(values: Collector) -> Spread:
    histogram = values.histogram()
    p5, p50, p95 = (histogram.quantile(share) for share in _QUANTILES)
    return Spread(histogram.count, histogram.mean, p5, p50, p95)


def _pairs(ledgers: Sequence[Ledger]) -> Iterator[_Pair]:
    """Yield every id that either has recorded, in id order (SQLite's is that of Python)."""
    merged = heapq.merge(*map(_placed, itertools.count(), ledgers), key=_id_of)
    for id_, group in itertools.groupby(merged, key=_id_of):
        found = {side: entry for _id, side, entry in group}
        yield _Pair(id_, found.get(0), found.get(1))


def _placed(side: int, ledger: Ledger) -> Iterator[tuple[str, int, Entry]]:
    return ((id_, side, entry) for id_, entry in ledger.entries(*RECORDED))


def _id_of(item: tuple[str, int, Entry]) -> str:
    return item[0]


def _outcome(entry: Entry) -> str:
    return f"{entry.kind}: {entry.reason}" if entry.reason else entry.kind.value


class _Answers:
    """What the answers of both datasets come to."""

    def __init__(self, ledgers: Sequence[Ledger], examples: int) -> None:
        self._ledgers = ledgers
        self._most = examples
        self._biggest = list[tuple[int, str, tuple[Entry, Entry]]]()
        self.tokens = (Collector(), Collector())
        self.latency = (Collector(), Collector())
        self.n = 0
        self.equal = 0

    def take(self, id_: str, entries: tuple[Entry, Entry]) -> None:
        """Take a sample in that both have answered."""
        records = self._read(id_, entries)
        for side, record in enumerate(records):
            if record.usage.completion_tokens is not None:
                self.tokens[side].add(record.usage.completion_tokens)
            if record.latency_s is not None:
                self.latency[side].add(record.latency_s)
        self.n += 1
        is_equal = _said(records[0]) == _said(records[1])
        self.equal += is_equal
        if not is_equal and self._most:
            item = (abs(_length(records[0]) - _length(records[1])), id_, entries)
            (heapq.heappush if len(self._biggest) < self._most else heapq.heappushpop)(self._biggest, item)

    def examples(self) -> list[Example]:
        """Return those that differ most."""
        return [self._example(id_, entries) for _by, id_, entries in sorted(self._biggest, reverse=True)]

    def _read(self, id_: str, entries: tuple[Entry, Entry]) -> tuple[_Record, _Record]:
        first, second = (_decode(ledger.read(entry, id_)) for ledger, entry in zip(self._ledgers, entries, strict=True))
        return first, second

    def _example(self, id_: str, entries: tuple[Entry, Entry]) -> Example:
        records = self._read(id_, entries)
        asked = next((m.get("content") for m in reversed(records[0].messages) if m.get("role") == "user"), "")
        return Example(
            id=id_,
            outcomes=(_outcome(entries[0]), _outcome(entries[1])),
            tokens=(_length(records[0]), _length(records[1])),
            prompt=asked if isinstance(asked, str) else msgspec.json.encode(asked).decode(),
            answers=(_text(records[0]), _text(records[1])),
        )


def _said(record: _Record) -> tuple[str, list[Any]]:
    """Return what is compared: the content, and the calls without their ids, which are random."""
    return (record.content or "").strip(), [call.get("function") for call in record.tool_calls or ()]


def _length(record: _Record) -> int:
    """Return the answer's tokens, or where the server counted none, a guess from its characters."""
    tokens = record.usage.completion_tokens
    return tokens if tokens is not None else len((record.reasoning or "") + _text(record)) // 4


def _text(record: _Record) -> str:
    calls = "".join(f"\n{msgspec.json.encode(call.get('function')).decode()}" for call in record.tool_calls or ())
    return (record.content or "") + calls
