"""Turns a dataset's accepted records into tickets for hidden states: safe to run any number of times."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from app import jsonl
from app.errors import DiskFullError, UsageError
from app.extraction import (
    Plan,
    Reason,
    Refusal,
    SourceRecord,
    check_sequence,
    decode_extracted,
    decode_source,
    exact_sequence,
)
from app.feeder import Feeder
from app.index import Entry
from app.ledger import Ledger, Pen
from app.records import Kind, KnownSample, RefusedRow, Sample, Source, encode_line
from app.settings import MIN_FREE_DISK_BYTES
from producer.export.base import Head
from producer.export.selection import select
from producer.measures import size

_CHUNK = 500
_decode_known = msgspec.json.Decoder(KnownSample).decode


@dataclasses.dataclass
class Counts:
    """What an extraction has found and done so far."""

    read: int = 0
    """Accepted records of the source."""
    refused: Counter[Reason] = dataclasses.field(default_factory=Counter)
    recorded: int = 0
    """Samples whose states are on disk, and failed ones that are left alone."""
    waiting: int = 0
    queued: int = 0
    retried: int = 0
    """Of those queued, the ones that had failed before."""


@dataclasses.dataclass
class Survey:
    """What there is to do, before anything is queued."""

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    """What the files will take on disk, about."""
    unknown: int = 0
    """Samples whose length nobody knows yet, for their ids are still to be made of the text."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """A record of the source, and what the extraction knows of it."""

    record: SourceRecord
    refusal: Refusal | None
    entry: Entry | None
    """What is on disk of it; None for a new one."""
    tokens: int = 0
    """About how many; 0 where nobody knows."""

    @property
    def is_open(self) -> bool:
        """Whether its states are still to be made."""
        return self.entry is None or self.entry.kind in {Kind.PENDING, Kind.REFUSED, Kind.FAILED}


class Extraction:
    """One source and one plan; both passes read the source's accepted records, in bounded memory."""

    def __init__(self, source: Ledger, target: Ledger, plan: Plan, *, retry_failed: bool = True) -> None:
        self._source = source
        self._target = target
        self._plan = plan
        self._retry_failed = retry_failed

    def survey(self, on_progress: Callable[[str], None]) -> Survey:
        """Count what is to be made, without queueing anything."""
        found, read = Survey(), 0
        for wishes in self._wishes():
            read += len(wishes)
            for wish in wishes:
                if wish.refusal is None and wish.is_open and self._wants(wish.entry):
                    found.samples += 1
                    found.tokens += wish.tokens
                    found.bytes += self._plan.bytes_of(wish.tokens)
                    found.unknown += not wish.tokens
            on_progress(f"counted {read:,} records, {found.tokens:,} tokens")
        return found

    def check_room(self, found: Survey, folder: Path, *, force: bool) -> str:
        """Return a sentence on what the files will take.

        Raises DiskFullError, with the numbers, when the disk cannot hold them and nothing forces it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with jsonl.translated(folder):
            disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        what = (
            f"{found.samples:,} samples of {found.tokens:,} tokens, at {self._plan.bytes_per_token:,} bytes each, need "
            f"about {size(found.bytes)} in {folder}, which has {size(free)} free"
        )
        if found.bytes + MIN_FREE_DISK_BYTES > free and not force:
            raise DiskFullError(
                f"{what}; free some space, choose another --output or a lower --max-length, or go on with --force."
            )
        return f"{what}."

    def enqueue(
        self,
        feeder: Feeder,
        settings: str,
        *,
        stopping: Callable[[], bool] = lambda: False,
        on_progress: Callable[[Counts], None] = lambda _counts: None,
    ) -> tuple[Counts, bool]:
        """Queue what is neither recorded nor waiting; return the counts, and whether the source's end was reached.

        A sample has a number for life, from 1, in the order in which extractions met the records.
        Raises BrokerError or StoreError; what was queued before stays queued, and the same call goes on.
        """
        counts = Counts()
        following = self._target.totals().samples + 1
        for wishes in self._wishes():
            if stopping():
                return counts, False
            counts.read += len(wishes)
            following = self._take(wishes, following, counts, feeder, settings)
            on_progress(counts)
        return counts, not stopping()

    def _take(self, wishes: Sequence[Wish], following: int, counts: Counts, feeder: Feeder, settings: str) -> int:
        pens, wanted, before = list[Pen](), list[Sample](), dict[str, Kind]()
        for wish in wishes:
            id_, entry = wish.record.id, wish.entry
            if wish.refusal is not None:
                counts.refused[wish.refusal.reason] += 1
                if entry is None:
                    pens.append(_refused(wish.record, wish.refusal, self._plan.source))
                continue
            if not (wish.is_open and self._wants(entry)):
                counts.recorded += 1
                continue
            if entry is None or entry.kind is Kind.REFUSED:
                row, following = following, following + 1
                pens.append(Pen(Kind.PENDING, id_, encode_line(KnownSample(id=id_, row=row))))
            else:
                row = self._row(id_, entry)
            round_ = 0
            if entry is not None and entry.kind is Kind.FAILED:
                round_, before[id_] = entry.round + 1, entry.kind
            where = Source(row=row, name=self._plan.source)
            wanted.append(Sample(id=id_, messages=[], source=where, round=round_, settings=settings))
        if pens:
            self._target.commit(pens)  # on disk before it reaches Redis
        for fed in feeder.feed(wanted, before):
            counts.queued += fed.queued
            counts.waiting += fed.waiting
            counts.retried += fed.retried
        return following

    def _wants(self, entry: Entry | None) -> bool:
        return entry is None or entry.kind is not Kind.FAILED or self._retry_failed

    def _row(self, id_: str, entry: Entry) -> int:
        """Return the number that a known sample has had since it was first taken."""
        line = self._target.read(entry, id_)
        row = _decode_known(line).row if entry.kind is Kind.PENDING else decode_extracted(line).source.row
        return row or 1

    def _wishes(self) -> Iterator[list[Wish]]:
        read = cast("Callable[[bytes], Head]", decode_source)  # it has the fields that are asked for
        for batch in select([self._source], read):
            found = cast("list[SourceRecord]", batch.records)
            for start in range(0, len(found), _CHUNK):
                records = found[start : start + _CHUNK]
                known = self._target.look_up([record.id for record in records])
                yield [self._wish(record, known.get(record.id)) for record in records]

    def _wish(self, record: SourceRecord, entry: Entry | None) -> Wish:
        sequence = exact_sequence(record)
        if isinstance(sequence, Refusal):
            if sequence.reason is Reason.NO_EXACT_IDS and self._plan.retokenize:
                return Wish(record, None, entry, _reported(record))
            return Wish(record, sequence, entry)
        return Wish(record, check_sequence(sequence, self._plan), entry, len(sequence))


def _reported(record: SourceRecord) -> int:
    """Return how many tokens the server counted; 0 where it did not."""
    usage = record.usage
    return (usage.prompt_tokens or 0) + (usage.completion_tokens or 0) if usage else 0


def _refused(record: SourceRecord, why: Refusal, source: str) -> Pen:
    row = RefusedRow(
        id=record.id,
        source=source,
        row=record.source.row or 0,
        reason=why.reason.value,
        detail=why.detail,
        name=record.source.name,
    )
    return Pen(Kind.REFUSED, record.id, encode_line(row), reason=why.reason.value)


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a model's `config.json` says of its shape."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None


def read_model(folder: Path) -> ModelFacts:
    """Read a model's shape from its folder.

    Raises UsageError when that is no model's folder, or does not say.
    """
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        message = f"--model {folder} is not the folder of a model: {path.name} cannot be read ({error.strerror})."
        raise UsageError(message) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be understood: {error}.") from error
    text = config.get("text_config")  # of models that also see or hear
    config = {**config, **text} if isinstance(text, dict) else config
    numbers = [_whole(config.get(name)) for name in _SHAPE]
    if wrong := [name for name, number in zip(_SHAPE, numbers, strict=True) if not number]:
        raise UsageError(f"{path} does not say {', '.join(wrong)}; promptmill needs the config of a causal model.")
    layers, hidden, vocabulary = numbers
    return ModelFacts(layers, hidden, vocabulary, _whole(config.get("max_position_embeddings")) or None)


_SHAPE = ("num_hidden_layers", "hidden_size", "vocab_size")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def choose_layers(text: str, num_layers: int) -> list[int]:
    """Return the auxiliary layers that `--layers` names; `auto` is EAGLE-3's rule: 2, n // 2 and n - 3.

    Raises UsageError.
    """
    if text == "auto":
        layers = [2, num_layers // 2, num_layers - 3]
        if len(set(layers)) < 3 or layers != sorted(layers):
            raise UsageError(
                f"A model of {num_layers} layers has no three different ones by EAGLE-3's rule (2, n // 2, n - 3); "
                "name them, as in --layers 1,2,3."
            )
        return layers
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers {text!r} cannot be read; say auto, or numbers such as 2,18,33.") from None
    if wrong := [layer for layer in layers if not 1 <= layer < num_layers]:
        raise UsageError(
            f"--layers: {wrong[0]} is none of the model's layers 1 to {num_layers - 1}; the states are those that go "
            "into a layer, and the last layer's output is always added."
        )
    if layers != sorted(set(layers)):
        raise UsageError(f"--layers {text} has to rise; trainers expect the states in the model's order.")
    return layers
