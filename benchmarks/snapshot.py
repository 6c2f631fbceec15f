"""What looking costs: the numbers of eight datasets with a million samples, and the charts of a week."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app import history, manifest
from app.broker import connect, parse
from app.ledger import Ledger
from app.places import DatasetFolder, Keys, dataset_folder
from app.progress import take_snapshot
from app.queue import Queue
from app.records import Kind, KnownSample, Record, Sample, Source, Usage, encode_line
from app.settings import GenerationSettings
from app.tally import KEEP_S, Done
from benchmarks.figures import Figure, Options
from benchmarks.rig import make_mill, redis_server, timed, workplace
from tests.support.mill import Mill

_DATASETS = 8
_IN_FLIGHT = 64
"""Samples in flight of each dataset."""
_WEEK_POINTS = 7 * 24 * 360
"""One every ten seconds."""
_OWNER = "mill1@host/1"


def measure(options: Options) -> Iterator[Figure]:
    """Fill folders and Redis as a long run leaves them, and look."""
    count = (1_000_000 if options.full else 200_000) // _DATASETS
    with workplace() as folder, redis_server(folder) as redis:
        mill = make_mill(folder, redis.url)
        queue = Queue(connect(parse(redis.url)), Keys())
        prepared = Path(mill.env["MILL_PREPARED_DIR"])
        for number in range(_DATASETS):
            _fill(queue, dataset_folder(prepared, f"set{number}"), f"set{number}", count)
        taken = [_cpu_ms(lambda: take_snapshot(queue, prepared)) for _ in range(options.repeat + 1)][1:]
        queue.client.close()
        commands = [_status_cpu_s(mill) for _ in range(options.repeat)]
        folders = [_write_week(dataset_folder(prepared, f"set{number}")) for number in range(_DATASETS)]
        charts = [_cpu_ms(lambda: history.read_points(folders[0])) for _ in range(options.repeat)]
        sums = [_cpu_ms(lambda: _chart_of_all(folders)) for _ in range(options.repeat)]
    samples = f"{_DATASETS} x {count:,} samples"
    yield Figure(f"status --json, {samples}: CPU", commands, "s", at_most=0.5)
    yield Figure("its snapshot alone: CPU", taken, "ms", at_most=500, digits=0)
    yield Figure("points of a week of one dataset: CPU", charts, "ms", at_most=20, digits=1)
    yield Figure(f"points of a week of {_DATASETS} datasets together: CPU", sums, "ms", digits=1)


def _cpu_ms(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return 1000 * (time.process_time() - started)


def _fill(queue: Queue, folder: DatasetFolder, dataset: str, count: int) -> None:
    """Record nine tenths of the samples, put the rest into Redis, and count 15 minutes of work."""
    folder.path.mkdir(parents=True)
    with folder.lines(Kind.ACCEPTED).open("wb") as file:
        file.writelines(encode_line(_record(dataset, number)) for number in range(count * 9 // 10))
    with folder.lines(Kind.PENDING).open("wb") as file:
        file.writelines(encode_line(KnownSample(_id(number), row=number)) for number in range(count))
    with Ledger.open(folder) as ledger:
        manifest.fix_settings(ledger, dataset, GenerationSettings(), {}, new=False)
        ledger.catch_up()
    waiting = [_id(number) for number in range(count * 9 // 10, count)]
    queue.register(dataset, "f", {})
    queue.put(dataset, [Sample(id=id_, messages=[{"role": "user", "content": "Hi"}]) for id_ in waiting])
    queue.beat(_OWNER, {"node": _OWNER, "slots": 600, "busy": _DATASETS * _IN_FLIGHT}, ttl_s=3600)
    for id_ in waiting[:_IN_FLIGHT]:
        queue.take(dataset, id_, _OWNER)
    rng, now = random.Random(dataset), queue.now()
    queue.client.hset(queue.keys.run(dataset), "began", repr(now - 3600))
    for second in range(KEEP_S):
        latency_s = rng.lognormvariate(3.0, 0.7)
        queue.put(dataset, [Sample(id="x", messages=[])])
        queue.finish(dataset, [Done("x", Kind.ACCEPTED, int(40 * latency_s), 500, latency_s)], at=now - second)


def _record(dataset: str, number: int) -> Record:
    return Record(
        id=_id(number),
        dataset=dataset,
        verdict=Kind.ACCEPTED,
        source=Source(row=number),
        messages=[],
        usage=Usage(completion_tokens=1500),
        sampling={},
        settings="0" * 16,
        finished_at=1_700_000_000.0 + number,
    )


def _id(number: int) -> str:
    return f"{number:08d}"


def _status_cpu_s(mill: Mill) -> float:
    """Return the CPU seconds of the command, its start included."""
    code = "import sys; from producer.start import main; sys.argv = ['producer', 'status', '--json']; main()"
    return timed([sys.executable, "-c", code], mill.env)[1]


def _write_week(folder: DatasetFolder) -> DatasetFolder:
    start = time.time() - 10 * _WEEK_POINTS
    points = (
        history.Point(
            at=start + 10 * number,
            accepted=30 * number,
            failed=number // 9,
            left=10_000_000 - 30 * number,
            tokens=45_000 * number,
            queued=9_000_000,
            in_flight=136,
            bound=128,
            failed_by={"timeout": number // 9},
            faults={"connection_lost": number // 5, "server_error": number // 7},
            latency_p95_s=45.234,
        )
        for number in range(_WEEK_POINTS)
    )
    with folder.progress_log.open("wb") as file:
        file.writelines(map(history.encode, points))
    return folder


def _chart_of_all(folders: list[DatasetFolder]) -> object:
    return history.rates_between(history.combine_points([history.read_points(folder) for folder in folders]))
