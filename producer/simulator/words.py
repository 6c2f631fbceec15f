"""Made-up text of a given number of tokens, for answers whose size on disk is that of real ones.

A token is a short word with its space, 4.4 characters on average, about what a token of English text has with today's
tokenizers; its id lies anywhere in a vocabulary of a usual size.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from typing import Final

VOCABULARY: Final = 151_000
"""Ids are below it."""
EOS_ID: Final = VOCABULARY
_PIECE = re.compile(r"\s?\w{1,7}|\s+|[^\w\s]{1,3}")


def _made_up() -> tuple[str, ...]:
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
    closed = ["".join(pair) for pair in itertools.product(syllables, "nrstlm")]
    double = ["".join(pair) for pair in itertools.product(syllables, syllables)][::10]
    return tuple(f" {word}" for word in (*syllables, *closed, *double))


WORDS: Final = _made_up()


def id_of(piece: str) -> int:
    """Return the id of a piece of text; two pieces may share one."""
    return zlib.crc32(piece.encode("utf-8", "surrogatepass")) % VOCABULARY


_IDS: Final = tuple(map(id_of, WORDS))


def write(tokens: int, rng: random.Random) -> tuple[str, list[int]]:
    """Return a text and its ids, one for each word."""
    chosen = rng.choices(range(len(WORDS)), k=tokens)
    return "".join(WORDS[number] for number in chosen), [_IDS[number] for number in chosen]


def read(text: str) -> list[int]:
    """Return the ids of a prompt: one for each short word, piece of a longer one, or run of other marks."""
    return list(map(id_of, _PIECE.findall(text)))
