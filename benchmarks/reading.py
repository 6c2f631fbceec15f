"""How fast rows become samples, and that neither memory nor a preview follows the size of the source."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Options
from benchmarks.rig import timed, workplace
from producer.adapters.registry import choose
from producer.dedupe import Dedupe
from producer.reading import Reading, open_reading
from producer.sources import open_source
from tests.support.processes import run_command

_ROWS = 40_000
_MAX_ROW_BYTES = 64 << 20
_PREVIEW_BYTES = 10 << 30
_PRODUCER = "import sys; from producer.cli import main; sys.argv = ['producer', *sys.argv[1:]]; sys.exit(main())"
_ONE_SWEEP = """
import os, sys
from producer.reading import Reading, open_reading
opened = open_reading(Reading(source=sys.argv[1]), max_row_bytes=64 << 20)
early = late = 0
for batch in opened.batches:
    with open("/proc/self/statm") as file:
        late = max(late, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6)
    if opened.rows.read <= int(sys.argv[2]) // 4:
        early = late
print(early, late)
"""
_SYSTEM = """SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -
{"name": "get_weather", "description": "Weather", "parameters": {"type": "object", "properties": {}}}
"""
_CALL = 'ASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": "Oslo"}\'} <|endoftext|>'


def measure(options: Options) -> Iterator[Figure]:
    """Read Parquet and JSON rows in this process, then preview and pass over large files in others."""
    with workplace() as folder:
        plain, glaive = _write_parquet(folder / "plain.parquet"), _write_glaive(folder / "glaive.jsonl")
        repeat = options.repeat
        yield _rate("plain messages from Parquet: rows into conversations", repeat, lambda: _convert(plain), 20_000)
        yield _rate("the same into samples, with ids and duplicates", repeat, lambda: _pass(plain), 20_000)
        yield _rate("Glaive's texts into samples", repeat, lambda: _pass(glaive))
        yield _rate("the plain ones with --shuffle", repeat, lambda: _pass(plain, shuffle=1))
        yield _rate("the plain ones with --dedupe near", 1, lambda: _pass(plain, dedupe=Dedupe.NEAR))
        yield _preview(folder, repeat)
        yield from _memory(folder, 1_000_000 if options.full else 200_000)


def _rate(name: str, repeat: int, run: Callable[[], int], at_least: float | None = None) -> Figure:
    rates = []
    for _ in range(repeat):
        began = time.process_time()
        rows = run()
        rates.append(rows / (time.process_time() - began))
    return Figure(f"{name}: rows per CPU s", rates, at_least=at_least, digits=0)


def _convert(path: Path) -> int:
    adapter = choose("auto")
    rows = open_source(str(path), max_row_bytes=_MAX_ROW_BYTES).rows()
    return sum(1 for row in rows if row.value is not None and adapter.convert(row.value))


def _pass(path: Path, **options: Any) -> int:
    opened = open_reading(Reading(source=str(path), **options), max_row_bytes=_MAX_ROW_BYTES)
    for _ in opened.batches:
        pass
    return opened.rows.read


def _preview(folder: Path, repeat: int) -> Figure:
    path = _write_lines(folder / "huge.jsonl", 3_000)
    with path.open("r+b") as stream:
        stream.truncate(_PREVIEW_BYTES)
    runs = [timed([sys.executable, "-c", _PRODUCER, "preview", str(path)]) for _ in range(repeat)]
    return Figure("producer preview of 10 GB", [wall for wall, _cpu in runs], "s", at_most=2)


def _memory(folder: Path, rows: int) -> Iterator[Figure]:
    path = _write_lines(folder / "many.jsonl", rows)
    command = [sys.executable, "-c", _ONE_SWEEP, str(path), str(rows)]
    finished = run_command(command, env={}, cwd=folder, timeout_s=600)
    early, late = map(float, finished.stdout.split())
    yield Figure(f"memory of one pass over {rows:,} rows", [late], "MB", digits=0)
    yield Figure("of that, grown after the first quarter", [late - early], "MB", at_most=20, digits=1)


def _write_lines(path: Path, rows: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            file.write(json.dumps({"id": number, "prompt": f"question {number} " + "x" * 200}) + "\n")
    return path


def _write_parquet(path: Path) -> Path:
    import pyarrow as pa  # noqa: PLC0415 - only this benchmark needs it
    import pyarrow.parquet as pq  # noqa: PLC0415 - same

    rng = random.Random(1)
    turns = [
        [{"content": _text(rng, 80), "role": "user"}, {"content": _text(rng, 100), "role": "assistant"}]
        for _ in range(_ROWS)
    ]
    pq.write_table(pa.table({"prompt_id": [f"{n:064x}" for n in range(_ROWS)], "messages": turns}), path)
    return path


def _write_glaive(path: Path) -> Path:
    rng = random.Random(2)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(_ROWS // 2):
            turns = [f"USER: {_text(rng, 60)}", _CALL, 'FUNCTION RESPONSE: {"t": 3}', f"ASSISTANT: {_text(rng, 60)}"]
            file.write(json.dumps({"system": _SYSTEM, "chat": "\n\n\n".join(turns)}) + "\n")
    return path


def _text(rng: random.Random, words: int) -> str:
    return " ".join(_WORDS[rng.randrange(len(_WORDS))] for _ in range(words))


_WORDS = [
    f"{first}{last}" for first in ("alpha", "be", "gam", "del", "eps") for last in ("ta", "ma", "on", "x", "ilon")
]
