"""What a sample costs the worker when the server answers at once, against the script that people write instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, Options
from benchmarks.rig import (
    LineCounter,
    Stretch,
    make_mill,
    model_server,
    redis_server,
    run_workers,
    slots_for,
    watch,
    workplace,
    write_prompts,
)
from tests.support.processes import PROJECT_ROOT, ManagedProcess

_BOUND = 128
_SAMPLES = 4000


def measure(options: Options) -> Iterator[Figure]:
    """Run the bare script and the product in turn, at zero latency."""
    bare, mill = list[Stretch](), list[Stretch]()
    for _ in range(options.repeat):
        with workplace() as folder, model_server(folder, latency_s=0) as url, redis_server(folder) as redis:
            bare.append(_run_script(folder, url))
            product = make_mill(folder, redis.url, url, max_in_flight=_BOUND)
            mill.append(run_workers(product, count=_SAMPLES, slots=slots_for(_BOUND), dataset="cpu"))
    ratios = [ours.cpu_ms / theirs.cpu_ms for theirs, ours in zip(bare, mill, strict=True)]
    yield Figure("bare script: CPU per sample", [run.cpu_ms for run in bare], "ms")
    yield Figure("worker: CPU per sample", [run.cpu_ms for run in mill], "ms")
    yield Figure("worker's CPU / bare script's", ratios, at_most=1.5)
    yield Figure("worker at zero latency", [run.per_second for run in mill], "samples/s", at_least=250, digits=0)
    yield Figure("worker: cores it got meanwhile", [run.cores for run in mill])


def _run_script(folder: Path, model_url: str) -> Stretch:
    prompts, answers = write_prompts(folder / "bare.jsonl", _SAMPLES), folder / "answers.jsonl"
    command = [sys.executable, str(PROJECT_ROOT / "benchmarks/bare_script.py"), str(prompts), str(answers), model_url]
    with ManagedProcess(command, log_dir=folder / "logs", name="bare") as script:
        return watch([script.pid], count=_SAMPLES, done=LineCounter(answers), model_url=model_url)
