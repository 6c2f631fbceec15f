"""Runs a rehearsal: a scratch Redis, the true `enqueue`, true workers, and the simulated server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError

from app import broker, manifest
from app.broker import Client
from app.errors import MillError, UsageError
from app.ledger import Ledger
from app.places import DatasetFolder, Keys, dataset_folder
from app.records import ANSWERED, RECORDED, Kind
from app.settings import BrokerSettings
from producer.processes import Process
from producer.rehearsal.findings import BUSY, Findings, Measured, find
from producer.rehearsal.looks import Look, between, cpu_s, look, peak_bytes, steady
from producer.rehearsal.place import Place, scratch
from producer.rehearsal.plan import DATASET, Plan

_LOOK_S = 0.05
_JUDGED_AFTER_S = 3.0
"""Real seconds of a steady stretch after which a machine that cannot keep up is told from one that stumbles."""
_JUDGED_EVERY = 20
"""Looks."""
_PREFIX = str(BrokerSettings.model_fields["key_prefix"].default)
"""Begins the Redis keys of processes that are told no other."""
_STANDSTILL_S = 300.0
_DRAIN_S = 10.0
_SLOWER = 2.5
_WORKER = ("-P", "-m", "producer.celery_process", "worker", "--loglevel", "INFO")
_READY = " ready."
_LISTENS = "listening"

Tell = Callable[[str], None]


class _TooFastError(Exception):
    """The simulated time runs faster than this machine can work."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        """Of the requests that should have been in flight."""


def rehearse(plan: Plan, *, tell: Tell, show: Tell) -> Findings:
    """Rehearse, slower where this machine cannot keep up with the simulated time.

    `tell` hears a sentence of note, `show` how far it is. Raises UsageError for what `enqueue` refuses, and MillError
    where a process ends or nothing goes on.
    """
    while True:
        try:
            with scratch() as place:
                found = find(plan, _Rehearsal(plan, place, show).run())
                if plan.keep is not None:
                    place.keep(plan.keep)
                return found
        except _TooFastError as error:
            speedup = max(1.0, round(plan.traits.speedup / _SLOWER, 1))
            tell(
                f"this machine keeps only {error.share:.0%} of the requests in flight while the time runs "
                f"{plan.traits.speedup:g} times faster; trying {speedup:g} times."
            )
            plan = dataclasses.replace(plan, traits=dataclasses.replace(plan.traits, speedup=speedup))


class _Rehearsal:
    """One pass at one speed."""

    def __init__(self, plan: Plan, place: Place, show: Tell) -> None:
        self._plan = plan
        self._place = place
        self._show = show
        self._looks: list[Look] = []
        self._judged = False

    def run(self) -> Measured:
        """Run it to its end. Raises _TooFastError, UsageError and MillError."""
        self._show("starting Redis")
        url = self._place.start_broker()
        with broker.translated(broker.parse(url)):
            return self._run(url)

    def _run(self, url: str) -> Measured:
        plan, place = self._plan, self._place
        settings = plan.settings()
        self._show("queueing")
        place.enqueue([plan.opened, "--dataset", DATASET, "--limit", str(plan.limit), *plan.reading], settings)
        redis_bytes = _redis_bytes(url)
        words = ["-P", "-m", "producer.simulator.server", "--port", "0", *plan.server_words()]
        server = place.start("server", words, {}, ready=_LISTENS)
        settings["MILL_MODEL_URLS"] = address = _address(server)
        with Ledger.open(dataset_folder(place.prepared, DATASET)) as ledger, _client(url) as client:
            samples = ledger.totals().samples
            workers = self._start_workers(settings)
            begun = [cpu_s(worker) for worker in workers]
            self._watch(address, ledger, client, samples)
            used = sum(cpu_s(worker) for worker in workers) - sum(begun)
            peak = max(peak_bytes(worker) for worker in workers)
            for worker in workers:
                place.stop(worker, seconds=_DRAIN_S)
            ledger.catch_up()
            return self._measured(ledger, worker_cpu_s=used, peak=peak, redis_bytes=redis_bytes)

    def _start_workers(self, settings: dict[str, str]) -> list[Process]:
        plan = self._plan
        self._show("starting workers")
        return [
            self._place.start(
                f"worker{number}",
                [*_WORKER, "-c", str(plan.slots), "-n", f"worker{number}@%h"],
                settings,
                ready=_READY,
            )
            for number in range(1, plan.workers + 1)
        ]

    def _watch(self, address: str, ledger: Ledger, client: Client, samples: int) -> None:
        """Look at the run until every sample is recorded."""
        queue, moved_at, recorded = Keys(_PREFIX).queue(DATASET), time.monotonic(), 0
        while recorded < samples:
            time.sleep(_LOOK_S)
            self._place.check()
            now = ledger.totals().recorded
            if now > recorded:
                moved_at, recorded = time.monotonic(), now
            elif time.monotonic() - moved_at > max(_STANDSTILL_S, self._plan.request_timeout_s or 0):
                raise MillError(f"The rehearsal stands still at {recorded} of {samples} samples; nothing was recorded.")
            with contextlib.suppress(OSError, RedisConnectionError):  # what is gone is told above
                self._looks.append(look(address, int(str(client.llen(queue)))))
                self._show(f"rehearsing: {recorded:,} of {samples:,}, in flight {self._looks[-1].in_flight:,}")
            self._judge()

    def _judge(self) -> None:
        """Give up, once, where the machine is too slow for the simulated time, and that could run slower.

        That shows after a while of the steady stretch, or at its end.
        """
        if self._judged or self._plan.traits.speedup <= 1 or not self._looks:
            return
        at_end = not self._looks[-1].queued
        stretch = steady(self._looks) if at_end or len(self._looks) % _JUDGED_EVERY == 0 else None
        if stretch is None or (stretch.seconds < _JUDGED_AFTER_S and not at_end):
            return
        self._judged = at_end
        share = stretch.in_flight / self._plan.max_in_flight
        if share < BUSY:
            raise _TooFastError(share)

    def _measured(self, ledger: Ledger, *, worker_cpu_s: float, peak: int, redis_bytes: int) -> Measured:
        totals, looks = ledger.totals(), self._looks
        records = list(_answers(ledger.folder))
        asked = [one for one in looks if one.busy_s]
        if len(asked) < 2:
            raise UsageError("The rehearsal was over too soon to measure anything; give --limit more rows.")
        stretch = steady(looks)
        last_queued = max((one.at for one in asked if one.queued), default=asked[0].at)
        source = _source(ledger)
        return Measured(
            read=source.read,
            refused=source.refused,
            outcomes={str(kind): totals.count(kind) for kind in RECORDED[::-1]},
            reasons=Counter({f"{kind}: {why}": n for (kind, why), n in totals.by_reason.items() if kind in RECORDED}),
            tokens=[tokens for tokens, _latency_s in records],
            latencies_s=[latency_s for _tokens, latency_s in records],
            generated=looks[-1].generated,
            run_s=asked[-1].at - asked[0].at,
            tail_s=asked[-1].at - last_queued,
            stretch=stretch or between(asked[0], asked[-1]),
            steady=stretch is not None,
            worker_cpu_s=worker_cpu_s,
            worker_peak_bytes=peak,
            redis_bytes=redis_bytes,
            disk_bytes=_size(ledger.folder),
        )


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    """What is read of a record."""

    usage: _Usage
    latency_s: float


def _answers(folder: DatasetFolder) -> Iterator[tuple[int, float]]:
    """Yield tokens and seconds of each answer."""
    for kind in ANSWERED:
        path = folder.lines(kind)
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    answer = msgspec.json.decode(line, type=_Answer)
                    yield answer.usage.completion_tokens, answer.latency_s


def _source(ledger: Ledger) -> manifest.SourceEntry:
    written = manifest.read(ledger)
    if written is None or not written.sources:
        raise MillError("The rehearsal's dataset has no manifest.")
    return written.sources[-1]


def _size(folder: DatasetFolder) -> int:
    """Return the bytes of what grows with the samples in a dataset's folder."""
    with contextlib.closing(sqlite3.connect(folder.index)) as index:
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # as much of it as is in the log would not be counted
    paths = [*(folder.lines(kind) for kind in Kind), folder.index]
    return sum(path.stat().st_size for path in paths if path.exists())


def _client(url: str) -> contextlib.closing[Client]:
    return contextlib.closing(broker.connect(broker.parse(url)))


def _redis_bytes(url: str) -> int:
    """Return the bytes that all keys take."""
    with _client(url) as client:
        keys: Any = client.scan_iter(count=1000)
        return sum(int(str(client.memory_usage(key, samples=0))) for key in keys)


def _address(server: Process) -> str:
    lines = Path(server.log).read_text(encoding="utf-8").splitlines()
    return str(json.loads(next(line for line in lines if _LISTENS in line))[_LISTENS])
