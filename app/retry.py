"""Asks failed or rejected samples again, from their records: the source is not needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from app import manifest
from app.feeder import Feeder
from app.ledger import Ledger
from app.queue import Queue
from app.records import Kind, Message, Sample

_CHUNK = 500

ASKABLE = frozenset({Kind.FAILED, Kind.REJECTED})
"""What a recorded sample must be for it to be asked again."""


@dataclasses.dataclass
class Again:
    """How far asking again has come."""

    read: int = 0
    """Records looked at."""
    recorded: int = 0
    """Samples that another round has settled meanwhile."""
    waiting: int = 0
    """Samples that were queued or in flight already."""
    queued: int = 0
    complete: bool = True
    """False: it was told to stop before the end."""

    @property
    def samples(self) -> int:
        """Samples that there were to ask again."""
        return self.recorded + self.waiting + self.queued


def ask_again(
    ledger: Ledger,
    feeder: Feeder,
    *,
    kind: Kind,
    reason: str | None = None,
    stopping: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Again], None] = lambda _counts: None,
) -> Again:
    """Queue every sample recorded as `kind` (of one reason, or of any) in a new round.

    Raises BrokerError or StoreError; what was queued before stays queued, and the same call goes on.
    """
    counts = Again()
    samples = iter(_recorded(ledger, kind=kind, reason=reason))
    while chunk := list(islice(samples, _CHUNK)):
        if stopping():
            counts.complete = False
            break
        wanted, before = _next_round(ledger, chunk)
        counts.read += len(chunk)
        counts.recorded += len(chunk) - len(wanted)
        fed = 0
        for part in feeder.feed(wanted, before):
            counts.queued += part.queued
            counts.waiting += part.waiting
            fed += part.queued + part.waiting
        counts.complete = fed == len(wanted)
        on_progress(counts)
        if not counts.complete:
            break
    return counts


def carry_settings(books: Queue, ledger: Ledger, dataset: str) -> None:
    """Tell Redis the dataset's settings from its manifest: an emptied Redis knows none."""
    known = manifest.read(ledger)
    for entry in known.settings if known else []:
        books.register(dataset, entry.fingerprint, entry.content)


def _recorded(ledger: Ledger, *, kind: Kind, reason: str | None) -> Iterator[Sample]:
    """Yield the failed or rejected samples, as they were asked, from their records."""
    for id_, entry in ledger.entries(kind):
        if reason is None or entry.reason == reason:
            yield _decode_asked(ledger.read(entry, id_)).sample()


class _Asked(Sample, frozen=True, kw_only=True):
    """What a record, which has all the fields of its sample, says of it."""

    source_messages: list[Message] | None = None
    """What was asked, where `messages` are a conversation whose turns were made anew."""

    def sample(self) -> Sample:
        """Return the sample as it was asked."""
        fields = {name: getattr(self, name) for name in Sample.__struct_fields__}
        return Sample(**{**fields, "messages": self.source_messages or self.messages})


_decode_asked = msgspec.json.Decoder(_Asked).decode


def _next_round(ledger: Ledger, samples: Sequence[Sample]) -> tuple[list[Sample], dict[str, Kind]]:
    """Return those that are still failed or rejected, in their next round, and what each was."""
    known = ledger.look_up(_ids(samples))
    entries = [(sample, known[sample.id]) for sample in samples if sample.id in known]
    wanted = [(sample, entry) for sample, entry in entries if entry.kind in ASKABLE]
    again = [msgspec.structs.replace(sample, round=entry.round + 1) for sample, entry in wanted]
    return again, {sample.id: entry.kind for sample, entry in wanted}


def _ids(samples: Iterable[Sample]) -> list[str]:
    return [sample.id for sample in samples]
