"""How busy one worker process, or two, keep a server whose answers take lognormal time (sigma 0.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figures import Figure, Options
from benchmarks.rig import Stretch, make_mill, model_server, redis_server, run_workers, slots_for, workplace


class _Setting(NamedTuple):
    bound: int
    latency_s: float
    samples: int
    at_least: float
    workers: int = 1


_SETTINGS = (
    _Setting(bound=128, latency_s=2.0, samples=1500, at_least=0.995),
    _Setting(bound=512, latency_s=5.0, samples=4000, at_least=0.995),
    _Setting(bound=128, latency_s=0.5, samples=4000, at_least=0.98),
    _Setting(bound=128, latency_s=0.5, samples=4000, at_least=0.98, workers=2),
)


def measure(options: Options) -> Iterator[Figure]:
    """Run each setting; what counts is the server's own record of its requests in flight."""
    for setting in _SETTINGS:
        shares, cpu = list[float](), list[float]()
        for _ in range(options.repeat):
            run = _run(setting)
            shares.append(run.occupancy(setting.bound))
            cpu.append(run.cpu_ms)
        name = f"{setting.bound} slots, mean {setting.latency_s:g} s, {setting.workers} worker(s)"
        yield Figure(f"busy share of {name}", shares, at_least=setting.at_least, digits=4)
        yield Figure(f"worker: CPU per sample at {name}", cpu, "ms")


def _run(setting: _Setting) -> Stretch:
    with (
        workplace() as folder,
        model_server(folder, latency_s=setting.latency_s) as url,
        redis_server(folder) as redis,
    ):
        mill = make_mill(folder, redis.url, url, max_in_flight=setting.bound)
        slots = slots_for(setting.bound // setting.workers)
        return run_workers(mill, count=setting.samples, slots=slots, dataset="busy", workers=setting.workers)
