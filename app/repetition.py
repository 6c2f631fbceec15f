"""Tells a text that runs in a loop from one that repeats itself as tables and code do."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w{1,8}|[^\w\s]")
"""A word (long ones, and scripts without spaces, in pieces of 8 characters) or one other mark."""
_N = 16
"""Words of an n-gram: rows of a table and lines of code share shorter runs, a loop shares all."""
_TAIL_CHARS = 40_000
_SMALLEST = 512
"""Words of the shortest end that is looked at by itself: about 2,000 characters."""
_FEWEST = 256
"""Words of the shortest text that can be a loop: about 1,000 characters."""


def repetition(words: list[str]) -> float:
    """Return the share of 16-grams that repeat an earlier one: 0 for none, near 1 for a loop.

    This is seq-rep-n = 1 - |unique n-grams| / |n-grams| of Welleck et al., "Neural Text Generation with Unlikelihood
    Training" (ICLR 2020), with longer n-grams.
    """
    grams = len(words) - _N + 1
    if grams < 2:
        return 0.0
    return 1 - len(set(zip(*(words[begin:] for begin in range(_N)), strict=False))) / grams


def is_repetitive(text: str, most: float) -> bool:
    """Tell whether more than this share of the text's end repeats itself.

    Looked at are the last 40,000 characters, their last half, and so on down to 512 words, so that a loop is found
    behind a long text that is none. A text of less than 256 words is none, nor one that counts on each time.
    """
    words = _WORD.findall(text[-_TAIL_CHARS:])
    if len(words) < _FEWEST:
        return False
    while True:
        share = repetition(words)
        if share > most:
            return True
        # No shorter end can hold more repeated n-grams than this one.
        if len(words) <= _SMALLEST or share * len(words) <= most * (_SMALLEST - _N):
            return False
        words = words[-max(_SMALLEST, len(words) // 2) :]
