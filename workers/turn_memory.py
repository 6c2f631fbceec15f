"""The turns of conversations that are durable already: a ledger of their own beside the dataset's records."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from app import jsonl, logs
from app.ledger import Ledger
from app.records import Record, Sample, turn_id
from workers.outcomes import make_pen
from workers.recorder import Entry, Recorder

logger = logging.getLogger(__name__)

_decode_record = msgspec.json.Decoder(Record).decode


class TurnLedger(Ledger):
    """A folder of turns, which may be moved away while workers run: it is made anew, for nobody needs what it held."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock as `Ledger.locked` does, making the folder where only the dataset's own is there."""
        with jsonl.translated(self.folder.path):
            self.folder.path.parent.mkdir(exist_ok=True)
            self.folder.path.mkdir(exist_ok=True)
        with super().locked():
            yield


class TurnMemory:
    """The durable turns of one sample."""

    def __init__(self, dataset: str, sample: Sample, ledger: Ledger, recorder: Recorder) -> None:
        self._dataset = dataset
        self._sample = sample
        self._ledger = ledger
        self._recorder = recorder

    def recall(self) -> Iterator[Record]:
        """Yield the turns from the first one on, up to the first that is not there or cannot be read.

        Raises StoreError.
        """
        for number in itertools.count(1):
            turn = self._read(turn_id(self._sample.id, number))
            if turn is None:
                return
            yield turn

    async def keep(self, record: Record) -> Record:
        """Make an accepted turn durable; return it, or the one that another worker wrote before in its place.

        A line with its id that cannot be used stays as it is, and the turn is not durable then. Raises StoreError.
        """
        recorded: Future[bool] = Future()
        self._recorder.put(Entry(self._dataset, self._ledger, make_pen(record), recorded))
        # The writer goes on when the sample is handed back meanwhile.
        is_new = await asyncio.shield(asyncio.wrap_future(recorded))
        there = record if is_new else await asyncio.to_thread(self._read, record.id)
        if there is not None and there.messages == record.messages:
            return there
        logger.warning(
            "dataset %s: a line of turn %s in %s cannot be used, because it is damaged or answers another history; the "
            "conversation goes on without it",
            self._dataset,
            record.id,
            self._ledger.folder.path,
            extra=logs.fields("turn_unusable", dataset=self._dataset, sample=self._sample.id),
        )
        return record

    def _read(self, id_: str) -> Record | None:
        """Return the durable turn with that id; None where it is not there or cannot be read. Raises StoreError."""
        entry = self._ledger.look_up([id_]).get(id_)
        if entry is None:
            return None
        try:
            return _decode_record(self._ledger.read(entry, id_))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
