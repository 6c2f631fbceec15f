"""The turns of conversations that are durable already: a ledger of their own beside the dataset's records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from app.errors import StoreError
from app.ledger import Ledger
from app.records import Record, Sample, turn_id
from workers.outcomes import make_pen
from workers.recorder import Entry, Recorder

_PAGE = 16
"""Turns that are looked up at once."""

_decode_record = msgspec.json.Decoder(Record).decode


class TurnMemory:
    """The durable turns of one sample."""

    def __init__(self, dataset: str, sample: Sample, ledger: Ledger, recorder: Recorder) -> None:
        self._dataset = dataset
        self._sample = sample
        self._ledger = ledger
        self._recorder = recorder

    @property
    def place(self) -> str:
        """Where they are."""
        return str(self._ledger.folder.path)

    def recall(self) -> Iterator[Record]:
        """Yield the turns from the first one on, up to the first that is not there or cannot be read.

        Raises StoreError.
        """
        first = 1
        while True:
            ids = [turn_id(self._sample.id, number) for number in range(first, first + _PAGE)]
            entries = self._ledger.look_up(ids)
            for id_ in ids:
                if id_ not in entries:
                    return
                try:
                    yield _decode_record(self._ledger.read(entries[id_], id_))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return
            first += _PAGE

    async def keep(self, record: Record) -> Record:
        """Make an accepted turn durable; return it, or the one that another worker wrote before under its id.

        Raises StoreError.
        """
        recorded: Future[bool] = Future()
        self._recorder.put(Entry(self._dataset, self._ledger, make_pen(record), recorded, ends_sample=False))
        # The writer goes on when the sample is handed back meanwhile.
        is_new = await asyncio.shield(asyncio.wrap_future(recorded))
        return record if is_new else await asyncio.to_thread(self._read, record.id)

    def _read(self, id_: str) -> Record:
        entry = self._ledger.look_up([id_]).get(id_)
        try:
            if entry is not None:
                return _decode_record(self._ledger.read(entry, id_))
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise StoreError(
            f"The turn {id_} in {self.place} cannot be read; move that folder away, and its conversations begin anew."
        )
