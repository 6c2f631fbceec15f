"""Rows in an order that only a seed and their content decide, in memory that does not grow with them."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import sqlite3
from collections.abc import Iterable, Iterator

import msgspec

from producer.formats.rows import Row
from producer.scratch import growing, private_database

_ROWS_PER_WRITE = 500

_encode = msgspec.json.Encoder(enc_hook=lambda _: None).encode
_decode = msgspec.json.Decoder(Row).decode


def shuffled(rows: Iterable[Row], seed: int, limit: int | None) -> Iterator[Row]:
    """Yield the rows, or `limit` of them drawn evenly, by a hash of the seed and their content.

    The same rows in another order give the same order; a row that is added or taken away moves no other. All rows are
    read before the first is given: they wait in a private temporary file. Raises DiskFullError when it cannot grow.
    """
    with contextlib.closing(private_database("CREATE TABLE spool (key INTEGER, row BLOB)")) as spool:
        with growing("for --shuffle"):
            _fill(spool, rows, seed, limit)
        bound = -1 if limit is None else limit
        for (row,) in spool.execute("SELECT row FROM spool ORDER BY key, rowid LIMIT ?", (bound,)):
            yield _decode(row)


def _fill(spool: sqlite3.Connection, rows: Iterable[Row], seed: int, limit: int | None) -> None:
    salt = str(seed).encode()
    smallest: list[int] = []  # the `limit` smallest keys so far, negated, the largest of them first
    waiting: list[tuple[int, bytes]] = []
    for row in rows:
        digest = hashlib.blake2b(row.content(), digest_size=8, key=salt).digest()
        key = int.from_bytes(digest, "big", signed=True)
        if limit is not None and not _is_among(smallest, key, limit):
            continue
        waiting.append((key, _encode(row)))
        if len(waiting) == _ROWS_PER_WRITE:
            _write(spool, waiting)
            waiting.clear()
    _write(spool, waiting)
    spool.execute("CREATE INDEX by_key ON spool (key)")


def _is_among(smallest: list[int], key: int, limit: int) -> bool:
    """Tell whether a key is one of the `limit` smallest so far, and remember it if so."""
    if len(smallest) < limit:
        heapq.heappush(smallest, -key)
        return True
    return heapq.heappushpop(smallest, -key) != -key


def _write(spool: sqlite3.Connection, rows: list[tuple[int, bytes]]) -> None:
    spool.execute("BEGIN")
    spool.executemany("INSERT INTO spool VALUES (?, ?)", rows)
    spool.execute("COMMIT")
