"""Calls written as `[Get Weather(city="Oslo", days=3), other()]` -> names and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from producer.adapters.literals import NotReadableError, loose_value

_LOOKS_LIKE_CALLS = re.compile(r"\[\s*[^\W\d][\w .:/\-]*\(.*\)\s*\]", re.DOTALL)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def bracket_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls as `{"name": ..., "arguments": {...}}`; an empty list for a text that is no list of calls.

    Names may hold spaces; values are JSON or Python literals. Raises NotReadableError for calls that break their form.
    """
    text = text.strip()
    if not _LOOKS_LIKE_CALLS.fullmatch(text):
        return []
    return [_call(piece.strip()) for piece in _split(text[1:-1])]


def _call(piece: str) -> dict[str, Any]:
    name, opened, rest = piece.partition("(")
    if not opened or not rest.endswith(")") or not name.strip():
        raise NotReadableError(f"{piece[:60]!r} is no call")
    arguments: dict[str, Any] = {}
    for argument in _split(rest[:-1]):
        key, equals, value = argument.partition("=")
        key = key.strip().strip("\"'")
        if not equals or not key or key in arguments:
            raise NotReadableError(f"{argument.strip()[:60]!r} is no named argument")
        arguments[key] = loose_value(value)
    return {"name": name.strip(), "arguments": arguments}


def _split(text: str) -> Iterator[str]:
    """Yield the pieces between commas that stand in no bracket and no quotes; nothing for a blank text.

    Raises NotReadableError for brackets or quotes that do not close.
    """
    if not text.strip():
        return
    expected: list[str] = []
    start = at = 0
    while at < len(text):
        char = text[at]
        if char in "\"'" and _begins_text(text, at):
            at = _end_of_quote(text, at)
        elif char in _CLOSING:
            expected.append(_CLOSING[char])
        elif char in ")]}":
            if not expected or expected.pop() != char:
                raise NotReadableError("a bracket does not match")
        elif char == "," and not expected:
            yield text[start:at]
            start = at + 1
        at += 1
    if expected:
        raise NotReadableError("a bracket is not closed")
    yield text[start:]


def _begins_text(text: str, at: int) -> bool:
    """Tell whether a quote begins a value: an apostrophe in a name does not."""
    return text[:at].rstrip()[-1:] in {"", "=", ",", "(", "[", "{", ":"}


def _end_of_quote(text: str, at: int) -> int:
    """Return where the quote that begins at `at` ends. Raises NotReadableError when it does not."""
    end = at + 1
    while end < len(text):
        if text[end] == "\\":
            end += 1
        elif text[end] == text[at]:
            return end
        end += 1
    raise NotReadableError("a quote is not closed")
