"""How soon a resume knows what is left, and what rebuilding a lost index costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app.ledger import Ledger
from app.places import DatasetFolder, dataset_folder
from app.records import Kind, Record, Source, Usage, encode_line
from benchmarks.figures import Figure, Options
from benchmarks.rig import workplace

_AT_ONCE = 500
"""Ids that enqueue looks up at once."""
_LONG_LINES = 60_000
_LONG_CHARS = 6_000
_PHRASE = "All work and no play makes Jack a dull boy.\n"


def measure(options: Options) -> Iterator[Figure]:
    """Write records, let the ledger index them, and look every id up."""
    count = 1_000_000 if options.full else 200_000
    with workplace() as folder:
        dataset = _write(folder, "ids", count, chars=10)
        with Ledger.open(dataset) as ledger:
            indexing = _cpu_s(ledger.catch_up)
            seconds = [_look_all_up(ledger, count) for _ in range(options.repeat)]
    yield Figure(f"looking {count:,} recorded ids up", seconds, "s", at_most=10 * count / 1_000_000)
    yield Figure("indexing: CPU per short record", [1e6 * indexing / count], "us", digits=1)
    yield Figure("rebuild: CPU per GB beside the inserts", _rebuilds(options.repeat), "s", at_most=0.8)


def _look_all_up(ledger: Ledger, count: int) -> float:
    started = time.perf_counter()
    found = 0
    for begin in range(0, count, _AT_ONCE):
        found += len(ledger.look_up([_id(number) for number in range(begin, min(count, begin + _AT_ONCE))]))
    if found != count:
        raise ValueError(f"{found} of {count} ids were found")
    return time.perf_counter() - started


def _rebuilds(repeat: int) -> list[float]:
    """Index the same ids with long and with short lines: the difference is what the bytes cost."""
    costs = []
    for _ in range(repeat):
        with workplace() as folder:
            short, long = (_write(folder, str(chars), _LONG_LINES, chars=chars) for chars in (10, _LONG_CHARS))
            seconds = []
            for dataset in (short, long):
                with Ledger.open(dataset) as ledger:
                    seconds.append(_cpu_s(ledger.catch_up))
            more = _size(long) - _size(short)
        costs.append((seconds[1] - seconds[0]) / more * 1e9)
    return costs


def _write(folder: Path, name: str, count: int, *, chars: int) -> DatasetFolder:
    dataset = dataset_folder(folder, name)
    dataset.path.mkdir(parents=True)
    with dataset.lines(Kind.ACCEPTED).open("wb") as file:
        for number in range(count):
            file.write(encode_line(_record(number, chars)))
    return dataset


def _record(number: int, chars: int) -> Record:
    return Record(
        id=_id(number),
        dataset="resume",
        verdict=Kind.ACCEPTED,
        source=Source(row=number),
        messages=[{"role": "user", "content": "Write a story."}],
        content=(_PHRASE * (chars // len(_PHRASE) + 1))[:chars],
        finish_reason="stop",
        usage=Usage(completion_tokens=1500),
        sampling={"max_tokens": 8192},
        settings="0123456789abcdef",
    )


def _id(number: int) -> str:
    # Ids are hashes, so that consecutive ones lie far apart in the index.
    return f"{number * 0x9E3779B97F4A7C15 % 2**96:024x}"


def _size(dataset: DatasetFolder) -> int:
    return dataset.lines(Kind.ACCEPTED).stat().st_size


def _cpu_s(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started
