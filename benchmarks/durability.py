"""What durability adds to a task, and what group commit saves against one fsync per record."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from app.broker import connect, parse
from app.ledger import Ledger, Pen
from app.places import Keys, dataset_folder
from app.queue import Queue
from app.records import Kind, Record, Source, Usage
from benchmarks.figures import Figure, Options
from benchmarks.rig import redis_server, workplace
from workers.outcomes import make_pen
from workers.recorder import Entry, Recorder

_DATASET = "durable"
_RATE = 100
_OPEN_S = 10.0
_WAITERS = 128
_RECORDS = 20_000
_LONE_S = 2.0
"""Seconds of writing with one fsync per record."""


def measure(options: Options) -> Iterator[Figure]:
    """Drive the real recorder, ledger, index and Redis, in turn with a file that is fsynced per record."""
    halves, tails, group, lone = list[float](), list[float](), list[float](), list[float]()
    for _ in range(options.repeat):
        with workplace() as folder:
            lone.append(_fsync_each(folder / "lone.jsonl"))
            with _recorder(folder / "group") as (recorder, ledger):
                group.append(_closed_load(recorder, ledger))
            with _recorder(folder / "open") as (recorder, ledger):
                delays = _open_load(recorder, ledger)
        halves.append(1000 * statistics.median(delays))
        tails.append(1000 * statistics.quantiles(delays, n=100)[98])
    yield Figure(f"delay of a record at {_RATE}/s, median", halves, "ms", at_most=5)
    yield Figure(f"delay of a record at {_RATE}/s, p99", tails, "ms", at_most=25)
    yield Figure("one fsync per record", lone, "records/s", digits=0)
    yield Figure(f"group commit with index, {_WAITERS} waiters", group, "records/s", digits=0)
    ratios = [ours / theirs for ours, theirs in zip(group, lone, strict=True)]
    yield Figure("group commit / one fsync per record", ratios, at_least=4, digits=1)


@contextlib.contextmanager
def _recorder(folder: Path) -> Iterator[tuple[Recorder, Ledger]]:
    folder.mkdir()
    with redis_server(folder) as redis:
        client = connect(parse(redis.url))
        with contextlib.closing(client), Ledger.open(dataset_folder(folder / "prepared", _DATASET)) as ledger:
            recorder = Recorder(Queue(client, Keys("mill:")), on_stall=lambda _why: None)
            try:
                yield recorder, ledger
            finally:
                recorder.stop()


def _pen(number: int) -> Pen:
    """Return a record of 8 kB."""
    record = Record(
        id=f"sample-{number:08d}",
        dataset=_DATASET,
        verdict=Kind.ACCEPTED,
        source=Source(row=number),
        messages=[{"role": "user", "content": "x" * 2000}],
        reasoning="y" * 2500,
        content="z" * 2900,
        finish_reason="stop",
        usage=Usage(completion_tokens=1500),
        sampling={"max_tokens": 8192},
        settings="0123456789abcdef",
    )
    return make_pen(record)


def _entry(ledger: Ledger, number: int) -> Entry:
    return Entry(_DATASET, ledger, _pen(number), Future(), latency_s=12.5, prompt_tokens=500)


def _closed_load(recorder: Recorder, ledger: Ledger) -> float:
    """Keep 128 records waiting until all are durable; return records per second."""
    entries = iter([_entry(ledger, number) for number in range(_RECORDS)])
    lock, finished, left = threading.Lock(), threading.Event(), _RECORDS

    def put_next(future: Future[bool] | None = None) -> None:
        nonlocal left
        with lock:
            left -= future is not None
            entry = next(entries, None)
        if entry is not None:
            entry.recorded.add_done_callback(put_next)
            recorder.put(entry)
        elif left == 0:
            finished.set()

    started = time.perf_counter()
    for _ in range(_WAITERS):
        put_next()
    finished.wait()
    return _RECORDS / (time.perf_counter() - started)


def _open_load(recorder: Recorder, ledger: Ledger) -> list[float]:
    """Hand records over at random moments, 100 a second; return the seconds until each was durable."""
    delays, entries = list[float](), [_entry(ledger, number) for number in range(int(_RATE * _OPEN_S))]
    due, dice = time.perf_counter(), random.Random(1)

    def note(put_at: float, _done: Future[bool]) -> None:
        delays.append(time.perf_counter() - put_at)

    for entry in entries:
        due += dice.expovariate(_RATE)
        time.sleep(max(0.0, due - time.perf_counter()))
        entry.recorded.add_done_callback(functools.partial(note, time.perf_counter()))
        recorder.put(entry)
    for entry in entries:
        entry.recorded.result()
    return delays


def _fsync_each(path: Path) -> float:
    """Append records to a plain file with one fsync each; return records per second."""
    lines = [_pen(number).line for number in range(100)]
    count, started = 0, time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while time.perf_counter() - started < _LONE_S:
            os.write(descriptor, lines[count % len(lines)])
            os.fdatasync(descriptor)
            count += 1
    finally:
        os.close(descriptor)
    return count / (time.perf_counter() - started)
