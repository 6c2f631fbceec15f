"""Dataset folders for tests: lines as the product writes them, and all that an index says, to compare."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.ledger import Ledger, Pen
from app.places import DatasetFolder
from app.records import Kind, KnownSample, Record, RefusedRow, Source, Usage, encode_line

_NOBODY = 65534


def pen(
    id_: str,
    kind: Kind = Kind.ACCEPTED,
    *,
    reason: str = "",
    round_: int = 0,
    tokens: int = 0,
    content: str = "An answer.",
) -> Pen:
    """Return one line as enqueue or the recorder would write it."""
    if kind is Kind.PENDING:
        return Pen(kind, id_, encode_line(KnownSample(id_, row=1)))
    if kind is Kind.REFUSED:
        row = RefusedRow(id=id_, source="rows.jsonl", row=1, reason=reason or "no_prompt")
        return Pen(kind, id_, encode_line(row), reason=row.reason)
    record = Record(
        id=id_,
        dataset="d",
        verdict=kind,
        reason=reason or None,
        source=Source(row=1),
        messages=[{"role": "user", "content": "Hi"}],
        content=content,
        usage=Usage(completion_tokens=tokens or None),
        sampling={"max_tokens": 8192},
        settings="0" * 16,
        round=round_,
    )
    return Pen(kind, id_, encode_line(record), reason=reason, round=round_, tokens=tokens)


def fill(ledger: Ledger) -> None:
    """Write lines of every kind, in several rounds."""
    ledger.commit([pen(f"s{number}", Kind.PENDING) for number in range(8)] + [pen("row9", Kind.REFUSED)])
    ledger.commit([pen("s0", tokens=5), pen("s1", tokens=7, content="x" * 300)])
    ledger.commit([pen("s2", Kind.FAILED, reason="timeout"), pen("s3", Kind.REJECTED, reason="empty", tokens=2)])
    ledger.commit([pen("s4", Kind.FAILED, reason="reset"), pen("s5", tokens=11, content="last")])
    ledger.commit([pen("s2", round_=1, tokens=1), pen("s4", Kind.FAILED, reason="timeout", round_=1)])


class Picture(NamedTuple):
    """All that an index says of a folder."""

    entries: dict[str, Any]
    by_kind: dict[Kind, Any]
    by_reason: dict[tuple[Kind, str], int]
    bad_lines: list[tuple[str, int, int]]
    duplicates: int


def picture(ledger: Ledger) -> Picture:
    """Return all that the ledger says."""
    totals = ledger.totals()
    return Picture(
        dict(ledger.entries()),
        dict(totals.by_kind),
        dict(totals.by_reason),
        [(line.path.name, line.offset, line.length) for line in ledger.bad_lines()],
        ledger.duplicates(),
    )


def fresh_picture(folder: DatasetFolder) -> Picture:
    """Return what a new index says of a copy of the folder's files."""
    with tempfile.TemporaryDirectory() as name:
        copy = DatasetFolder(Path(name))
        for kind in Kind:
            if folder.lines(kind).exists():
                shutil.copy(folder.lines(kind), copy.lines(kind))
        with Ledger.open(copy) as ledger:
            ledger.catch_up()
            return picture(ledger)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Do something as a user who owns nothing; somebody who is not root is one already."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: a write stops there, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(target: Path, *words: str) -> Iterator[bool]:
    """Mount something at `target`; give False where this machine does not let us."""
    command: Sequence[str] = ["mount", *words, str(target)]
    done = subprocess.run(command, capture_output=True, check=False).returncode == 0 if os.geteuid() == 0 else False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(target)], capture_output=True, check=True)
