"""The composition root of a worker that makes hidden states: its parts, proofs that they can work, start and end."""

from __future__ import annotations

from typing import Any

import redis.exceptions
from celery import Celery

from app import broker, settings
from app.celery import publish
from app.queue import Queue
from app.records import Ticket
from workers.drain import Drain
from workers.extract.engine import Engine
from workers.extract.model import require_packages
from workers.extract.story import ExtractStory
from workers.keeper import Duties, Keeper
from workers.process import Vitals, check_folders
from workers.recorder import Recorder
from workers.reporter import Reporter


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
        check_folders(self._books, self._store.prepared_dir, extract=True)
        self._engine = Engine(settings.load(settings.ExtractSettings).device)
        self.drain = Drain(limits.drain_s, hand_back=self._hand_back, turn_away=self._turn_away)
        self._recorder = Recorder(self._books, on_stall=lambda _why: None)
        self._vitals = Vitals(owner, slots, self._recorder)
        self._story = ExtractStory(
            books=self._books,
            owner=owner,
            store=self._store,
            recorder=self._recorder,
            engine=self._engine,
            stopping=lambda: self.drain.stopping,
        )
        duties = Duties(
            self._heartbeat,
            lambda dataset, ids: publish(app, dataset, ids),
            Reporter(self._books, self._store.prepared_dir, self._url).write,
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

    def _hand_back(self) -> int:
        self._recorder.give_up()
        return self._engine.cancel_waiting()

    def _turn_away(self) -> None:
        self._engine.cancel_waiting()

    def _heartbeat(self) -> dict[str, Any]:
        return {
            **self._vitals.tell(self._story.intake, draining=self.drain.stopping),
            "makes": "hidden states",
            "device": self._engine.loaded,
            "in_flight": {},
            "held": {},
            "bound": {},
            "latency_s": {},
        }
