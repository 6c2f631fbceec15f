"""What a worker process weighs, and what each slot adds."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure, Options
from benchmarks.rig import make_mill, model_server, redis_server, run_workers, workplace

_FEW, _MANY = 136, 528
_ROUNDS = 8
"""Samples per slot: memory has settled by then."""


def measure(options: Options) -> Iterator[Figure]:
    """Run a worker with few slots and one with many, all of them busy."""
    few, many = list[float](), list[float]()
    for _ in range(options.repeat):
        for slots, weights in ((_FEW, few), (_MANY, many)):
            with workplace() as folder, model_server(folder, latency_s=2) as url, redis_server(folder) as redis:
                mill = make_mill(folder, redis.url, url, max_in_flight=slots)
                run = run_workers(mill, count=_ROUNDS * slots, slots=slots, dataset="weight")
                weights.append(run.end.rss_mb)
    per_slot = [(heavy - light) / (_MANY - _FEW) for light, heavy in zip(few, many, strict=True)]
    yield Figure(f"worker's memory at {_FEW} slots", few, "MB", at_most=125, digits=1)
    yield Figure(f"worker's memory at {_MANY} slots", many, "MB", digits=1)
    yield Figure("memory per slot more", per_slot, "MB", at_most=0.2, digits=3)
