"""The composition root of a worker process: builds the parts, proves that they can work, starts and stops them."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
from typing import Any

import redis.exceptions
from celery import Celery

from app import broker, settings
from app.celery import publish
from app.errors import SettingError, UsageError
from app.places import public_url
from app.queue import Queue
from app.records import Ticket
from workers.caller import Caller
from workers.clients.make import make_client
from workers.drain import Drain
from workers.endpoint import Endpoint
from workers.endpoints import Endpoints
from workers.fault_tally import FaultTally
from workers.keeper import Duties, Keeper
from workers.loop import LoopThread
from workers.process import Vitals, check_folders
from workers.recorder import Recorder
from workers.rendering import Tokenizers
from workers.reporter import Reporter
from workers.story import Story

logger = logging.getLogger(__name__)

_FILES_PER_SLOT = 3
"""A connection to the model server, one to Redis for the ack, and room."""
_FILES_BESIDE = 64


class Mill:
    """One worker process."""

    def __init__(self, app: Celery, *, owner: str, slots: int) -> None:
        """Build everything; nothing runs and nothing is connected yet.

        Raises SettingError or BrokerError, StoreError when the work could not be done.
        """
        at, self._store = settings.load(settings.BrokerSettings), settings.load(settings.StoreSettings)
        self._servers, self._limits = settings.load(settings.ServerSettings), settings.load(settings.WorkerSettings)
        if not self._servers.model_urls:
            message = "MILL_MODEL_URLS is not set; give the model server's URL, such as http://127.0.0.1:8000/v1."
            raise SettingError(message)
        raise_file_limit(slots)
        self._app, self._owner, self._slots = app, owner, slots
        self._url = broker.resolve(at, self._store)
        self._client = broker.connect(self._url)
        broker.check(self._url)
        self._books = Queue(self._client, at.keys)
        self._keys = at.keys
        check_folders(self._books, self._store.prepared_dir)
        self._loop = LoopThread()
        self.drain = Drain(self._limits.drain_s, hand_back=self._hand_back, turn_away=self._turn_away)
        self._recorder = Recorder(self._books, on_stall=self._on_stall)
        self._vitals = Vitals(owner, slots, self._recorder)
        self._faults = FaultTally()
        duties = Duties(
            self._heartbeat,
            lambda dataset, ids: publish(app, dataset, ids),
            Reporter(self._books, self._store.prepared_dir, self._url).write,
            lambda: self._faults.tell(self._books),
            explain=lambda error: str(broker.translate(error, self._url)),
        )
        limits = self._limits
        self.keeper = Keeper(self._books, owner, duties, lease_s=limits.lease_s, progress_s=limits.progress_s)
        self._tokenizers = Tokenizers(self._servers.tokenizer)
        self._endpoints: Endpoints | None = None
        self._story: Story | None = None

    def start(self) -> None:
        """Start the threads and look at the servers once.

        Raises BrokerError when Redis takes no writes.
        """
        try:
            self._start()
        except redis.exceptions.RedisError as error:
            raise broker.translate(error, self._url) from error

    def _start(self) -> None:
        self._loop.start()
        self._endpoints = self._loop.call(self._open_endpoints(), timeout_s=120)
        self._story = Story(
            books=self._books,
            owner=self._owner,
            store=self._store,
            caller=Caller(self._endpoints, self._limits),
            recorder=self._recorder,
            faults=self._faults,
            loop=self._loop,
            stopping=lambda: self.drain.stopping,
        )
        self.keeper.start()
        self.drain.start()

    def stop(self) -> None:
        """Write what is left and end the threads."""
        self.drain.end()
        self._recorder.stop()
        if self._endpoints is not None:
            self._loop.call(self._close_endpoints(self._endpoints), timeout_s=30)
        self.keeper.stop()
        self._loop.stop()
        self._client.close()

    def generate(self, ticket: Ticket) -> None:
        """Do a ticket's work (see Story.generate)."""
        if self._story is None:  # Celery starts slots after the worker's start
            raise RuntimeError("the worker has not started")
        self._story.generate(ticket)

    def describe(self) -> str:
        """Return one line on slots, servers and the broker."""
        backends = {one.url: one.client.backend for one in self._endpoints.all} if self._endpoints else {}
        found = {url: f", {backend.shown}" for url, backend in backends.items() if backend.label}
        servers = ", ".join(f"{public_url(url)}{found.get(url, '')}" for url in self._servers.model_urls)
        bound = self._servers.max_in_flight
        return f"{self._slots} slots; model servers: {servers} (at most {bound} requests each); Redis: {self._url}"

    async def _open_endpoints(self) -> Endpoints:
        servers = self._servers
        endpoints = Endpoints(
            [
                Endpoint(
                    url=url,
                    client=make_client(url, servers, self._tokenizers, max_connections=self._slots + 8),
                )
                for url in servers.model_urls
            ],
            redis=self._client,
            keys=self._keys,
            owner=self._owner,
            bound=servers.max_in_flight,
            probe_s=self._limits.probe_s,
        )
        await endpoints.look_at_all()
        self._housekeeping = asyncio.get_running_loop().create_task(endpoints.keep())
        return endpoints

    async def _close_endpoints(self, endpoints: Endpoints) -> None:
        self._housekeeping.cancel()
        await endpoints.give_back()
        await endpoints.close()

    def _hand_back(self) -> int:
        self._recorder.give_up()
        return self._story.hand_back() if self._story else 0

    def _turn_away(self) -> None:
        if self._endpoints is not None:
            self._loop.soon(self._endpoints.turn_away)

    def _on_stall(self, why: str | None) -> None:
        if self._endpoints is not None:
            self._loop.soon(self._endpoints.shut, why)

    def _heartbeat(self) -> dict[str, Any]:
        endpoints = self._endpoints.all if self._endpoints else []
        return {
            **self._vitals.tell(self._story.intake if self._story else None, draining=self.drain.stopping),
            "max_in_flight": self._servers.max_in_flight,
            "in_flight": {endpoint.name: endpoint.pool.in_use for endpoint in endpoints},
            "held": {endpoint.name: endpoint.pool.held for endpoint in endpoints},
            "bound": {endpoint.name: endpoint.pool.bound for endpoint in endpoints},
            "latency_s": {endpoint.name: endpoint.latency_s for endpoint in endpoints},
            "backend": {endpoint.name: endpoint.client.backend.label for endpoint in endpoints},
            "templates": self._tokenizers.fingerprints,
        }


def files_needed(slots: int) -> int:
    """Return how many files a worker with so many slots may have open at once."""
    return _FILES_PER_SLOT * slots + _FILES_BESIDE


def raise_file_limit(slots: int) -> None:
    """Raise the soft limit on open files as far as these slots need it.

    Raises UsageError naming both numbers when the hard limit is too low.
    """
    needed = files_needed(slots)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            fitting = max(1, (hard - _FILES_BESIDE) // _FILES_PER_SLOT)
            raise UsageError(
                f"{slots} slots need {needed} open files and this process may have {hard}; raise the limit "
                f"(ulimit -n {needed}) or lower the concurrency (-c {fitting})."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        logger.info("raised the limit on open files from %d to %d", soft, needed)


def spare_the_collector() -> None:
    """Keep Python's cycle collector off what start-up made, which stays: going through it took a tenth of the CPU."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
