"""Runs the broker, the workers and Flower of this machine in the background, and knows which of them are its own."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from app import broker as app_broker
from app.errors import MillError, SettingError, UsageError
from app.settings import BrokerSettings, ServerSettings, StoreSettings, WorkerSettings, child_environment, load
from producer import local_broker, local_flower, processes, service_book, state_lock
from producer.processes import Process
from producer.service_book import Services

SPARE_SLOTS = 8
"""Slots of a worker beyond its share of the requests in flight, so that the next sample always waits ready."""
WORKER_START_S = 90
FLOWER_START_S = 60
BESIDE_START_S = 60
STOP_S = 10
"""Seconds in which Flower and what runs beside the workers must end, and the workers after their drain."""


def slots_each(in_flight: int, workers: int) -> int:
    """Return the slots of each worker where so many share the requests in flight."""
    return math.ceil(in_flight / workers) + SPARE_SLOTS


@dataclasses.dataclass(frozen=True)
class UpReport:
    """What `up` and `scale` found, started and want a person to know."""

    services: Services
    """What runs now."""
    started: tuple[str, ...]
    """Names of what was started just now."""
    notes: tuple[str, ...]
    """One sentence each."""


@dataclasses.dataclass(frozen=True)
class LocalServices:
    """The services of one state folder."""

    broker: BrokerSettings
    store: StoreSettings
    server: ServerSettings
    worker: WorkerSettings
    say: Callable[[str], None] = lambda _sentence: None
    """Called with one sentence before each step that takes a while."""

    @classmethod
    def from_settings(cls, say: Callable[[str], None]) -> LocalServices:
        """Build it from the machine's settings."""
        return cls(
            broker=load(BrokerSettings),
            store=load(StoreSettings),
            server=load(ServerSettings),
            worker=load(WorkerSettings),
            say=say,
        )

    def up(
        self, *, workers: int, concurrency: int | None = None, flower: bool = True, log_format: str | None = None
    ) -> UpReport:
        """Make sure that a broker, at least `workers` workers and Flower run; what runs already is left as it is.

        On failure or Ctrl-C, what this call started is stopped again.
        Raises SettingError, BrokerError, or MillError quoting the log of the worker that did not start.
        """
        if workers:
            self._require_model_server()
        with state_lock.held(self.store.state, say=self.say):
            before = self.running()
            with self._undone_on_failure(before):
                self._ensure_broker(before)
                slots = (before.concurrency if before.working else 0) or concurrency or self._slots(workers)
                if not before.working:
                    self._write(self.running(), log_format=log_format or "")
                self._start_workers(workers - len(before.working), slots)
                notes = self._notes(before, workers=workers, concurrency=concurrency, log_format=log_format)
                if flower:
                    notes += self._ensure_flower()
            return self._report(before, notes)

    def scale(self, workers: int) -> UpReport:
        """Start workers, or stop the newest, so that `workers` take samples; those finish their requests first.

        Raises UsageError when nothing runs yet, SettingError when more are wanted and no model server is set, and
        MillError when a new worker does not start.
        """
        with state_lock.held(self.store.state, say=self.say):
            before = self.running()
            if not before.working:
                raise UsageError("No workers run here; start them with `producer up --workers N`.")
            surplus = before.working[workers:]
            if surplus:
                self._drain(before, surplus)
                names = ", ".join(worker.name for worker in surplus)
                note = f"{names}: finishing requests in flight for up to {self.worker.drain_s:.0f} s, then ending."
                return self._report(before, [note])
            if workers > len(before.working):
                self._require_model_server()
            with self._undone_on_failure(before):
                self._start_workers(workers - len(before.working), before.concurrency)
            return self._report(before, [])

    def down(self) -> tuple[str, ...]:
        """Stop Flower, the workers, what runs beside them, and at last the embedded broker; return their names.

        The broker's append-only file keeps the queue. Processes that were not started here are left alone.
        """
        with state_lock.held(self.store.state, say=self.say):
            services = self.running()
            self._stop(services)
            service_book.write(self.store.state, Services())
            return tuple(process.name for process in services.all)

    def run_beside(self, name: str, command: Sequence[str], *, is_ready: Callable[[], bool]) -> Process:
        """Start a process that `down` stops too, and wait until it is ready; one of that name that runs is kept.

        Raises MillError quoting its log when it ends or is not ready in time.
        """
        with state_lock.held(self.store.state, say=self.say):
            services = self.running()
            for process in services.beside:
                if process.name == name:
                    return process
            with self._undone_on_failure(services):
                with processes.uninterrupted():
                    process = self._spawn(name, command)
                    self._write(services, beside=(*services.beside, process))
                self._require_ready(process, is_ready, seconds=BESIDE_START_S)
            return process

    def run_extractors(self, count: int, *, concurrency: int | None = None) -> tuple[str, ...]:
        """Make sure that `count` workers of hidden states run beside the others; return the names of those started.

        Raises MillError quoting the log of one that did not start.
        """
        started = []
        for name in (f"extract{number}" for number in range(1, count + 1)):
            with state_lock.held(self.store.state, say=self.say):
                services = self.running()
                if any(process.name == name for process in services.beside):
                    continue
                self.say(f"Starting {name}.")
                slots = () if concurrency is None else ("-c", str(concurrency))
                node = f"{name}-{secrets.token_hex(3)}@%h"
                command = _celery("worker", *slots, "-n", node, "--loglevel", "INFO")
                with self._undone_on_failure(services):
                    with processes.uninterrupted():
                        worker = self._spawn(name, command, MILL_EXTRACT="true")
                        self._write(services, beside=(*services.beside, worker))
                    self._require_ready(worker, partial(_says_ready, worker), seconds=WORKER_START_S)
                started.append(name)
        return tuple(started)

    def running(self) -> Services:
        """Return what was started here and still runs; a recycled process id does not count."""
        return service_book.read(self.store.state)

    def is_current(self) -> bool:
        """Say whether the workers that run, if any, were started with the settings of now."""
        services = self.running()
        return not services.working or services.settings == self._digest()

    def _require_model_server(self) -> None:
        if not self.server.model_urls:
            raise SettingError(
                "The workers have no model server; set MILL_MODEL_URLS to its base URL, such as http://127.0.0.1:8000/v1."
            )

    def _slots(self, workers: int) -> int:
        return slots_each(self.server.max_in_flight * len(self.server.model_urls), max(workers, 1))

    def _ensure_broker(self, before: Services) -> None:
        if self.broker.redis_url is not None:
            url = app_broker.resolve(self.broker, self.store)
            app_broker.check(url)
            return
        recorded = local_broker.recorded(self.store.state)
        if recorded and local_broker.is_running(self.store.state, recorded):
            return
        self.say("Starting the embedded Redis server.")
        if before.broker is not None and recorded is not None:
            local_broker.stop(self.store.state, recorded, say=self.say)
        local_broker.start(self.store.state)

    def _start_workers(self, count: int, concurrency: int) -> None:
        """Start `count` more workers, if any, and wait until each takes samples."""
        if count <= 0:
            return
        self.say(f"Starting {count} worker{'s' * (count > 1)} with {concurrency} slots each.")
        fresh = []
        for _ in range(count):
            services = self.running()
            taken = {worker.name for worker in services.workers}
            name = next(name for number in range(1, len(taken) + 2) if (name := f"mill{number}") not in taken)
            # Containers and hosts may share a host name, and a successor must not be taken for its predecessor.
            node = f"{name}-{secrets.token_hex(3)}@%h"
            settings = services.settings if services.working else self._digest()
            with processes.uninterrupted():
                worker = self._spawn(name, _celery("worker", "-c", str(concurrency), "-n", node, "--loglevel", "INFO"))
                workers = (*services.workers, worker)
                self._write(services, workers=workers, concurrency=concurrency, settings=settings)
            fresh.append(worker)
        for worker in fresh:
            self._require_ready(worker, partial(_says_ready, worker), seconds=WORKER_START_S)

    def _ensure_flower(self) -> list[str]:
        """Start Flower unless it runs; it only watches, so what goes wrong is a note and stops nothing."""
        services = self.running()
        if services.flower is not None:
            return []
        self.say("Starting Flower.")
        plan = local_flower.plan(child_environment())
        with processes.uninterrupted():
            flower = self._spawn("flower", _celery(*plan.arguments))
            self._write(services, flower=flower, flower_url=plan.url)
        trouble = processes.wait_ready(flower, plan.answers, seconds=FLOWER_START_S)
        if trouble:
            processes.stop([flower], seconds=STOP_S, say=self.say)
            return [f"Flower did not start, {trouble} (log: {flower.log}); the work goes on without it."]
        moved = plan.port != plan.first_port
        return [f"Flower is on port {plan.port}, because another process has {plan.first_port}."] if moved else []

    def _spawn(self, name: str, command: Sequence[str], **more: str) -> Process:
        """Start a process with this one's folder and environment, told where the state and the records are."""
        extra = {
            **more,
            "MILL_STATE_DIR": str(self.store.state_dir.resolve()),
            "MILL_PREPARED_DIR": str(self.store.prepared_dir.resolve()),
            "MILL_MODEL_URLS": ",".join(self.server.model_urls),
        }
        if self.broker.redis_url is not None:
            extra["MILL_REDIS_URL"] = self.broker.redis_url.get_secret_value()
        if log_format := self.running().log_format:
            extra["MILL_LOG_FORMAT"] = log_format
        log = self.store.state.logs.resolve() / f"{name}.log"
        try:
            return processes.start(name, command, log=log, env=child_environment(extra))
        except OSError as error:
            raise MillError(f"{name} could not be started: {error}.") from error

    def _require_ready(self, process: Process, is_ready: Callable[[], bool], *, seconds: float) -> None:
        trouble = processes.wait_ready(process, is_ready, seconds=seconds)
        if trouble:
            raise MillError(f"{process.name} did not start, {trouble} (log: {process.log}).")

    def _notes(self, before: Services, *, workers: int, concurrency: int | None, log_format: str | None) -> list[str]:
        """Say where what runs differs from what was asked for."""
        if not before.working:
            return []
        notes = []
        if len(before.working) > workers:
            notes.append(f"{len(before.working)} workers run already and stay; `producer scale {workers}` stops some.")
        if concurrency not in {None, before.concurrency}:
            notes.append(
                f"The workers have {before.concurrency} slots each; `producer down`, then `up` again, changes that."
            )
        if log_format not in {None, before.log_format}:
            notes.append("The workers' log format stays; `producer down`, then `up` again, changes it.")
        if not self.is_current():
            notes.append(
                "The workers still run with the settings of their start, which have changed since; "
                "`producer down`, then `up` again, applies the new ones."
            )
        return notes

    def _report(self, before: Services, notes: Sequence[str]) -> UpReport:
        services = self.running()
        fresh = service_book.minus(services, before)
        started = tuple(process.name for process in fresh.all if not process.draining)
        return UpReport(services=services, started=started, notes=tuple(notes))

    def _drain(self, services: Services, surplus: Sequence[Process]) -> None:
        for worker in reversed(surplus):
            processes.signal_process(worker, signal.SIGTERM)
        workers = tuple(
            msgspec.structs.replace(worker, draining=worker.draining or worker in surplus)
            for worker in services.workers
        )
        self._write(services, workers=workers)

    def _stop(self, services: Services) -> None:
        flower = (services.flower,) if services.flower else ()
        if services.workers:
            names = ", ".join(worker.name for worker in services.workers)
            self.say(f"Stopping {names}: requests in flight have {self.worker.drain_s:.0f} s to finish.")
        # Both are told at once; the broker must still be there when the workers hand back what they did not finish.
        for process in flower:
            processes.signal_process(process, signal.SIGTERM)
        processes.stop(services.workers, seconds=self.worker.drain_s + STOP_S, say=self.say)
        processes.stop((*flower, *services.beside), seconds=STOP_S, say=self.say)
        if services.broker:
            processes.stop((services.broker,), seconds=local_broker.STOP_S, say=self.say)

    @contextlib.contextmanager
    def _undone_on_failure(self, before: Services) -> Iterator[None]:
        """Stop what was started inside, when what is inside fails or is interrupted."""
        try:
            yield
        except BaseException:
            self._stop(service_book.minus(self.running(), before))
            service_book.write(self.store.state, self.running())
            raise

    def _write(self, services: Services, **changes: object) -> None:
        service_book.write(self.store.state, msgspec.structs.replace(services, **changes))

    def _digest(self) -> str:
        """Return a digest of the settings that a worker reads at its start."""
        groups = (self.broker, self.store, self.server, self.worker)
        secret_values = (self.broker.redis_url, self.broker.redis_password, self.server.api_key)
        text = [group.model_dump_json() for group in groups]
        text += [value.get_secret_value() if value else "" for value in secret_values]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _says_ready(worker: Process) -> bool:
    return " ready." in processes.own_words(worker)


def _celery(*arguments: str) -> list[str]:
    """Return the command for one of Celery's programs; -P keeps the working folder's modules out of the import path."""
    return [sys.executable, "-P", "-m", "producer.celery_process", *arguments]
