"""Which prompts nearly repeat an earlier one: MinHash with banding, in memory that does not grow with the prompts."""

from __future__ import annotations

import array
import collections
import hashlib
import json
from typing import Any, NamedTuple

from app.errors import UsageError
from app.records import Message, canonical_json
from producer.scratch import growing, private_database

THRESHOLD = 0.8
"""Prompts whose sets of SHINGLE_CHARS long pieces overlap by this share (Jaccard, estimated) count as the same."""
SHINGLE_CHARS = 5
_BANDS = 20
_ROWS = 7
"""Values in a band: a pair shares one of the bands with a chance of 0.99 at the threshold, of 0.145 at a similarity of
0.5 and of 0.03 at 0.4."""
_LIKES = 8
_COMPARED = 16
"""Earlier prompts that are looked at in a band, and compared of those that share most bands: a million prompts around
one text cost no more than others."""
_PERMUTATIONS = _BANDS * _ROWS
_SEED = 42


_IN_BAND = "SELECT place FROM bands WHERE key = ? ORDER BY place LIMIT ?"
_DIGESTS = "SELECT place, digest FROM digests WHERE place IN (SELECT value FROM json_each(?))"


class Near(NamedTuple):
    """An earlier prompt that is nearly the same."""

    place: int
    similarity: float


class NearDuplicates:
    """Remembers the prompts of a pass in a private temporary file, about 1 KB for each.

    Use it in one thread, and close it.
    """

    def __init__(self) -> None:
        """Open the file. Raises UsageError where the library is missing."""
        try:
            import rensa  # noqa: PLC0415 - only in the dedupe extra
        except ImportError as error:
            raise UsageError("--dedupe near needs rensa; run: pip install 'promptmill[dedupe]'.") from error
        self._minhash: Any = rensa.RMinHash
        self._db = private_database(
            "CREATE TABLE bands (key INTEGER, place INTEGER, PRIMARY KEY (key, place)) WITHOUT ROWID",
            "CREATE TABLE digests (place INTEGER PRIMARY KEY, digest BLOB)",
        )

    def close(self) -> None:
        """Drop the file."""
        self._db.close()

    def meet(self, messages: list[Message], tools: list[dict[str, Any]] | None, place: int) -> Near | None:
        """Return the earlier prompt that is most alike, or remember this one under its place.

        System turns are not compared, and other tools make another prompt. Raises DiskFullError.
        """
        digest = self._digest(messages)
        keys = _band_keys(digest, canonical_json(tools))
        shared = collections.Counter(place for key in keys for (place,) in self._db.execute(_IN_BAND, (key, _LIKES)))
        likely = [place for place, _count in shared.most_common(_COMPARED)]
        found = self._db.execute(_DIGESTS, (json.dumps(likely),)) if likely else ()
        likes = [Near(other, _similarity(digest, blob)) for other, blob in found]
        best = max(likes, key=lambda like: (like.similarity, -like.place), default=None)
        if best is not None and best.similarity >= THRESHOLD:
            return best
        with growing("of --dedupe near"):
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?)", [(key, place) for key in keys])
            self._db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (place, digest.tobytes()))
            self._db.execute("COMMIT")
        return None

    def _digest(self, messages: list[Message]) -> array.array[int]:
        text = " ".join("\n".join(_texts(messages)).casefold().split())
        last = max(1, len(text) - SHINGLE_CHARS + 1)
        minhash = self._minhash(_PERMUTATIONS, _SEED)
        minhash.update([text[at : at + SHINGLE_CHARS] for at in range(last)])
        return array.array("I", minhash.digest())


def _texts(messages: list[Message]) -> list[str]:
    texts = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "system":
            continue
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts += [part["text"] for part in content if isinstance(part.get("text"), str)]
        texts += [str(call["function"]) for call in message.get("tool_calls", ())]
    return texts


def _band_keys(digest: array.array[int], salt: bytes) -> list[int]:
    keys = []
    for band in range(_BANDS):
        piece = digest[band * _ROWS : (band + 1) * _ROWS].tobytes()
        hashed = hashlib.blake2b(piece + salt, digest_size=8, salt=band.to_bytes(8, "big")).digest()
        keys.append(int.from_bytes(hashed, "big", signed=True))
    return keys


def _similarity(digest: array.array[int], blob: bytes) -> float:
    other = array.array("I", blob)
    return sum(map(int.__eq__, digest, other)) / _PERMUTATIONS
