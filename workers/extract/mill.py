"""The composition root of a worker that makes hidden states: its parts, proofs that they can work, start and end."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import redis.exceptions
from celery import Celery

import app as ground_floor
from app import broker, settings
from app.celery import publish
from app.ledger import Ledger
from app.lock import LOCK_PATIENCE_S
from app.places import dataset_folder, existing_folder, is_extraction
from app.progress import take_snapshot, write_progress
from app.queue import Queue
from app.records import Ticket
from app.snapshot import Snapshot
from workers.drain import Drain
from workers.extract.engine import Engine
from workers.extract.model import require_packages
from workers.extract.story import ExtractStory
from workers.keeper import Duties, Keeper
from workers.recorder import Recorder


class ExtractMill:
    """One worker process that makes hidden states; it needs no model server."""

    def __init__(self, app: Celery, *, owner: str, slots: int) -> None:
        """Build everything; nothing runs, no model is loaded and nothing is connected yet.

        Raises SettingError, UsageError, BrokerError or StoreError when the work could not be done.
        """
        require_packages()
        at, self._store = settings.load(settings.BrokerSettings), settings.load(settings.StoreSettings)
        limits = settings.load(settings.WorkerSettings)
        self._owner, self._slots = owner, slots
        self._url = broker.resolve(at, self._store)
        self._client = broker.connect(self._url)
        broker.check(self._url)
        self._books = Queue(self._client, at.keys)
        self._check_folders()
        self._started_at = time.time()
        self._engine = Engine(settings.load(settings.ExtractSettings).device)
        self.drain = Drain(limits.drain_s, hand_back=self._hand_back, turn_away=self._turn_away)
        self._recorder = Recorder(self._books, on_stall=lambda _why: None)
        self._story = ExtractStory(
            books=self._books,
            owner=owner,
            store=self._store,
            recorder=self._recorder,
            engine=self._engine,
            stopping=lambda: self.drain.stopping,
        )
        self._last_progress: Snapshot | None = None
        duties = Duties(
            self._heartbeat,
            lambda dataset, ids: publish(app, dataset, ids),
            self._write_progress,
            lambda: None,
            explain=lambda error: str(broker.translate(error, self._url)),
        )
        self.keeper = Keeper(
            self._books, owner, duties, lease_s=limits.lease_s, progress_s=limits.progress_s, extract=True
        )

    def start(self) -> None:
        """Start the threads.

        Raises BrokerError when Redis takes no writes.
        """
        try:
            self._engine.start()
            self.keeper.start()
            self.drain.start()
        except redis.exceptions.RedisError as error:
            raise broker.translate(error, self._url) from error

    def stop(self) -> None:
        """Write what is left and end the threads."""
        self.drain.end()
        self._engine.stop()
        self._recorder.stop()
        self.keeper.stop()
        self._client.close()

    def extract(self, ticket: Ticket) -> None:
        """Do a ticket's work (see ExtractStory.extract)."""
        self._story.extract(ticket)

    def describe(self) -> str:
        """Return one line on slots and the broker."""
        return f"{self._slots} slots for hidden states; the model is loaded for the first one; Redis: {self._url}"

    def _check_folders(self) -> None:
        for dataset in self._books.datasets():
            if is_extraction(dataset) and self._books.depth(dataset):
                with Ledger.open(existing_folder(self._store.prepared_dir, dataset)) as ledger:
                    ledger.check_writable(min_free_bytes=settings.MIN_FREE_DISK_BYTES)

    def _hand_back(self) -> int:
        self._recorder.give_up()
        return self._engine.cancel_waiting()

    def _turn_away(self) -> None:
        self._engine.cancel_waiting()

    def _heartbeat(self) -> dict[str, Any]:
        waits = self._recorder.waits(self._story.datasets)
        state = "draining" if self.drain.stopping else "waiting for disk" if waits else "running"
        return {
            "node": self._owner,
            "host": platform.node(),
            "pid": os.getpid(),
            "version": ground_floor.__version__,
            "slots": self._slots,
            "busy": self._story.busy,
            "started_at": self._started_at,
            "at": time.time(),
            "state": state,
            "note": self._recorder.stalled,
            "makes": "hidden states",
            "device": self._engine.loaded,
            "in_flight": {},
            "held": {},
            "bound": {},
            "latency_s": {},
        }

    def _write_progress(self) -> None:
        prepared = self._store.prepared_dir
        datasets = [name for name in self._books.datasets() if dataset_folder(prepared, name).manifest.exists()]
        if datasets:
            at = self._books.now()
            snapshot = take_snapshot(self._books, prepared, datasets, url=self._url)
            for dataset in datasets:
                with Ledger.open(dataset_folder(prepared, dataset), patience_s=LOCK_PATIENCE_S) as ledger:
                    write_progress(ledger, snapshot, at=at, before=self._last_progress)
            self._last_progress = snapshot
