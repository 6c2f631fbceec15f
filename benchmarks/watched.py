"""What it costs a worker to be watched: Flower with an open page, and a Prometheus that reads its metrics."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, Options
from benchmarks.rig import Stretch, make_mill, model_server, redis_server, run_workers, slots_for, workplace
from tests.support.flower import FlowerProcess
from tests.support.mill import Mill

_BOUND = 128
_SAMPLES = 4000
_SCRAPE_S = 1.0
"""Seconds between two scrapes: fifteen times as often as the example of deploy/ does."""
_PAGE_S = 2.0
"""Seconds after which an open page asks again."""


def measure(options: Options) -> Iterator[Figure]:
    """Run workers at zero latency alone and watched, in turn."""
    alone, watched, scrapes = list[Stretch](), list[Stretch](), list[float]()
    for number in range(options.repeat):
        # Whoever comes second meets a warmer machine, so they change places.
        for looked_at in (False, True) if number % 2 else (True, False):
            stretch, took = _run(watched=looked_at)
            (watched if looked_at else alone).append(stretch)
            scrapes += [statistics.median(took)] if took else []
    ratios = [seen.cpu_ms / unseen.cpu_ms for unseen, seen in zip(alone, watched, strict=True)]
    yield Figure("worker alone: CPU per sample", [run.cpu_ms for run in alone], "ms")
    yield Figure("worker watched: CPU per sample", [run.cpu_ms for run in watched], "ms")
    yield Figure("worker watched / alone", ratios, at_most=1.05)
    yield Figure("a scrape meanwhile, median", scrapes, "ms", digits=0)


def _run(*, watched: bool) -> tuple[Stretch, list[float]]:
    with workplace() as folder, model_server(folder, latency_s=0) as url, redis_server(folder) as redis:
        mill = make_mill(folder, redis.url, url, max_in_flight=_BOUND)
        with _watching(mill, folder) if watched else contextlib.nullcontext(list[float]()) as took:
            return run_workers(mill, count=_SAMPLES, slots=slots_for(_BOUND), dataset="cpu"), took


@contextlib.contextmanager
def _watching(mill: Mill, folder: Path) -> Iterator[list[float]]:
    """Keep a Flower, a page and a Prometheus busy meanwhile; give the milliseconds that scrapes took."""
    took, over = list[float](), threading.Event()
    with FlowerProcess(mill.env, log_dir=folder / "logs") as flower:
        flower.wait_ready()

        def scrape() -> None:
            while not over.wait(_SCRAPE_S):
                begin = time.perf_counter()
                flower.ask("/metrics")
                took.append(1000 * (time.perf_counter() - begin))

        def look() -> None:
            while not over.wait(_PAGE_S):
                flower.data()

        eyes = [threading.Thread(target=scrape), threading.Thread(target=look)]
        for one in eyes:
            one.start()
        try:
            yield took
        finally:
            over.set()
            for one in eyes:
                one.join()
