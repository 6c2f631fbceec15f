"""What a log line may repeat of a failed call: the server's words, but nothing of the prompt or of an answer."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from app.logs import Discreet
from workers.faults import FaultKind

_OF_ANSWERS = frozenset({FaultKind.BAD_ANSWER, FaultKind.EMPTY_ANSWER, FaultKind.UNFINISHED, FaultKind.ABORTED})
"""Kinds whose words quote the beginning of an answer, behind a colon; the record keeps it."""
_BEFORE_A_QUOTE = ("; it starts", "; the answer starts")


def words_for_logs(kind: str, words: str, messages: Sequence[Any], *more: object) -> Discreet:
    """Return the words of a fault for a log; `messages` and `more` are what was sent."""
    if kind in _OF_ANSWERS:
        words = words.partition(": ")[0]
        for announcement in _BEFORE_A_QUOTE:
            words = words.removesuffix(announcement)
    return Discreet(words, lambda: _texts([*messages, *more]))


def trace_for_logs(error: BaseException) -> str:
    """Return where an unexpected error arose, and its class; not its words, which may quote what was sent."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{frames}{type(error).__qualname__} (its words are left out)"


def _texts(value: object) -> Iterator[str]:
    """Yield every text inside a JSON value, in the spelling of an error message as well."""
    if isinstance(value, str):
        yield value
        if "\n" in value or '"' in value:
            yield value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)
