"""What worker processes of every kind prove before they start, and tell of themselves while they run."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import app as ground_floor
from app import settings
from app.ledger import Ledger
from app.places import existing_folder, is_extraction
from app.queue import Queue
from workers.intake import Intake
from workers.recorder import Recorder


def check_folders(books: Queue, prepared: Path, *, extract: bool = False) -> None:
    """Prove that the folder of every dataset with work for this kind of worker can be written.

    `extract`: the worker makes hidden states. Raises StoreError.
    """
    for dataset in books.datasets():
        if is_extraction(dataset) == extract and books.depth(dataset):
            with Ledger.open(existing_folder(prepared, dataset)) as ledger:
                ledger.check_writable(min_free_bytes=settings.MIN_FREE_DISK_BYTES)


class Vitals:
    """What the heartbeat of every worker says."""

    def __init__(self, owner: str, slots: int, recorder: Recorder) -> None:
        """Begin now."""
        self._owner = owner
        self._slots = slots
        self._recorder = recorder
        self._started_at = time.time()

    def tell(self, intake: Intake | None, *, draining: bool) -> dict[str, Any]:
        """Return the fields as they are now; without an intake the worker has taken nothing yet."""
        waits = self._recorder.waits(intake.datasets if intake else set())
        return {
            "node": self._owner,
            "host": platform.node(),
            "pid": os.getpid(),
            "version": ground_floor.__version__,
            "slots": self._slots,
            "busy": intake.busy if intake else 0,
            "started_at": self._started_at,
            "at": time.time(),
            "state": "draining" if draining else "waiting for disk" if waits else "running",
            "note": self._recorder.stalled,
        }
