"""What a pass over a source has met so far, in memory that does not grow with the rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from producer.scratch import growing, private_database

_SAMPLE = b"s"
_SOURCE_ID = b"i"
_REFUSED = b"r"
_PROMPT = b"p"


class Meeting(NamedTuple):
    """A sample as it comes along."""

    sample_id: str
    source_id: str | None
    place: int
    """Where it was met: any number that the caller can read back."""


class Before(NamedTuple):
    """What was met before a sample."""

    same: int | None
    """The place of the first sample with the same id; None for a new one."""
    other: int | None
    """The place of the first sample that had the same source id with another prompt; None if there was none."""


class Seen:
    """Remembers sample ids, source ids and refused rows by 64-bit hashes, in a private temporary SQLite file.

    The file has no name and disappears with the connection. Two different ids share a hash with a chance of about
    3 in 100 million per million rows. Use it as a context manager and in one thread.
    """

    def __init__(self) -> None:
        self._db = private_database("CREATE TABLE met (key INTEGER PRIMARY KEY, place INTEGER NOT NULL)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def meet(self, batch: Sequence[Meeting]) -> list[Before]:
        """Return for each sample what was met before it, those before it in the batch included, and remember all.

        Raises DiskFullError when the temporary file cannot grow.
        """
        samples = [_key(_SAMPLE, met.sample_id) for met in batch]
        source_ids = [_key(_SOURCE_ID, met.source_id) if met.source_id else None for met in batch]
        known = self._places([*samples, *(key for key in source_ids if key is not None)])
        fresh: list[tuple[int, int]] = []
        answers = []
        for met, sample, source_id in zip(batch, samples, source_ids, strict=True):
            same = known.get(sample)
            other = None
            if same is None:
                if source_id is not None:
                    other = known.get(source_id)
                    if other is None:
                        known[source_id] = met.place
                        fresh.append((source_id, met.place))
                known[sample] = met.place
                fresh.append((sample, met.place))
            answers.append(Before(same, other))
        self._write("INSERT INTO met VALUES (?, ?)", fresh)
        return answers

    def count_refused(self, refused_ids: Sequence[str]) -> list[int]:
        """Return for each refused row how many equal ones there are by now, itself included.

        Raises DiskFullError when the temporary file cannot grow.
        """
        return self._count(_REFUSED, refused_ids)

    def count_prompts(self, sample_ids: Sequence[str]) -> list[int]:
        """Return for each prompt how many equal ones there are by now, itself included.

        Raises DiskFullError when the temporary file cannot grow.
        """
        return self._count(_PROMPT, sample_ids)

    def _count(self, space: bytes, ids: Sequence[str]) -> list[int]:
        keys = [_key(space, one) for one in ids]
        counts = self._places(keys)
        answers = []
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
            answers.append(counts[key])
        self._write("INSERT OR REPLACE INTO met VALUES (?, ?)", list(counts.items()))
        return answers

    def _places(self, keys: list[int]) -> dict[int, int]:
        found = self._db.execute(
            "SELECT key, place FROM met WHERE key IN (SELECT value FROM json_each(?))", (msgspec.json.encode(keys),)
        )
        return dict(found.fetchall())

    def _write(self, statement: str, rows: list[tuple[int, int]]) -> None:
        with growing("that tells equal rows apart"):
            self._db.execute("BEGIN")
            self._db.executemany(statement, sorted(rows))
            self._db.execute("COMMIT")


def _key(space: bytes, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=space).digest(), "big", signed=True)
