"""How fast records become training rows, and whether a million of them need more memory than a few."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from app.ledger import Ledger
from app.places import DatasetFolder, dataset_folder
from app.records import Kind, Record, Source, Usage, encode_line
from benchmarks.figures import Figure, Options
from benchmarks.rig import workplace
from producer.export.run import export
from producer.export.selection import Selection
from tests.support.processes import subprocess_env

_LONG_RECORDS = 10_000
_PROMPT_TOKENS, _OUTPUT_TOKENS = 500, 1_500
_PHRASE = "All work and no play makes Jack a dull boy.\n"
_FEW = 100_000
_MEGABYTE = 1_000_000
_CASES = (
    ("tokens", "x.jsonl", "completion", 50.0),
    ("tokens", "x.jsonl", "id", None),
    ("tokens", "x.parquet", "completion", None),
    ("tokens", "x.jsonl.zst", "completion", None),
    ("specforge", "x.jsonl", "completion", None),
    ("openai", "x.parquet", "completion", None),
)
"""Format, file, order, and the least MB of raw records in a second of CPU time."""
_CHILD = """
import resource, sys
from pathlib import Path
from app.ledger import Ledger
from app.places import DatasetFolder
from producer.export.run import export

with Ledger.open(DatasetFolder(Path(sys.argv[1]))) as ledger:
    export(ledger, format="tokens", output=Path(sys.argv[1], "x.jsonl"), overwrite=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def measure(options: Options) -> Iterator[Figure]:
    """Export long records in several ways, then many short ones in a process of their own."""
    with workplace() as folder:
        dataset = _write(folder, "long", _LONG_RECORDS, _long())
        size = dataset.lines(Kind.ACCEPTED).stat().st_size
        with Ledger.open(dataset) as ledger:
            ledger.catch_up()
            for name, file, order, at_least in _CASES:
                speeds = [
                    size / _MEGABYTE / _seconds(ledger, name, folder / file, order) for _ in range(options.repeat)
                ]
                yield Figure(
                    f"{name} as {file[1:]}, {order} order", speeds, "MB per CPU s", at_least=at_least, digits=0
                )
    count = 1_000_000 if options.full else 2 * _FEW
    with workplace() as folder:
        few = _peak_mb(_write(folder, "few", _FEW, _short()))
        yield Figure(f"memory at {_FEW:,} records", [few], "MB", digits=0)
        yield Figure(f"more at {count:,}", [_peak_mb(_write(folder, "many", count, _short())) - few], "MB", at_most=30)


def _seconds(ledger: Ledger, name: str, output: Path, order: str) -> float:
    started = time.process_time()
    export(ledger, format=name, output=output, selection=Selection(order=order), overwrite=True)
    return time.process_time() - started


def _peak_mb(dataset: DatasetFolder) -> float:
    """Return the peak resident size of a process that exports the dataset; the index is made before."""
    with Ledger.open(dataset) as ledger:
        ledger.catch_up()
    command = [sys.executable, "-c", _CHILD, str(dataset.path)]
    told = subprocess.run(command, env=subprocess_env(), capture_output=True, check=True, text=True)
    return int(told.stdout) / 1024


def _write(folder: Path, name: str, count: int, record: Record) -> DatasetFolder:
    dataset = dataset_folder(folder, name)
    dataset.path.mkdir(parents=True)
    line = encode_line(record)
    head, tail = line.split(b'"ID"')
    with dataset.lines(Kind.ACCEPTED).open("wb") as file:
        for number in range(count):
            file.write(b'%b"%024x"%b' % (head, number * 0x9E3779B97F4A7C15 % 2**96, tail))
    return dataset


def _long() -> Record:
    ids = [number * 7919 % 150_000 for number in range(_PROMPT_TOKENS + _OUTPUT_TOKENS)]
    return _record(ids[:_PROMPT_TOKENS], ids[_PROMPT_TOKENS:], _PHRASE * (4 * _OUTPUT_TOKENS // len(_PHRASE)))


def _short() -> Record:
    return _record(list(range(1, 51)), list(range(1, 51)), _PHRASE)


def _record(prompt: list[int], output: list[int], text: str) -> Record:
    return Record(
        id="ID",
        dataset="export",
        verdict=Kind.ACCEPTED,
        source=Source(row=1),
        messages=[{"role": "user", "content": _PHRASE * (len(prompt) // 10)}],
        reasoning=text[: len(text) // 2],
        content=text[len(text) // 2 :],
        finish_reason="stop",
        prompt_token_ids=prompt,
        output_ids=output,
        usage=Usage(completion_tokens=len(output)),
        sampling={"max_tokens": 8192},
        settings="0123456789abcdef",
    )
