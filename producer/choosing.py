"""Random records of a dataset: the same for the same seed, on every machine and however the dataset grows otherwise."""

from __future__ import annotations

import hashlib
import heapq

from app.index import Entry
from app.ledger import Ledger
from app.records import Kind


def choose(ledger: Ledger, n: int, *, seed: int, kind: Kind, reason: str | None = None) -> list[tuple[str, Entry]]:
    """Return n ids of that kind (and reason), or all where there are fewer, in random order.

    Each id draws a number that is made of it and the seed, and the smallest numbers are taken, so that a dataset that
    grows keeps most of its choice. Only the index is read, in bounded memory.
    """
    ledger.catch_up()
    key = seed.to_bytes(16, "big", signed=True)
    ids = (item for item in ledger.entries(kind) if reason is None or item[1].reason == reason)
    return heapq.nsmallest(n, ids, key=lambda item: _draw(key, item[0]))


def _draw(key: bytes, id_: str) -> bytes:
    return hashlib.blake2b(id_.encode(), digest_size=8, key=key).digest()
