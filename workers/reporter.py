"""Writes the progress files of all datasets, a worker's duty whenever it is its turn."""

from __future__ import annotations

from pathlib import Path

from app.broker import BrokerUrl
from app.ledger import Ledger
from app.lock import LOCK_PATIENCE_S
from app.places import dataset_folder
from app.progress import take_snapshot, write_progress
from app.queue import Queue
from app.snapshot import Snapshot


class Reporter:
    """Knows what it wrote last, so that the next point can tell what came in since."""

    def __init__(self, books: Queue, prepared: Path, url: BrokerUrl) -> None:
        self._books = books
        self._prepared = prepared
        self._url = url
        self._before: Snapshot | None = None

    def write(self) -> None:
        """Write the progress of every dataset that has a folder here.

        Raises StoreError, RedisError.
        """
        folders = {name: dataset_folder(self._prepared, name) for name in self._books.datasets()}
        known = {name: folder for name, folder in folders.items() if folder.manifest.exists()}
        if not known:
            return
        at = self._books.now()
        snapshot = take_snapshot(self._books, self._prepared, list(known), url=self._url)
        for folder in known.values():
            with Ledger.open(folder, patience_s=LOCK_PATIENCE_S) as ledger:
                write_progress(ledger, snapshot, at=at, before=self._before)
        self._before = snapshot
